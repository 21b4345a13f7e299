"""vLLM's own control of a server over HTTP, as its documentation of RL uses it (0.26 and later, in dev mode)."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Control:
    """A server at `host:port`. Its methods raise RuntimeError for any status but 200.

    It has the four methods of vLLM's VLLMWeightSyncClient.
    """

    def __init__(self, server: str, timeout: float = 300.0) -> None:
        self._server, self._timeout = server, timeout

    def post(self, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection(self._server, timeout=self._timeout)
        try:
            connection.request("POST", path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"expected 200 for {path}, got {answer.status}: {content[:500]!r}")
        return json.loads(content) if content else None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep requests, and go on with them at the end with caches of no version before."""
        self.post("/pause?mode=keep")
        try:
            yield
            self.post("/reset_prefix_cache")
        finally:
            self.post("/resume")

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of every worker."""
        return self.post("/collective_rpc", {"method": method, "args": list(arguments), "kwargs": options})

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("/finish_weight_update")
