"""vLLM's own routes that change the engine: which of them are refused while a server follows the daemon."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from resharder.client.inference.control.gate import Gate, GateMiddleware
from resharder.client.inference.control.labels import VERSION_HEADER
from resharder.client.inference.control.route_rules import Handling, RouteRulesMiddleware
from resharder.client.inference.vllm.endpoint import EndpointPlugin
from resharder.client.inference.vllm.route_rules import ROUTES, RULES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.support.vllm_places import cli_args

REFUSED = [path for (method, path), rule in RULES.items() if rule.handling is Handling.REFUSED and method == "POST"]
PASSES = [path for (_, path), rule in RULES.items() if rule.handling is not Handling.REFUSED and "{" not in path]


def app(gate: Gate) -> Starlette:
    async def reached(request: Request) -> JSONResponse:
        body = await request.body()
        return JSONResponse({"body": body.decode()})

    paths = {*REFUSED, *PASSES, "/adapters/{adapter_name}"}
    made = Starlette(routes=[Route(path, reached, methods=["POST", "GET", "DELETE"]) for path in paths])
    made.add_middleware(GateMiddleware, gate=gate, routes=ROUTES, installed=lambda: 0)
    made.add_middleware(RouteRulesMiddleware, rules=RULES)
    return made


def ask(path: str, body: Any = None, gate: Gate | None = None, method: str = "POST") -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app(gate or Gate(prefer=True)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.request(method, path, content=content)

    return asyncio.run(run())


@pytest.mark.parametrize("path", REFUSED)
def test_a_call_that_changes_weights_or_the_pause_is_answered_409_with_the_reason(path: str) -> None:
    refused = ask(path, {"method": "reload_weights", "action": "reset"})
    assert refused.status_code == 409
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == (409, "ConflictError")
    assert "Resharder" in error["message"]
    assert RULES["POST", path].instead in error["message"]
    assert refused.headers[VERSION_HEADER] == "none"


def test_a_call_is_refused_at_once_wherever_the_gate_stands() -> None:
    gate = Gate()
    assert ask("/resume", gate=gate).status_code == 409
    assert ask("/sleep", gate=gate).status_code == 503


@pytest.mark.parametrize("path", PASSES)
def test_inference_and_reads_pass(path: str) -> None:
    assert ask(path, {"a": 1}).json() == {"body": '{"a": 1}'}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/collective_rpc", {"method": "resharder_fingerprint"}),
        ("/weight_checker", {"action": "checksum"}),
        ("/weight_checker", {"action": "compare", "baseline": {}}),
    ],
)
def test_reads_among_the_calls_whose_body_decides_pass_with_their_body(path: str, body: dict[str, Any]) -> None:
    assert ask(path, body).json() == {"body": json.dumps(body)}


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'{"method": "resharder_fingerprint", "method": "reload_weights"}', b" " * (1 << 17)]
)
def test_a_body_that_does_not_name_a_read_is_refused(body: bytes) -> None:
    assert ask("/collective_rpc", body).status_code == 409


def test_a_path_with_any_part_is_refused_by_its_method() -> None:
    assert ask("/adapters/one", method="DELETE").status_code == 409
    assert ask("/adapters/one", method="GET").status_code == 200


def test_a_get_of_a_refused_path_is_left_to_vllm() -> None:
    assert ask("/pause", method="GET").status_code == 200


@pytest.mark.compat("other")
def test_every_route_of_the_installed_vllm_that_may_change_something_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = routes_of_vllm(monkeypatch)
    assert ("POST", "/collective_rpc") in routes, "dev routes are not among them"
    assert ("POST", "/update_weights") in routes
    assert sorted(routes - RULES.keys()) == []


@pytest.mark.compat("other")
def test_a_server_that_does_not_follow_gets_no_middleware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARDER_ENDPOINT", raising=False)
    made = Starlette()
    EndpointPlugin().attach_router(made)
    assert made.user_middleware == []
    monkeypatch.setenv("RESHARDER_ENDPOINT", "localhost:1")
    monkeypatch.setenv("RESHARDER_SERVER_ID", "a")
    EndpointPlugin().attach_router(made)
    assert [middleware.cls for middleware in made.user_middleware] == [RouteRulesMiddleware, GateMiddleware]


def routes_of_vllm(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Methods and paths beyond GET, of an API server with every option that adds routes."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    try:
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # 0.28 and older
        from vllm.entrypoints.openai.api_server import build_app  # type: ignore[no-redef, attr-defined]
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(["--tokens-only"])
    made = build_app(args, ("generate", "embed", "classify", "score", "transcription", "realtime", "render"))
    found: set[tuple[str, str]] = set()
    for route in made.routes:
        methods = getattr(route, "methods", None) or set()
        found |= {(method, route.path) for method in methods - {"GET", "HEAD", "OPTIONS"}}
    return found
