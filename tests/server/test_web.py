"""The daemon's HTTP server: what it answers, to whom, and that nobody can hold it."""

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any

import pytest
from resharder.server.infra.addresses import is_loopback, parse_listen
from resharder.server.web import listener
from resharder.server.web.app import AccessCheck, check_host, web_app
from resharder.server.web.listener import Listener
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from structlog.testing import capture_logs

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.populated_daemon import job
from tests.support.ports import free_port


class Stand:
    """A web of its own, with what it asks for."""

    def __init__(self, check: AccessCheck = check_host) -> None:
        self.unready, self.asked = "", 0
        self.error: type[Exception] | None = None
        self.metrics_made, self.metrics_size = 0, 0
        app = web_app(status=self.status, metrics=self.metrics, unready=lambda: self.unready, check=check)
        self.web = Listener(app, "127.0.0.1", 0)
        self.address = ("127.0.0.1", self.web.port)

    def status(self) -> dict[str, Any]:
        self.asked += 1
        if self.error:
            raise self.error
        return {"time": self.asked}

    def metrics(self, accept: str) -> tuple[bytes, str]:
        self.metrics_made += 1
        return b"resharder_up 1\n" + bytes(self.metrics_size), f"text/plain; accepted={accept}"

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(self.address, timeout=60)
        connection.sendall(sent)
        return connection


@pytest.fixture
def stand() -> Iterator[Stand]:
    made = Stand()
    yield made
    made.web.close()


