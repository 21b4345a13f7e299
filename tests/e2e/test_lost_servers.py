"""Real vLLM servers that die in a move: the move names them and is not done, and whoever waits for it hears so.

Each test kills another process of one server, at another moment, in a fleet that moves in another way; two simulated servers
are the rest of the fleet. The whole table, as pure logic: `tests/server/test_lost_in_moves.py`.
"""

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from resharder.client import Publisher
from resharder.client.operator import Operator
from resharder.client.operator.answers import Move, Server

from tests.support.command import resharder, running
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.simulated_server import SimulatedServer
from tests.support.single_rank_job import CONFIG, job
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import ServerFailed, VllmServer
from tests.support.weights import random_weights

LEASE = 12.0
LONG = 300.0
OTHERS = {"b": 1, "c": 1}


@dataclass
class Site:
    """A daemon, a fleet of two simulated servers, and a real one, `a`, that each test starts."""

    daemon: Daemon
    folder: Path
    publisher: Publisher
    operator: Operator
    version: int = 0

    def publish(self) -> int:
        self.version += 1
        handle = self.publisher.publish_tensors(self.version, random_weights(CONFIG, self.version).items())
        handle.wait_ready(LONG)
        assert handle.version == self.version
        return self.version

    @contextmanager
    def server(self, *args: str) -> Iterator[VllmServer]:
        """The real server, which serves what the others serve."""
        environment = {
            "RESHARDER_ENDPOINT": self.daemon.endpoint,
            "RESHARDER_SERVER_ID": "a",
            "VLLM_PLUGINS": "resharder,raw_mode",
            "PYTHONPATH": str(Path(__file__).parents[1] / "support" / "raw_mode"),
        }
        with VllmServer(self.folder, ["--load-format", "resharder", *args], environment, timeout=900) as server:
            wait_until(lambda: set(self.serving().values()) == {self.version}, "all serve", LONG)
            yield server

    def serving(self) -> dict[str, int]:
        servers = self.operator.servers("policy")
        return {
            server.name.removeprefix("servers/"): server.version if server.state == Server.State.SERVING else 0
            for server in servers
        }

    def state(self) -> Server.State:
        return self.operator.server("a").state

    def wait(self, *states: Server.State) -> None:
        wait_until(lambda: self.state() in states, f"a is {states}", LONG)

    def ends(self, state: Move.State) -> Move:
        def ended() -> bool:
            move = self.operator.fleet("policy").move
            return move is not None and (move.to_version, move.state) == (self.version, state)

        wait_until(ended, f"the move is {state}; it is {self.operator.fleet('policy')}", LONG)
        move = self.operator.fleet("policy").move
        assert move is not None
        return move


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("config")
    save_tokenizer(folder, CONFIG["vocab_size"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with Daemon(lease_seconds=LEASE, keep_count=4) as daemon, Operator(daemon.endpoint) as operator:
        made = Site(daemon, folder, job(daemon, folder, "job"), operator)
        made.publish()
        with SimulatedServer(daemon, "b"), SimulatedServer(daemon, "c"):
            yield made
        made.publisher.close()


@pytest.fixture(autouse=True)
def _endpoint(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_ENDPOINT", site.daemon.endpoint)


@contextmanager
def waits_for_move() -> Iterator[Callable[[], tuple[int, str]]]:
    """`resharder update --wait`, begun before a server dies; its exit code and output once it has ended."""
    with running(["update", "--wait", "--timeout", "280"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:

        def ended() -> tuple[int, str]:
            out, err = command.communicate(timeout=LONG)
            return command.returncode, out + err

        yield ended


@pytest.mark.full
def test_a_rolling_move_stops_at_a_server_whose_worker_dies_while_it_stages(site: Site) -> None:
    assert resharder("fleet", "set", "policy", "--rolling", 1, "--max-failures", 1).code == 0
    with site.server("--tensor-parallel-size", "2") as server:
        worker = server.child("Worker")
        worker.send_signal(signal.SIGSTOP)
        site.publish()
        site.wait(Server.State.STAGING)
        with waits_for_move() as ended:
            worker.kill()
            move = site.ends(Move.State.STOPPED)
            code, output = ended()
        assert code == 5
        assert "servers/a" in output or "a: " in output
        assert list(move.failed) == ["a"]
        site.wait(Server.State.LOST)
        assert {**site.serving(), "a": 0} == {"a": 0, **dict.fromkeys(OTHERS, site.version - 1)}
        assert "fleet policy: 1 of 3 servers LOST: servers/a: " in resharder("status").out.splitlines()[0]
    assert resharder("approve", "--wait").code == 0, "it goes on without the one that is lost"
    assert {**site.serving(), "a": 0} == {"a": 0, **dict.fromkeys(OTHERS, site.version)}
    assert resharder("forget", "a").code == 0


@pytest.mark.full
def test_an_atomic_move_goes_back_when_an_engine_core_dies(site: Site) -> None:
    assert resharder("fleet", "set", "policy", "--atomic").code == 0
    with site.server() as server:
        core = server.child("EngineCore")
        before = site.version
        core.send_signal(signal.SIGSTOP)
        site.publish()
        site.wait(Server.State.STAGING)
        core.kill()
        move = site.ends(Move.State.FAILED)
        assert "a: its engine core ended with code -9" in move.reason
        site.wait(Server.State.LOST)
        assert {**site.serving(), "a": 0} == {"a": 0, **dict.fromkeys(OTHERS, before)}
    assert resharder("forget", "a").code == 0
    assert resharder("update", "--accept-refused", "--wait").code == 0


@pytest.mark.full
def test_a_canary_goes_back_when_its_api_server_dies(site: Site) -> None:
    assert resharder("fleet", "set", "policy", "--canary", 1, "--approve").code == 0
    with site.server() as server:
        before = site.version
        site.publish()
        assert site.ends(Move.State.HOLDING).servers == ("a",)
        assert server.process is not None
        core = server.child("EngineCore")
        os.kill(server.process.pid, signal.SIGKILL)
        core.kill()  # vLLM leaves it behind
        assert "servers/a was lost while it installed version" in site.ends(Move.State.FAILED).reason
        assert {**site.serving(), "a": 0} == {"a": 0, **dict.fromkeys(OTHERS, before)}
    assert resharder("forget", "a").code == 0
    assert resharder("update", "--accept-refused").code == 0
    assert resharder("approve", "--wait").code == 0


@pytest.mark.full
def test_servers_that_move_on_their_own_arrive_without_the_one_whose_host_dies_and_say_so(site: Site) -> None:
    assert resharder("fleet", "set", "policy", "--all-at-once").code == 0
    with site.server() as server:
        core = server.child("EngineCore")
        core.send_signal(signal.SIGSTOP)
        site.publish()
        site.wait(Server.State.STAGING)
        with waits_for_move() as ended:
            server.kill()
            move = site.ends(Move.State.STOPPED)
            code, output = ended()
        assert code == 5
        assert "1 of 3 servers is missing: servers/a: " in move.reason
        assert "2/3 serve" in output
        assert {**site.serving(), "a": 0} == {"a": 0, **dict.fromkeys(OTHERS, site.version)}
    with site.server():
        site.ends(Move.State.DONE)  # it is back, and has booted from where the others are
        assert set(site.serving().values()) == {site.version}


@pytest.mark.full
def test_a_server_that_is_ended_while_it_answers_leaves_at_once_and_ends(site: Site) -> None:
    assert resharder("fleet", "set", "policy", "--all-at-once").code == 0
    with site.server() as server, ThreadPoolExecutor(1) as clients:
        core, answers = server.child("EngineCore"), server.stream([1, 2, 3], 400)
        next(answers)
        core.send_signal(signal.SIGSTOP)  # so that the answer does not end
        answer = clients.submit(list, answers)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: "a" not in site.serving(), "a has left", LONG)
        wait_until(lambda: not server.alive, "it ends", LONG)
        with pytest.raises((ServerFailed, OSError, http.client.HTTPException)):
            answer.result(LONG)
