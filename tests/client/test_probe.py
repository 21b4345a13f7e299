"""`resharder probe`: who is told to take no requests, and who must not be."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from resharder.client.cli.check import ServerLag, server_lag
from resharder.client.operator import Operator, answers
from resharder.client.operator.convert import answer as converted
from resharder.v1 import resources_pb2

from tests.client.models import connected, publish_all, weights
from tests.support.command import Done, answer, resharder
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.simulated_server import SimulatedServer

Server, Version, Fleet = resources_pb2.Server, resources_pb2.Version, resources_pb2.Fleet


def server(version: int, wanted: int, state: "Server.State.ValueType" = Server.SERVING) -> answers.Server:
    return converted(answers.Server, Server(name="servers/one", version=version, wanted_version=wanted, state=state))


def versions() -> list[answers.Version]:
    """1 to 5, READY at 10 times their number; 3 never was."""
    found = [Version(number=number) for number in (5, 4, 3, 2, 1)]
    for version in found:
        if version.number != 3:
            version.ready_time.FromSeconds(10 * version.number)
    return [converted(answers.Version, version) for version in found]


def began_at(seconds: int) -> answers.Fleet:
    fleet = Fleet(name="policy")
    fleet.move.start_time.FromSeconds(seconds)
    return converted(answers.Fleet, fleet)


@pytest.mark.parametrize(
    ("one", "others", "expected"),
    [
        pytest.param(server(5, 5), [server(5, 5)], ServerLag(), id="it serves what it is to serve"),
        pytest.param(server(4, 4), [server(5, 5)], ServerLag(), id="it waits for its turn"),
        pytest.param(server(0, 5), [server(5, 5)], ServerLag(), id="it serves nothing: its gate says so"),
        pytest.param(server(1, 5), [server(5, 5)], ServerLag(3, 80.0), id="versions that never were READY do not count"),
        pytest.param(server(4, 5), [server(5, 5)], ServerLag(1, 50.0), id="one behind"),
        pytest.param(server(1, 5), [server(4, 5)], ServerLag(3, 80.0), id="somebody is nearer, though not there"),
        pytest.param(server(1, 5), [server(1, 5)], ServerLag(), id="nobody is nearer"),
        pytest.param(server(1, 5), [server(5, 5, Server.LOST), server(4, 5, Server.FAILED)], ServerLag(), id="no serving one is"),
        pytest.param(server(5, 2), [server(2, 2)], ServerLag(2, 40.0), id="it is to go back"),
    ],
)
def test_how_far_a_server_is_behind(one: answers.Server, others: list[answers.Server], expected: ServerLag) -> None:
    now = datetime.fromtimestamp(100, UTC)
    assert server_lag(one, began_at(60), [one, *others], versions(), now) == expected


@pytest.mark.parametrize(
    ("behind", "bounds", "beyond"),
    [
        (ServerLag(), (1, 1), False),
        (ServerLag(2, 30), (0, 0), False),
        (ServerLag(2, 30), (2, 30), False),
        (ServerLag(2, 30), (1, 0), True),
        (ServerLag(2, 30), (0, 29), True),
        (ServerLag(2, 30), (5, 29), True),
    ],
)
def test_either_bound_is_enough(behind: ServerLag, bounds: tuple[int, float], beyond: bool) -> None:
    assert behind.beyond(*bounds) == beyond


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        publishers = connected(running.endpoint, 1, "probe")
        for number in (1, 2):
            publish_all(publishers, number, weights(number))[0].wait_ready(60)
        for publisher in publishers:
            publisher.close()
        yield running


@pytest.fixture(autouse=True)
def _endpoint(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)
    monkeypatch.delenv("RESHARDER_SERVER_ID", raising=False)


def probe(*arguments: object) -> Done:
    return resharder("probe", *arguments)


def test_a_server_that_stays_behind_gets_no_requests_and_the_others_do(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resharder("fleet", "set", "apart", "--model", "policy", "--want", 1).code == 0
    with SimulatedServer(daemon, "late", fleet="apart") as late, SimulatedServer(daemon, "early", fleet="apart"):
        late.broken = {2}
        wait_until(lambda: all(s["version"] == 1 for s in answer("servers", "--fleet", "apart")["servers"]), "both serve 1")
        assert probe("--server", "late", "--max-lag-versions", 1).out == "ready: servers/late serves version 1, its target\n"
        assert resharder("update", 2, "--fleet", "apart").code == 0
        with Operator(daemon.endpoint) as operator:
            wait_until(lambda: operator.server("early").version == 2, "one arrives")
        monkeypatch.setenv("RESHARDER_SERVER_ID", "late")
        done = probe("--max-lag-seconds", 0.001)
        assert (done.code, done.out.partition(": servers/late serves version 1, its target is 2: 1 behind for ")[0]) == (
            1,
            "not ready",
        )
        assert probe("--max-lag-versions", 1).code == 0
        assert answer("probe", "--max-lag-seconds", 3600)["lag_versions"] == 1
        assert probe("--server", "servers/early", "--max-lag-seconds", 0.001).code == 0


@contextmanager
def health(status: int, body: bytes = b"") -> Iterator[str]:
    """What a gate answers, and where."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/health"
        finally:
            http.shutdown()
            thread.join()


def test_a_shut_gate_is_said_with_its_reason_and_an_open_one_is_enough() -> None:
    with health(503, b"not serving: drained") as url:
        assert probe("--url", url) == Done(1, f"not ready: {url} answers 503: not serving: drained\n", "")
    with health(200) as url:
        assert probe("--url", url) == Done(0, "ready\n", "")
    assert probe("--url", url).code == 1, "nobody listens there any more"


def test_a_server_that_is_unknown_to_the_daemon_is_not_ready() -> None:
    assert probe("--server", "stranger") == Done(1, "not ready: servers/stranger is unknown to the daemon\n", "")


def test_a_daemon_that_has_just_started_leaves_an_unknown_server_to_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = ("--server", "stranger", "--max-lag-versions", 1)
    with health(200) as url, Daemon() as fresh:
        monkeypatch.setenv("RESHARDER_ENDPOINT", fresh.endpoint)
        assert probe("--url", url, *bounds) == Done(0, "ready: the gate alone decides: the daemon has just started\n", "")
        monkeypatch.setattr("resharder.client.cli.check._REGISTERING_SECONDS", 0.0)
        assert probe("--url", url, *bounds).code == 1


def test_without_a_daemon_the_gate_alone_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = ("--server", "stranger", "--max-lag-versions", 1)
    monkeypatch.setenv("RESHARDER_ENDPOINT", f"127.0.0.1:{free_port()}")
    with health(200) as url:
        done = probe("--url", url, *bounds)
    assert done.code == 0
    assert done.out.startswith("ready: the gate alone decides: cannot reach a Resharder daemon at ")
    assert probe("--server", "stranger").code == 1, "there is no gate"


def test_a_probe_that_cannot_work_says_so() -> None:
    assert probe("--max-lag-versions", 1).code == 2, "of which server?"
    assert probe().code == 2, "of what?"
    assert probe("--url", "file:///etc/passwd").code == 2