def ended(connection: socket.socket) -> bool:
    """Waits for the other side to end it; whether nothing came before."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def received(connection: socket.socket) -> int:
    """Bytes until the other side ends it."""
    count = 0
    try:
        while part := connection.recv(1 << 20):
            count += len(part)
    except ConnectionResetError:
        pass
    return count


def test_probes_say_whether_the_process_lives_and_why_publishers_are_not_taken(stand: Stand) -> None:
    assert (stand.get("/healthz")[0].status, stand.get("/readyz")[0].status) == (200, 200)
    stand.unready = "the daemon is shutting down"
    answer, body = stand.get("/readyz")
    assert (answer.status, body) == (503, b"the daemon is shutting down\n")
    assert stand.get("/healthz")[0].status == 200


def test_the_page_and_its_parts_run_no_script_but_the_daemons_own(stand: Stand) -> None:
    for path, kind in (("/", "text/html"), ("/status.js", "text/javascript"), ("/status.css", "text/css")):
        answer, body = stand.get(path)
        assert (answer.status, answer.getheader("Content-Type").partition(";")[0]) == (200, kind)
        policy = dict(part.strip().split(" ", 1) for part in answer.getheader("Content-Security-Policy").split(";"))
        assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert b"http://" not in body.replace(b"http://www.w3.org", b""), "nothing comes from elsewhere"
        assert b"https://" not in body


def test_metrics_come_in_the_format_that_is_asked_for(stand: Stand) -> None:
    answer, body = stand.get("/metrics", Accept="application/openmetrics-text")
    assert (body, answer.getheader("Content-Type")) == (b"resharder_up 1\n", "text/plain; accepted=application/openmetrics-text")


def test_however_many_look_the_status_is_made_once_in_a_while(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resharder.server.web.app._FRESH_SECONDS", 1e9)
    assert [json.loads(stand.get("/api/status")[1]) for _ in range(3)] == [{"time": 1}] * 3
    monkeypatch.setattr("resharder.server.web.app._FRESH_SECONDS", -1.0)
    assert json.loads(stand.get("/api/status?fresh=1")[1]) == {"time": 2}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/", 200),
        ("POST", "/metrics", 405),
        ("GET", "/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("PUT", "/", 405),
    ],
)
def test_it_is_read_only_and_has_no_other_files(stand: Stand, method: str, path: str, status: int) -> None:
    answer, body = stand.get(path, method)
    assert answer.status == status
    assert (method == "HEAD") == (body == b"")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * (32 << 10) + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 6000, 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", 404),
        (b"GET / SPDY/3\r\n\r\n", 400),
    ],
    ids=["large", "many headers", "TLS", "for a proxy", "no HTTP"],
)
def test_what_is_no_request_is_refused(stand: Stand, sent: bytes, status: int) -> None:
    with stand.connect(sent) as connection:
        assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())


def test_on_the_loopback_a_page_that_has_its_name_lead_here_gets_nothing(stand: Stand) -> None:
    for host in ("evil.example", "evil.example:7678", "127.0.0.1.evil.example"):
        for path in ("/", "/metrics", "/api/status"):
            assert stand.get(path, Host=host)[0].status == HTTPStatus.MISDIRECTED_REQUEST
        assert stand.get("/healthz", Host=host)[0].status == 200
    for host in ("localhost:9", "127.0.0.1", "[::1]:7678", "[::1]", "10.1.2.3:80"):
        assert stand.get("/api/status", Host=host)[0].status == 200


def test_the_access_check_covers_everything_but_the_probes() -> None:
    def check(request: Request) -> Response | None:
        return None if request.headers.get("authorization") == "Bearer ok" else PlainTextResponse("no", HTTPStatus.UNAUTHORIZED)

    stand = Stand(check)
    try:
        for path in ("/", "/status.js", "/metrics", "/api/status", "/nothing"):
            assert stand.get(path)[0].status == 401, path
        assert stand.get("/metrics", Authorization="Bearer ok")[0].status == 200
        assert (stand.get("/healthz")[0].status, stand.get("/readyz")[0].status) == (200, 200)
        assert stand.asked == 0, "nothing was made for those who may not see it"
    finally:
        stand.web.close()


@pytest.mark.parametrize("error", [ZeroDivisionError, OSError])
def test_an_answer_that_fails_is_one_answer(stand: Stand, error: type[Exception]) -> None:
    stand.error = error
    with capture_logs():  # without the daemon's settings, structlog lays tracebacks out with rich: seconds on a busy box
        answer, body = stand.get("/api/status")
    assert (answer.status, body) == (500, b"the daemon failed: its log has the reason\n")
    assert stand.get("/healthz")[0].status == 200


def test_where_too_many_are_open_the_oldest_goes_and_who_comes_is_answered(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECTION_SECONDS", 600)
    with ExitStack() as stack:
        slow = [stack.enter_context(stand.connect(b"GET / HT")) for _ in range(listener.MAX_CONNECTIONS + 20)]
        assert stand.get("/healthz")[0].status == 200
        assert ended(slow[0])


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: lo"], ids=["silent", "half a request"])
def test_who_is_slow_to_ask_is_let_go(stand: Stand, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(listener, "CONNECTION_SECONDS", 0.3)
    with stand.connect(sent) as connection:
        assert ended(connection)


def test_who_is_slow_to_take_an_answer_is_let_go(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 256 << 20  # more than buffers take
    monkeypatch.setattr(listener, "CONNECTION_SECONDS", 4)
    stand.metrics_size = size
    with stand.connect(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as connection:
        wait_until(lambda: stand.metrics_made > 0, "the answer is made")
        wait_until(lambda: not stand.web.opened, "nothing is open")
        assert received(connection) < size
    monkeypatch.undo()
    stand.metrics_size = 0
    assert stand.get("/metrics")[0].status == 200


@pytest.mark.parametrize("listen", ["7678", ":7678", "127.0.0.1:http", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_what_is_no_address_is_said(listen: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        parse_listen(listen)


def test_what_the_loopback_is() -> None:
    local, others = ("localhost:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1"), ("0.0.0.0:1", "[::]:1", "daemon:1")
    assert [is_loopback(listen) for listen in (*local, *others)] == [True] * 4 + [False] * 3


def test_a_real_daemon_is_ready_until_it_drains_and_two_do_not_share_a_port() -> None:
    listen = f"127.0.0.1:{free_port()}"

    def status(path: str) -> Callable[[], int]:
        def ask() -> int:
            connection = http.client.HTTPConnection(listen, timeout=60)
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except OSError:
                return 0
            finally:
                connection.close()

        return ask

    with Daemon(web_listen=listen, drain_seconds=600, lease_seconds=600) as daemon:
        assert [status(path)() for path in ("/healthz", "/readyz", "/metrics", "/", "/api/status")] == [200] * 5
        other = Daemon(web_listen=listen)
        try:
            other.launch()
            assert other.wait() == 2
            assert f"resharderd: --web-listen: cannot listen on {listen}" in other.log.read_text()
        finally:
            other.close()
        open_version = job(daemon, "policy").begin(1)  # what draining waits for
        assert daemon.process is not None
        daemon.process.terminate()
        wait_until(lambda: status("/readyz")() == 503, "it is not ready any more")
        assert status("/healthz")() == 200
        assert open_version.number == 1
