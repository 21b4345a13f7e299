"""A profile of an install: as a worker makes it, and on its way to whoever asked for it."""

import gzip
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resharder.client.errors import NotFound, Refused
from resharder.client.inference.worker import profile as profiles
from resharder.client.inference.worker.profile import profiled
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.v1 import resources_pb2, server_pb2

from tests.client.models import connected, publish_all, weights
from tests.support.command import answer, resharder
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving
from tests.support.simulated_server import SimulatedServer

Order, Profile, Worker = server_pb2.Order, resources_pb2.Profile, resources_pb2.Worker
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        (publisher,) = connected(running.endpoint, 1, "job")
        publish_all([publisher], 1, weights(1))[0].wait_ready(60)
        publisher.close()
        yield running


class Profiling(SimulatedServer):
    """Its one worker multiplies under a real profiler where it is told to."""

    installs = ""
    lag = 0.0  # seconds from the profile to the word that the install is done

    def _carry_out(self, order: server_pb2.Order) -> None:
        if order.kind == Order.APPLY and order.profile:
            self.installs = order.install
            with profiled(Channel(self.endpoint), self.id, 0, order.install, CPU):
                torch.ones(64, 64) @ torch.ones(64, 64)
            time.sleep(self.lag)
        super()._carry_out(order)


@pytest.fixture
def server(daemon: Daemon) -> Iterator[Profiling]:
    Profiling.endpoint = daemon.endpoint
    with Profiling(daemon, "left") as running:
        wait_serving(daemon, 1)
        yield running


def test_an_operator_gets_a_trace_and_a_table_of_an_install_as_any_other(
    daemon: Daemon, server: Profiling, tmp_path: Path
) -> None:
    (profile,) = answer("profile", "install", "left", "--out", tmp_path, "--endpoint", daemon.endpoint)["profiles"]
    assert (profile["server"], profile["rank"], profile["error"]) == ("left", 0, "")
    assert profile["install"] == server.installs
    events = json.loads(gzip.decompress((tmp_path / "left-rank0.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert "aten::mm" in (tmp_path / "left-rank0.txt").read_text()
    wait_serving(daemon, 1)
    (seen,) = servers(daemon)
    assert (seen.install.id, seen.install.version) == (profile["install"], 1)
    assert resources_pb2.Install.State.Name(seen.install.state) == "COMMITTED"


def test_a_fleet_is_profiled_server_by_server_and_people_get_the_table(daemon: Daemon, server: Profiling, tmp_path: Path) -> None:
    server.lag = 1.0  # the command ends when the server serves again, not when the profile is there
    done = resharder("profile", "install", "policy", "--out", tmp_path, "--endpoint", daemon.endpoint)
    assert done.code == 0, done.err
    assert "servers/left, worker 0 of 1: version 1 applied in" in done.out
    assert "aten::mm" in done.out
    assert str(tmp_path / "left-rank0.json.gz") in done.out


def test_nobody_is_profiled_who_is_not_there_or_not_serving(daemon: Daemon, server: Profiling) -> None:
    with Operator(daemon.endpoint) as operator:
        with pytest.raises(NotFound, match="is unknown"):
            list(operator.profile_install("nobody", timeout=60))
        operator.drain("policy", "left")
        with pytest.raises(Refused, match="server left is busy, or does not serve its target"):
            list(operator.profile_install("left", timeout=60))
        operator.resume("policy", "left")
        wait_serving(daemon, 1)
    missing = resharder("profile", "install", "nobody", "--endpoint", daemon.endpoint)
    assert missing.code == 4
    assert "servers are left" in missing.err


def test_a_profiled_install_that_fails_is_said_and_the_server_serves_on(daemon: Daemon, server: Profiling) -> None:
    server.broken = {1}
    with Operator(daemon.endpoint) as operator, pytest.raises(Refused, match="the install that was to be profiled failed"):
        list(operator.profile_install("left", timeout=60))
    wait_serving(daemon, 1)


def test_a_profile_that_nobody_waits_for_or_of_another_server_is_let_go(daemon: Daemon, server: Profiling) -> None:
    stub = server._stub
    request = server_pb2.PutProfileRequest(server="left", profile=Profile(install="no-such-install", table="x"))
    assert stub.PutProfile(request) == server_pb2.PutProfileResponse()


class Recorded(Channel):
    """Channel that keeps the profiles it is given to send."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:1")
        self.profiles: list[Profile] = []

    def call(self, method: object, request: server_pb2.PutProfileRequest, **options: object) -> None:  # type: ignore[override]
        self.profiles.append(request.profile)


class AtOnce:
    """Thread that runs as it is made."""

    def __init__(self, target: Callable[..., object], args: tuple[object, ...], **named: object) -> None:
        target(*args)

    def start(self) -> None: ...


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    monkeypatch.setattr(profiles, "threading", SimpleNamespace(Thread=AtOnce))
    with Recorded() as channel:
        yield channel


def test_a_worker_under_another_profiler_installs_and_says_why_it_has_none(recorded: Recorded) -> None:
    done = False
    with torch.profiler.profile(), profiled(recorded, "s", 3, "i", CPU):
        done = True
    assert done
    (profile,) = recorded.profiles
    assert (profile.rank, profile.install) == (3, "i")
    assert profile.error == "RuntimeError: another profiler is running in this process"
    assert not profile.trace


def test_an_install_that_raises_raises_as_ever_and_sends_nothing(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="torn"), profiled(recorded, "s", 0, "i", CPU):
        raise ValueError("torn")
    assert recorded.profiles == []
    with profiled(recorded, "s", 0, "i", CPU):  # the profiler is free again
        torch.ones(2).sum()
    assert not recorded.profiles[0].error


def test_a_trace_that_is_too_large_is_left_out_and_the_table_is_not(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "MOST_BYTES", 10)
    with profiled(recorded, "s", 0, "i", CPU):
        torch.ones(2).sum()
    (profile,) = recorded.profiles
    assert "expected a trace of at most 10 bytes, got " in profile.error
    assert (profile.trace, bool(profile.table)) == (b"", True)
