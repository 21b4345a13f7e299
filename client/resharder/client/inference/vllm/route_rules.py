"""Rules for vLLM's own routes that change the engine, on a server that follows the daemon.

    HARMLESS      inference and reads; caches, profilers, aborted requests       passes
    COORDINATED   sleep and wake_up: serialised with orders (control/control.py) passes
    REFUSED       weights, labels, the pause, workers' RPCs                      409 and the command to use instead

With the weight transfer backend `resharder`, the routes of `weight_transfer.py` pass.

vLLM adds routes with `VLLM_SERVER_DEV_MODE`, `--tokens-only` and other options. The table covers 0.26, 0.28,
0.32 and 0.33; a test compares it with the routes of the installed vLLM. A path that is not in the table passes,
because other plugins have routes too.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resharder.client.inference.control.gate import App, Receive, Scope
from resharder.client.inference.control.labels import UNCONFIRMED, Message, Send, header

_PUBLISH = "publish the weights as a version (`resharder.client.connect`, or `resharder import`)"
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


_HARMLESS, _COORDINATED = RouteRule(Handling.HARMLESS), RouteRule(Handling.COORDINATED)
_WEIGHTS = RouteRule(Handling.REFUSED, _PUBLISH)
_UNSUPPORTED = RouteRule(Handling.REFUSED, "restart the server with the other configuration")

_INFERENCE = (
    "/classify",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/detokenize",
    "/generative_scoring",
    "/inference/v1/generate",
    "/invocations",
    "/ping",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/decisions",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/rerank",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
    "/v1/score",
    "/v1/systemone",
    "/v2/embed",
    "/v2/rerank",
)
_REQUESTS_AND_CACHES = (
    "/abort_requests",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/reset_prefix_cache",
    "/start_profile",
    "/stop_profile",
)

# All routes of vLLM except GET. A segment in braces matches any segment.
RULES: Mapping[tuple[str, str], RouteRule] = {
    **{("POST", path): _HARMLESS for path in (*_INFERENCE, *_REQUESTS_AND_CACHES)},
    ("POST", "/sleep"): _COORDINATED,
    ("POST", "/wake_up"): _COORDINATED,
    ("POST", "/release_kv_cache_memory"): RouteRule(Handling.REFUSED, "use `resharder sleep --server SERVER`"),
    ("POST", "/pause"): RouteRule(Handling.REFUSED, "use `resharder drain --server SERVER`"),
    ("POST", "/resume"): RouteRule(Handling.REFUSED, "use `resharder resume --server SERVER`"),
    ("POST", "/init_weight_transfer_engine"): _WEIGHTS,
    ("POST", "/shutdown_weight_transfer_engine"): _WEIGHTS,
    ("POST", "/start_weight_update"): _WEIGHTS,
    ("POST", "/start_draft_weight_update"): _WEIGHTS,
    ("POST", "/update_weights"): _WEIGHTS,
    ("POST", "/finish_weight_update"): _WEIGHTS,
    ("POST", "/update_weight_version"): _WEIGHTS,
    ("POST", "/weight_checker"): RouteRule(Handling.REFUSED, _PUBLISH, "action", frozenset({"checksum", "compare"})),
    ("POST", "/collective_rpc"): RouteRule(
        Handling.REFUSED, _PUBLISH, "method", frozenset({"resharder_describe", "resharder_fingerprint"})
    ),
    ("POST", "/v1/load_lora_adapter"): _UNSUPPORTED,
    ("POST", "/v1/unload_lora_adapter"): _UNSUPPORTED,
    ("POST", "/adapters"): _UNSUPPORTED,
    ("DELETE", "/adapters/{adapter_name}"): _UNSUPPORTED,
    ("POST", "/scale_elastic_ep"): _UNSUPPORTED,
    ("POST", "/fault_tolerance/apply"): _UNSUPPORTED,
}


_TEMPLATES = [(method, path.split("/"), rule) for (method, path), rule in RULES.items() if "{" in path]


def rule_of(method: str, path: str) -> RouteRule:
    """Return the rule of a call; `HARMLESS` if the table has none."""
    if rule := RULES.get((method, path)):
        return rule
    parts = path.split("/")
    return next((rule for verb, template, rule in _TEMPLATES if verb == method and _fits(parts, template)), _HARMLESS)


def _fits(parts: list[str], template: list[str]) -> bool:
    pairs = zip(parts, template, strict=False)
    return len(parts) == len(template) and all(part == other or other.startswith("{") for part, other in pairs)


def refusal(method: str, path: str, body: bytes | None) -> str:
    """Return why a call is refused; empty if it passes.

    Args:
        method: HTTP method.
        path: Path, without the application's root path.
        body: The body; `None` if it is too long.
    """
    rule = rule_of(method, path)
    if rule.handling is not Handling.REFUSED or (rule.field and _value(body, rule.field) in rule.passes):
        return ""
    passes = f" ({rule.field} other than {' or '.join(sorted(rule.passes))})" if rule.field else ""
    return f"{method} {path}{passes} is refused: this server follows a Resharder daemon; {rule.instead}"


def _value(body: bytes | None, field: str) -> str:
    """Return a field of a JSON body. The last of duplicate keys counts, as in vLLM."""
    try:
        parsed = json.loads(body or b"")
    except ValueError:
        return ""
    return str(parsed.get(field, "")) if isinstance(parsed, dict) else ""


class RouteRulesMiddleware:
    """ASGI middleware that applies the rules. It precedes the gate, so a call is refused at any position and does not wait.

    Args:
        app: The application behind the rules.
        passing: Paths that pass whatever the rules are; read at each request.
    """

    def __init__(self, app: App, passing: Collection[str] = ()) -> None:
        self._app, self._passing = app, passing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
        if path in self._passing:
            await self._app(scope, receive, send)
            return
        rule = rule_of(method, path)
        body: bytes | None = b""
        if rule.field:
            body, receive = await read_body(receive, _LONGEST_BODY)
        if reason := refusal(method, path, body):
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
