"""An S3 server in this process, and faults in front of its answers."""

import http.client
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer
from werkzeug.serving import WSGIRequestHandler

Answer = Callable[[dict[str, object], Callable[..., object]], object]
NAME = "versions"


class Bucket:
    """A bucket, whose requests pass by `before`: a function of (method, path) that returns a status to fail with, or None."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        host, port = server.get_host_and_port()
        self.endpoint, self.url = f"http://{host}:{port}", f"s3://{NAME}/here"
        self.requests: list[tuple[str, str]] = []
        self.answered: list[str] = []
        self.before: Callable[[str, str], int | None] = lambda method, path: None

    def answer(self, application: Callable[..., object], environ: dict[str, object], start: Callable[..., object]) -> object:
        method, path = str(environ["REQUEST_METHOD"]), str(environ["PATH_INFO"])
        self.requests.append((method, path))
        if status := self.before(method, path):
            start(f"{status} {http.client.responses[status]}", [("Content-Length", "0")])
            return [b""]

        def begin(status: str, *arguments: object) -> object:
            self.answered.append(status)
            return start(status, *arguments)

        return application(environ, begin)


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Run a server with an empty bucket, and let the environment name it."""
    monkeypatch.setattr(WSGIRequestHandler, "log", lambda *arguments: None)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    bucket = Bucket(server)
    application = server._server.app
    server._server.app = lambda environ, start: bucket.answer(application, environ, start)
    environment = {
        "AWS_ENDPOINT_URL": bucket.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    urlopen(Request(f"{bucket.endpoint}/moto-api/reset", method="POST")).close()
    urlopen(Request(f"{bucket.endpoint}/{NAME}", method="PUT")).close()
    bucket.requests.clear()
    try:
        yield bucket
    finally:
        server.stop()
