"""An S3 server in this process, and faults in front of its answers."""

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

Fault = int | Literal["cut", "stale", "lost"]
NAME = "versions"


class Bucket:
    """A bucket, whose requests pass by `before`.

    It is a function of (method, path) that returns None, a status to fail with, `cut`: half of the body, `stale`: the answer that
    the same request had before, or `lost`: the request is carried out, and answered with 500.
    """

    def __init__(self, server: ThreadedMotoServer) -> None:
        host, port = server.get_host_and_port()
        self.endpoint, self.url = f"http://{host}:{port}", f"s3://{NAME}/here"
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
        }
        self.requests: list[tuple[str, str]] = []
        self.answered: list[str] = []
        self.before: Callable[[str, str], Fault | None] = lambda method, path: None
        self._earlier: dict[tuple[object, ...], tuple[str, list[tuple[str, str]], bytes]] = {}

    def answer(self, application: Callable[..., object], environ: dict[str, object], start: Callable[..., object]) -> object:
        method, path = str(environ["REQUEST_METHOD"]), str(environ["PATH_INFO"])
        self.requests.append((method, path))
        fault = self.before(method, path)
        if isinstance(fault, int):
            start(f"{fault} {http.client.responses[fault]}", [("Content-Length", "0")])
            return [b""]
        key = (method, path, environ.get("QUERY_STRING"), environ.get("HTTP_RANGE"))
        if fault == "stale" and method in ("GET", "HEAD") and key in self._earlier:
            status, headers, body = self._earlier[key]
        else:
            status, headers, body = self._answered(application, environ)
        self.answered.append(status)
        if method in ("GET", "HEAD") and status[:3] in ("200", "206", "404"):
            self._earlier.setdefault(key, (status, headers, body))
        if fault == "lost":
            start("500 Internal Server Error", [("Content-Length", "0")])
            return [b""]
        if fault == "cut":
            start(status, [*headers, ("Connection", "close")])
            return [body[: len(body) // 2]]
        start(status, headers)
        return [body]

    def _answered(
        self, application: Callable[..., object], environ: dict[str, object]
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        begun: list[object] = []
        body = b"".join(application(environ, lambda *arguments: begun.extend(arguments)))
        return begun[0], begun[1], body


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Run a server with an empty bucket, and let the environment name it."""
    with serving() as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        yield bucket


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Bucket]:
    """Run a server with an empty bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    bucket = Bucket(server)
    application = server._server.app
    server._server.app = lambda environ, start: bucket.answer(application, environ, start)
    server._server.RequestHandlerClass = _Quiet
    urlopen(Request(f"{bucket.endpoint}/moto-api/reset", method="POST")).close()
    urlopen(Request(f"{bucket.endpoint}/{NAME}", method="PUT")).close()
    bucket.requests.clear()
    try:
        yield bucket
    finally:
        server.stop()
