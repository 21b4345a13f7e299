"""Leases of an API server of Kubernetes: resource versions, conflicts and the codes of its answers, over HTTP.

with LeaseApi() as api:
    KubernetesLease("rl", "resharder", 2.0, api.config)
    api.objects["rl/resharder"]["metadata"]["labels"] = {...}; api.touch("rl/resharder")
    api.failing = 503       # the code of every answer; 0: none
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from lightkube import KubeConfig
from lightkube.config.models import Cluster, User

_PATH = re.compile(r"/apis/coordination\.k8s\.io/v1/namespaces/([^/]+)/leases(?:/([^/?]+))?")
_REASONS = {404: "NotFound", 409: "Conflict", 503: "ServiceUnavailable", 403: "Forbidden"}


class LeaseApi:
    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.failing, self._version, self._lock = 0, 100, threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                found = _PATH.fullmatch(self.path.partition("?")[0])
                assert found is not None, self.path
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                code, answer = api.answer(self.command, found[1], found[2] or "", json.loads(body) if body else {})
                content = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.config = KubeConfig.from_one(cluster=Cluster(server=self.url), user=User(token="of-a-pod"))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, verb: str, namespace: str, name: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            if self.failing:
                return self._status(self.failing, "it fails")
            key = f"{namespace}/{name or given['metadata']['name']}"
            present = self.objects.get(key)
            if verb == "POST":
                if present is not None:
                    return self._status(409, f"leases {key} already exists")
            elif present is None:
                return self._status(404, f"leases {key} not found")
            if verb == "GET":
                assert present is not None
                return 200, present
            wanted = given["metadata"].get("resourceVersion")
            if verb == "PUT" and present is not None and wanted and wanted != present["metadata"]["resourceVersion"]:
                return self._status(409, f"leases {key}: the object has been modified")
            self.objects[key] = given
            self._count(key)
            return (201 if verb == "POST" else 200), given

    def touch(self, key: str) -> None:
        """Change an object as somebody else does, who leaves its content alone."""
        with self._lock:
            self._count(key)

    def _count(self, key: str) -> None:
        self._version += 1
        self.objects[key]["metadata"]["resourceVersion"] = str(self._version)

    def _status(self, code: int, message: str) -> tuple[int, dict[str, Any]]:
        return code, {
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": _REASONS[code], "message": message,
        }  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> "LeaseApi":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
