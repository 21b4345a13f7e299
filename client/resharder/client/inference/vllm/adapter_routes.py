"""Requests for adapters on an API server: each waits at the gate of its adapter, and gets the version in service.

vLLM looks an adapter up by the name in a request's `model`, in `OpenAIServingModels.lora_requests`
(`entrypoints/openai/models/serving.py`; 0.28 to 0.32). `AdapterNames` takes the place of that dictionary.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from resharder.client.inference.control.gate import App, Receive, Scope, refuse
from resharder.client.inference.control.labels import Send
from resharder.client.inference.control.route_rules import read_body
from resharder.client.inference.vllm.adapter_engine import Adapter


class AdapterNames(dict[str, Any]):
    """The adapters of an API server by name. `values` has each under its plain name, for the list of models."""

    def __init__(self, adapters: Collection[Adapter]) -> None:
        super().__init__()
        self._adapters = {adapter.name: adapter for adapter in adapters}

    def __getitem__(self, name: str) -> Any:
        return self._adapters[name].request()

    def __contains__(self, name: object) -> bool:
        return name in self._adapters and bool(self._adapters[str(name)].version)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the `LoRARequest` of an adapter's version."""
        return self[name] if name in self else default  # noqa: SIM401 (that would be this method)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._adapters if name in self])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def keys(self) -> Any:
        """Return the names of the adapters that have a version."""
        return list(self)

    def values(self) -> Any:
        """Return a `LoRARequest` with the name of each adapter."""
        found = [self[name] for name in self]
        for name, request in zip(self, found, strict=True):
            request.lora_name = name
        return found

    def items(self) -> Any:
        """Return the pairs of `keys` and `values`."""
        return list(zip(self, self.values(), strict=True))


class AdapterGateMiddleware:
    """ASGI middleware that applies an adapter's gate to requests for it. The gate of the base has admitted them before.

    Args:
        app: The application behind it.
        adapters: The adapters by name; read at each request.
    """

    def __init__(self, app: App, adapters: Mapping[str, Adapter]) -> None:
        self._app, self._adapters = app, adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._adapters or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, receive = await read_body(receive, None)
        adapter = self._adapters.get(_model(body))
        if adapter is None:
            await self._app(scope, receive, send)
            return
        refusal = await adapter.gate.enter() or adapter.unbound()
        if refusal is not None:
            await refuse(scope, receive, send, refusal)
            return
        with adapter.gate.answering():
            await self._app(scope, receive, send)


def _model(body: bytes | None) -> str:
    if not body or b'"model"' not in body:
        return ""
    try:
        parsed = json.loads(body)
    except ValueError:
        return ""
    return str(parsed.get("model", "")) if isinstance(parsed, dict) else ""
