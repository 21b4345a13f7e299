"""Rules for an engine's own routes that change the engine, on a server that follows the daemon.

    HARMLESS      inference and reads; caches, profilers, aborted requests       passes
    COORDINATED   sleep and wake_up: serialised with orders (`control.py`)       passes
    REFUSED       weights, labels, the pause, workers' RPCs                      409 and the command to use instead

Each engine has its table of rules. A path that is not in the table passes, because other plugins have routes too.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resharder.client.inference.control.gate import App, Receive, Scope
from resharder.client.inference.control.labels import UNCONFIRMED, Message, Send, header

PUBLISH = "publish the weights as a version (`resharder.client.connect`, or `resharder import`)"
"""Advice in the refusal of a call that changes weights."""
_LONGEST_BODY = 1 << 16  # bytes; a longer body of a call whose rule depends on the body is refused unread


class Handling(Enum):
    """Handling of a call of a route by a server that follows the daemon."""

    HARMLESS = "harmless"
    COORDINATED = "coordinated"
    REFUSED = "refused"


@dataclass(frozen=True)
class RouteRule:
    """How calls of a route are handled, and what to do instead of a refused one."""

    handling: Handling
    instead: str = ""
    """The action to use instead of a refused call."""
    field: str = ""
    """A field of the JSON body; a refused call passes if the field has one of the values `passes`."""
    passes: frozenset[str] = frozenset()


Rules = Mapping[tuple[str, str], RouteRule]
"""The rule of each route, by method and path. A segment of a path in braces matches any segment."""


def rule_of(rules: Rules, method: str, path: str) -> RouteRule:
    """Return the rule of a call; `HARMLESS` if the table has none."""
    if rule := rules.get((method, path)):
        return rule
    parts = path.split("/")
    templates = ((other.split("/"), rule) for (verb, other), rule in rules.items() if verb == method and "{" in other)
    return next((rule for template, rule in templates if _fits(parts, template)), RouteRule(Handling.HARMLESS))


def _fits(parts: list[str], template: list[str]) -> bool:
    pairs = zip(parts, template, strict=False)
    return len(parts) == len(template) and all(part == other or other.startswith("{") for part, other in pairs)


def refusal(rules: Rules, method: str, path: str, body: bytes | None) -> str:
    """Return why a call is refused; empty if it passes.

    Args:
        rules: The engine's rules.
        method: HTTP method.
        path: Path, without the application's root path.
        body: The body; `None` if it is too long.
    """
    rule = rule_of(rules, method, path)
    if rule.handling is not Handling.REFUSED or (rule.field and _value(body, rule.field) in rule.passes):
        return ""
    passes = f" ({rule.field} other than {' or '.join(sorted(rule.passes))})" if rule.field else ""
    return f"{method} {path}{passes} is refused: this server follows a Resharder daemon; {rule.instead}"


def _value(body: bytes | None, field: str) -> str:
    """Return a field of a JSON body. The last of duplicate keys counts, as in the engines."""
    try:
        parsed = json.loads(body or b"")
    except ValueError:
        return ""
    return str(parsed.get(field, "")) if isinstance(parsed, dict) else ""


class RouteRulesMiddleware:
    """ASGI middleware that applies the rules. It precedes the gate, so a call is refused at any position and does not wait.

    Args:
        app: The application behind the rules.
        rules: The engine's rules.
        passing: Paths that pass whatever the rules are; read at each request.
    """

    def __init__(self, app: App, rules: Rules, passing: Collection[str] = ()) -> None:
        self._app, self._rules, self._passing = app, rules, passing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._passing:
            await self._app(scope, receive, send)
            return
        rule = rule_of(self._rules, method, path)
        body: bytes | None = b""
        if rule.field:
            body, receive = await read_body(receive, _LONGEST_BODY)
        if reason := refusal(self._rules, method, path, body):
            await _refuse(send, reason)
            return
        await self._app(scope, receive, send)


async def read_body(receive: Receive, longest: int | None) -> tuple[bytes | None, Receive]:
    """Return the body, `None` if it has more than `longest` bytes, and a `receive` that repeats it."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        body, more = body + message.get("body", b""), message.get("more_body", False)
        if longest is not None and len(body) > longest:
            return None, receive
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return body, again


async def _refuse(send: Send, reason: str) -> None:
    error: dict[str, Any] = {"message": reason, "type": "ConflictError", "param": None, "code": 409}
    headers = [(b"content-type", b"application/json"), header(UNCONFIRMED)]
    await send({"type": "http.response.start", "status": 409, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
