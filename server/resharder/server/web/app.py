"""The daemon's read-only HTTP interface.

    /            the status page: one file each of HTML, script and style; nothing is loaded from other hosts
    /api/status  the page's data as JSON (status.py)
    /metrics     for Prometheus
    /healthz     200 while the process is alive
    /readyz      200 while the store is open and publishers are accepted, else 503 with the reason

Probes are open to every caller. The rest is subject to the access check where security is configured; otherwise, on the loopback,
it is served only under an IP address or `localhost` as host, so that a website that resolves its own name to this address (DNS
rebinding) reads nothing.
"""

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from importlib import resources
from typing import Any

import structlog
from resharder.server.infra.addresses import names_address
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PAGE = {
    "/": ("index.html", "text/html"),
    "/status.js": ("status.js", "text/javascript"),
    "/status.css": ("status.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_PROBES = ("/healthz", "/readyz")
_FRESH_SECONDS = 0.5  # the status is built at most twice a second, however many clients poll
_HEADERS = ((b"connection", b"close"), (b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_log = structlog.get_logger("resharder.web")

AccessCheck = Callable[[Request], Response | None]
"""Function of a request that returns None to admit it, or the response that refuses it."""


def probes_app(unready: Callable[[], str]) -> ASGIApp:
    """Return an application that has the probes alone, for a process that is no daemon yet. `unready` returns why."""

    def page(request: Request) -> Response:
        return PlainTextResponse(f"{unready()}\n", HTTPStatus.SERVICE_UNAVAILABLE)

    def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    return Starlette(routes=[Route("/healthz", healthz), Route("/{path:path}", page)])


def web_app(
    *,
    status: Callable[[], dict[str, Any]],
    metrics: Callable[[str], tuple[bytes, str]],
    unready: Callable[[], str],
    check: AccessCheck,
) -> ASGIApp:
    """Return the application. All callables run on worker threads.

    Args:
        status: Returns the data of the status page.
        metrics: Returns, for an `Accept` header, the exposition and its content type.
        unready: Returns why publishers are not accepted; empty if they are.
        check: Access check of everything except the probes.
    """

    def healthz(request: Request) -> Response:
        return PlainTextResponse("alive\n")

    def readyz(request: Request) -> Response:
        reason = unready()
        return PlainTextResponse(f"{reason}\n", HTTPStatus.SERVICE_UNAVAILABLE) if reason else PlainTextResponse("ready\n")

    def exposition(request: Request) -> Response:
        body, kind = metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    app = Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", exposition),
            Route("/api/status", _Cached(status).response),
            *(Route(path, _page(name, kind)) for path, (name, kind) in _PAGE.items()),
        ],
        middleware=[Middleware(_Checked, check=check)],
        exception_handlers={Exception: _failed, HTTPStatus.NOT_FOUND: _not_found},
    )
    return _Responses(app)


class _Cached:
    """Cache of the status as JSON, rebuilt when it is older than `_FRESH_SECONDS`."""

    def __init__(self, status: Callable[[], dict[str, Any]], clock: Callable[[], float] = time.monotonic) -> None:
        self._status, self._clock, self._lock = status, clock, threading.Lock()
        self._body, self._at = b"", float("-inf")

    def response(self, request: Request) -> Response:
        with self._lock:
            if self._clock() > self._at + _FRESH_SECONDS:
                self._body = json.dumps(self._status(), separators=(",", ":")).encode()
                self._at = self._clock()
            return Response(self._body, media_type="application/json")


def _page(name: str, kind: str) -> Callable[[Request], Response]:
    body = (resources.files(__package__) / "static" / name).read_bytes()
    headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}
    return lambda request: Response(body, media_type=kind, headers=headers)


class _Responses:
    """Middleware that adds the headers of every response: one response per connection, never cached."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        await self._app(scope, receive, with_headers)


class _Checked:
    """Middleware that applies the access check to everything except the probes."""

    def __init__(self, app: ASGIApp, check: AccessCheck) -> None:
        self._app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["path"] in _PROBES else await run_in_threadpool(self._check, Request(scope))
        await (refusal or self._app)(scope, receive, send)


def _failed(request: Request, error: Exception) -> Response:
    _log.error("request_failed", path=request.url.path, exc_info=error)
    return PlainTextResponse("the daemon failed: its log has the reason\n", HTTPStatus.INTERNAL_SERVER_ERROR)


def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse("there is nothing at this address\n", HTTPStatus.NOT_FOUND)


def admit_all(request: Request) -> Response | None:
    """Admit every request."""
    return None


def check_host(request: Request) -> Response | None:
    """Refuse requests whose `Host` is neither an IP address nor `localhost`, against DNS rebinding."""
    if names_address(request.headers.get("host", "")):
        return None
    return PlainTextResponse("expected an IP address or localhost as host\n", HTTPStatus.MISDIRECTED_REQUEST)
