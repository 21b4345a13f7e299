"""The gate in front of a small ASGI app."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from resharder.client.inference.control.gate import Gate, GateMiddleware, Position, ServerLease
from resharder.client.inference.vllm.route_rules import ROUTES
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

INFERENCE = ["/v1/completions", "/v1/models", "/inference/v1/generate", "/generate", "/tokenize", "/a/route/of/another/plugin"]
STORED = ["/v1/responses/resp_1"]
HEALTH = ["/health", "/ping"]
INNOCENT = ["/metrics", "/version"]


class Client(httpx.AsyncClient):
    """Requests to the gated app; `/slow` answers when `finish` is set and says so in `started`. `installed`: in the engine."""

    def __init__(self, gate: Gate) -> None:
        self.installed = 0
        self.started, self.finish = asyncio.Event(), asyncio.Event()

        async def fine(request: Request) -> PlainTextResponse:
            return PlainTextResponse("fine")

        async def slow(request: Request) -> PlainTextResponse:
            self.started.set()
            await self.finish.wait()
            return PlainTextResponse("fine")

        async def stream(request: Request) -> StreamingResponse:
            async def tokens():  # type: ignore[no-untyped-def]
                yield b"1"
                self.started.set()
                await self.finish.wait()
                yield b"2"

            return StreamingResponse(tokens())

        routes = [Route(path, fine) for path in INFERENCE + HEALTH + INNOCENT + STORED]
        app = Starlette(routes=[*routes, Route("/slow", slow), Route("/stream", stream)])
        app.add_middleware(GateMiddleware, gate=gate, routes=ROUTES, installed=lambda: self.installed)
        super().__init__(transport=httpx.ASGITransport(app=app), base_url="http://test")


def with_client(gate: Gate, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Client(gate) as client:
            await scenario(client)

    asyncio.run(run())


def header(response: httpx.Response) -> str:
    return response.headers["X-Resharder-Version"]


def test_before_the_first_version_every_inference_and_health_route_is_refused_at_once() -> None:
    async def scenario(client: Client) -> None:
        for path in INFERENCE + HEALTH:
            response = await client.get(path)
            assert (response.status_code, header(response)) == (503, "none"), path
            assert response.headers["Retry-After"] == "1"
            assert response.json()["error"]["message"] == "not serving: no version is confirmed yet"

    with_client(Gate(), scenario)


def test_metrics_and_version_answer_while_the_gate_is_shut() -> None:
    async def scenario(client: Client) -> None:
        for path in INNOCENT:
            response = await client.get(path)
            assert (response.status_code, header(response)) == (200, "none")

    with_client(Gate(), scenario)


def test_an_open_gate_lets_everything_pass_and_the_header_names_what_is_installed_not_what_the_gate_was_told() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        gate.open(6)
        client.installed = 7
        for path in INFERENCE + HEALTH + INNOCENT:
            response = await client.get(path)
            assert (response.status_code, header(response)) == (200, "7"), path

    with_client(gate, scenario)


def test_with_prefer_requests_pass_on_vllms_own_weights_and_are_told_that_no_version_made_the_answer() -> None:
    gate = Gate(prefer=True)

    async def scenario(client: Client) -> None:
        assert header(await client.get("/v1/completions")) == "none"
        client.installed = 1
        gate.open(1)
        assert header(await client.get("/v1/completions")) == "1"

    with_client(gate, scenario)


def test_a_request_that_comes_during_an_install_waits_and_gets_the_new_version() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        gate.open(1)
        gate.hold("installing")
        waiting = asyncio.create_task(client.get("/v1/completions"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert (await client.get("/health")).status_code == 200
        client.installed = 2
        gate.open(2)
        response = await waiting
        assert (response.status_code, header(response)) == (200, "2")

    with_client(gate, scenario)


def test_an_install_that_takes_too_long_turns_waiting_and_new_requests_and_health_away(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(hold_seconds=0.2)

    async def waits_again(timeout: float | None) -> None:
        pytest.fail("a request that came late is not turned away at once")

    async def scenario(client: Client) -> None:
        gate.open(1)
        gate.hold("version 2 is being installed")
        waited = await client.get("/v1/completions")
        assert waited.status_code == 503
        assert waited.json()["error"]["message"] == "not serving: version 2 is being installed, for more than 0.2 s"
        monkeypatch.setattr(gate, "changed", waits_again)
        assert (await client.get("/v1/completions")).status_code == 503
        assert (await client.get("/health")).status_code == 503
        gate.open(2)
        assert (await client.get("/health")).status_code == 200

    with_client(gate, scenario)


def test_a_torn_server_turns_waiting_requests_away_at_once_and_stays_shut_while_another_install_runs() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        gate.open(1)
        gate.hold("installing")
        waiting = asyncio.create_task(client.get("/v1/completions"))
        await asyncio.sleep(0.05)
        gate.shut("installing version 2 failed")
        assert (await waiting).status_code == 503
        gate.hold("installing")
        assert (await client.get("/health")).json()["error"]["message"] == "not serving: installing version 2 failed"
        gate.open(1)
        assert (await client.get("/v1/completions")).status_code == 200

    with_client(gate, scenario)


def test_the_header_of_a_stream_names_no_version() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        client.installed = 1
        gate.open(1)
        client.finish.set()
        response = await client.get("/stream")
        assert (header(response), response.content) == ("streamed", b"12")

    with_client(gate, scenario)


def test_an_answer_that_is_read_again_by_its_id_names_no_version() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        client.installed = 2
        gate.open(2)
        response = await client.get("/v1/responses/resp_1")
        assert (response.status_code, header(response)) == (200, "none")

    with_client(gate, scenario)


def test_a_websocket_is_closed_with_try_again_later_while_the_gate_is_shut_and_accepted_when_open() -> None:
    gate = Gate()

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    app = Starlette(routes=[WebSocketRoute("/v1/realtime", echo)])
    app.add_middleware(GateMiddleware, gate=gate, routes=ROUTES, installed=lambda: 0)
    client = TestClient(app)
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/realtime"):
        pass
    assert refused.value.code == 1013
    gate.open(4)
    with client.websocket_connect("/v1/realtime") as session:
        assert dict(session.extra_headers or [])[b"x-resharder-version"] == b"streamed"


def test_a_root_path_in_front_of_a_route_changes_nothing() -> None:
    app = Starlette(routes=[Route("/metrics", lambda request: PlainTextResponse("fine"))])
    app.add_middleware(GateMiddleware, gate=Gate(), routes=ROUTES, installed=lambda: 0)
    client = TestClient(app, root_path="/api")
    assert client.get("/api/metrics").status_code == 200
    assert client.get("/api/v1/completions").status_code == 503


def test_requests_are_counted_from_admission_to_the_end_of_the_answer_and_the_last_one_at_a_closed_gate_is_told() -> None:
    gate = Gate()
    emptied: list[int] = []
    gate.emptied.connect(lambda: emptied.append(gate.in_flight))

    async def scenario(client: Client) -> None:
        gate.open(1)
        await client.get("/v1/completions")
        assert (gate.in_flight, emptied) == (0, []), "an open gate that is idle is no news"
        slow = asyncio.create_task(client.get("/slow"))
        await client.started.wait()
        client.started.clear()
        stream = asyncio.create_task(client.get("/stream"))
        await client.started.wait()
        assert gate.in_flight == 2
        gate.shut("drained for maintenance")
        for path in ("/health", "/metrics", "/v1/completions"):
            await client.get(path)
        assert (gate.in_flight, emptied) == (2, [])
        client.finish.set()
        assert [(await answer).status_code for answer in (slow, stream)] == [200, 200]
        assert (gate.in_flight, emptied) == (0, [0])

    with_client(gate, scenario)


def test_a_request_that_breaks_or_whose_client_goes_away_counts_no_more() -> None:
    gate = Gate()

    async def scenario(client: Client) -> None:
        gate.open(1)
        gone = asyncio.create_task(client.get("/slow"))
        await client.started.wait()
        assert gate.in_flight == 1
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert gate.in_flight == 0

    with_client(gate, scenario)


def test_a_websocket_counts_until_it_is_closed() -> None:
    gate = Gate()
    gate.open(1)

    async def echo(socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(str(gate.in_flight))
        await socket.close()

    app = Starlette(routes=[WebSocketRoute("/v1/realtime", echo)])
    app.add_middleware(GateMiddleware, gate=gate, routes=ROUTES, installed=lambda: 0)
    with TestClient(app).websocket_connect("/v1/realtime") as session:
        assert session.receive_text() == "1"
    assert gate.in_flight == 0


class Leased:
    """A gate opened on version 1 at time 0, under a lease of 10 s."""

    def __init__(self, *, strict: bool) -> None:
        self.now = 0.0
        self.lease = ServerLease(lambda: self.now)
        self.gate = Gate(lease=self.lease, clock=lambda: self.now)
        self.lease.renew(10, strict=strict)
        self.gate.open(1)


def test_where_no_server_is_allowed_without_a_lease_the_gate_shuts_when_it_ends_and_stays_so_until_it_is_opened_again() -> None:
    leased = Leased(strict=True)
    gate = leased.gate

    async def scenario(client: Client) -> None:
        leased.now = 9.9
        assert (await client.get("/v1/completions")).status_code == 200
        leased.now = 10.0
        for path in ("/v1/completions", "/health"):
            refused = await client.get(path)
            assert refused.status_code == 503
            wanted = "not serving: the lease has ended, and the fleet allows no server to answer without one"
            assert refused.json()["error"]["message"] == wanted
        leased.lease.renew(20, strict=True)
        assert (await client.get("/health")).status_code == 503
        gate.open(1)
        assert (await client.get("/health")).status_code == 200

    with_client(gate, scenario)


def test_a_lease_that_ended_and_was_renewed_while_nobody_asked_shuts_the_gate_all_the_same() -> None:
    leased = Leased(strict=True)
    leased.lease.renew(11, strict=True)
    assert leased.gate.position is Position.OPEN
    leased.now = 12
    leased.lease.renew(30, strict=True)
    assert leased.gate.position is Position.SHUT
    leased.gate.open(1)
    assert leased.gate.position is Position.OPEN


def test_elsewhere_a_server_serves_on_without_a_lease() -> None:
    leased = Leased(strict=False)
    leased.now = 100
    assert leased.gate.position is Position.OPEN
    leased.lease.renew(120, strict=True)
    assert leased.gate.position is Position.OPEN, "it was not strict while it ended"
