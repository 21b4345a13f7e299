"""What the daemon shows over HTTP, read only.

    /            the status page: one file of HTML, script and style each, nothing from elsewhere
    /api/status  what it shows, as JSON (status.py)
    /metrics     for Prometheus
    /healthz     200 while the process is alive
    /readyz      200 while the store is open and publishers are taken, else 503 with the reason

The probes are everybody's. The rest is judged where there is security; else, on the loopback, it is shown to those alone who ask
for an address or `localhost`: a page of the web that has its own name lead here (DNS rebinding) gets nothing.
"""

import ipaddress
import json
import re
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from importlib import resources
from typing import Any

from resharder.server.web.http import Answer, HttpServer, Request

_PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_FRESH = 0.5  # seconds that a status may be old: however many look, it is made twice a second

Judge = Callable[[Request], Answer | None]


class Web:
    """`status` and `metrics` are asked on threads of the server; `unready` says why no publisher is taken, empty where they are.
    `judge`: None where the request may be answered, else what is answered instead. Raises OSError, and ValueError for what is no
    address."""

    def __init__(
        self,
        listen: str,
        *,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[str], tuple[bytes, str]],
        unready: Callable[[], str],
        judge: Judge | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        host, port = parse_listen(listen)
        self._status, self._metrics, self._unready = status, metrics, unready
        self._judge = judge or (_by_host if is_loopback(host) else lambda request: None)
        self._lock = threading.Lock()
        self._made, self._made_at = b"", float("-inf")
        folder = resources.files(__package__) / "static"
        self._page = {path: Answer((folder / name).read_bytes(), kind) for path, (name, kind) in _PAGE.items()}
        self._server = HttpServer(host, port, self._answer, tls)
        self.listen = f"{host}:{self._server.port}"

    def close(self) -> None:
        self._server.close()

    def _answer(self, request: Request) -> Answer:
        if request.path == "/healthz":
            return Answer(b"alive\n")
        if request.path == "/readyz":
            reason = self._unready()
            return Answer(f"{reason}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE) if reason else Answer(b"ready\n")
        if (refused := self._judge(request)) is not None:
            return refused
        if request.path == "/metrics":
            return Answer(*self._metrics(request.header("accept")))
        if request.path == "/api/status":
            return Answer(self._fresh(), "application/json")
        if (page := self._page.get(request.path)) is not None:
            return Answer(
                page.body, page.kind, headers=(("Content-Security-Policy", _POLICY), ("Referrer-Policy", "no-referrer"))
            )
        return Answer(b"there is nothing here\n", status=HTTPStatus.NOT_FOUND)

    def _fresh(self) -> bytes:
        with self._lock:
            if time.monotonic() > self._made_at + _FRESH:
                self._made = json.dumps(self._status(), separators=(",", ":")).encode()
                self._made_at = time.monotonic()
            return self._made


def parse_listen(listen: str) -> tuple[str, int]:
    """(host, port) of host:port. Raises ValueError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"expected host:port, got {listen!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _by_host(request: Request) -> Answer | None:
    host = re.sub(r":\d+$", "", request.header("host"))
    if host == "localhost":
        return None
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return Answer(b"expected this server's address or localhost as host\n", status=HTTPStatus.MISDIRECTED_REQUEST)
    return None
