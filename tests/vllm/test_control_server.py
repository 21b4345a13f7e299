"""Real servers that follow a real daemon: what clients see of an install, of a daemon that is away, and of two API servers."""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import PauseMode
from resharder.v1 import resources_pb2
from vllm.v1.engine.core import EngineCore

from tests.support.command import answer
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.vllm_deployment import LEASE, PROMPT, Deployment, deployment
from tests.support.vllm_server import Answer, Token, VllmServer

LONG = 1500  # tokens: an install falls into the answer, even if the client reads much later than the server writes


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("single")) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    with deployment(tmp_path_factory.mktemp("double"), "--data-parallel-size", "2", environment=environment) as deployed:
        yield deployed


def metrics(server: VllmServer) -> dict[str, float]:
    """The plugin's samples on vLLM's own page."""
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("resharder_vllm_"))}


class Streaming(threading.Thread):
    """A client that reads a stream in the background."""

    def __init__(self, server: VllmServer, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.server, self.max_tokens = server, max_tokens
        self.tokens: list[Token] = []
        self.error: BaseException | None = None
        self.start()
        while not self.tokens and self.is_alive():
            time.sleep(0.005)

    def run(self) -> None:
        try:
            for token in self.server.stream(PROMPT, self.max_tokens):
                self.tokens.append(token)
        except BaseException as error:
            self.error = error

    def finish(self) -> list[Token]:
        self.join(300)
        assert self.error is None, self.error
        return self.tokens


@pytest.mark.compat("boot")
def test_a_booted_server_says_its_version_on_every_route(single: Deployment) -> None:
    for path in ("/health", "/v1/models", "/version", "/metrics", "/no/such/route"):
        assert single.server.request("GET", path).version == str(single.version), path
    assert metrics(single.server)["resharder_vllm_served_version"] == single.version


@pytest.mark.compat("three versions")
@pytest.mark.full
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_install_in_every_pause_mode_turns_nobody_away(single: Deployment, mode: str) -> None:
    """`keep` and `wait` streams come to their end, `abort` ends them early; requests that come meanwhile are answered."""
    with Operator(single.daemon.endpoint) as operator:
        operator.set_fleet("policy", pause_mode=PauseMode(mode.upper()))
    for _ in range(5):  # on a busy machine an answer can be over before the install begins, and the next one not be asked for
        lengths = install_under_a_stream(single)
        if mode != "abort":
            assert set(lengths) == {LONG}
            return
        if min(lengths) < LONG:
            return
    pytest.fail("no install of five ended an answer early")


def install_under_a_stream(single: Deployment) -> list[int]:
    """Publishes a version while at every moment some answer is being streamed; how long each came to be."""
    before, reached = single.server.generate(PROMPT, 12), single.version + 1
    streams = [Streaming(single.server, LONG)]
    statuses = set()
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(single.publish)
        while (answer := single.server.generate(PROMPT, 12)).version != str(reached):
            statuses.add(single.server.request("GET", "/health").status)
            if len(streams[-1].tokens) > LONG // 2:
                streams.append(Streaming(single.server, LONG))
            assert answer.version in (str(reached - 1), f"{reached - 1},{reached}")
            assert not (publishing.done() and publishing.exception()), publishing.exception()
        assert publishing.result() == reached
    after = single.server.generate(PROMPT, 12)
    assert statuses <= {200}
    assert (before.version, after.version) == (str(reached - 1), str(reached))
    assert before.token_ids != after.token_ids
    lengths = [len(stream.finish()) for stream in streams]
    first, alone = ([token.token_id for token in tokens] for tokens in (streams[0].tokens, single.server.stream(PROMPT, 50)))
    assert first[:50] != alone[: len(first)], "the stream has to have begun on the version before"
    assert wait_serving(single.daemon, reached).install.pause_seconds > 0
    return lengths


@pytest.mark.full
def test_while_the_daemon_is_away_the_server_serves_and_afterwards_takes_versions_again(single: Deployment) -> None:
    single.daemon.kill()
    time.sleep(LEASE + 1)
    answer = single.server.generate(PROMPT, 4)
    assert answer.version == str(single.version)
    assert single.server.request("GET", "/health").status == 200
    single.daemon.start()
    wait_serving(single.daemon, single.version)
    reached = single.publish()
    wait_serving(single.daemon, reached)
    assert single.server.generate(PROMPT, 4).version == str(reached)


@pytest.mark.full
def test_two_api_servers_share_one_server_and_both_gates_follow(double: Deployment) -> None:
    def sides() -> tuple[int, int, int]:
        (server,) = servers(double.daemon)
        return server.world_size, server.control_sides, len(server.workers)

    wait_until(lambda: sides() == (2, 2, 2), "both API servers hold the lease")  # the first serves before the second has come
    reached = double.publish()
    wait_serving(double.daemon, reached)
    answers: list[Answer] = []

    def all_of_it() -> bool:
        """Of 16 answers: the kernel spreads connections over the API servers, and one of them may hear of it a moment later."""
        answers[:] = [double.server.generate(PROMPT, 8) for _ in range(16)]
        return {answer.version for answer in answers} == {str(reached)}

    wait_until(all_of_it, f"both answer with version {reached}")
    assert len({answer.token_ids for answer in answers}) == 1
    wait_until(lambda: metrics(double.server)['resharder_vllm_gate_position{position="open"}'] == 2, "both gates are open")
    infos = [double.server.request("GET", "/weight_info") for _ in range(8)] if hasattr(EngineCore, "get_weight_version") else []
    assert [one.json() for one in infos] == [{"weight_version": str(reached)}] * len(infos), "of both engines, at both servers"
    counted = metrics(double.server)
    assert counted["resharder_vllm_served_version"] == reached
    assert counted["resharder_vllm_pause_seconds_count"] >= 1
    assert counted['resharder_vllm_installs_total{outcome="applied"}'] >= 1


@pytest.mark.full
def test_an_install_under_a_profiler_is_one_as_any_other_and_says_how_every_worker_spent_it(
    double: Deployment, tmp_path: Path
) -> None:
    wait_serving(double.daemon, double.version)
    before = double.server.generate(PROMPT, 8)
    profiles = answer("profile", "install", "policy", "--out", tmp_path, "--endpoint", double.daemon.endpoint)["profiles"]
    assert [(one["rank"], one["error"]) for one in profiles] == [(0, ""), (1, "")]
    for one in profiles:
        events = json.loads(gzip.decompress(Path(one["trace"]).read_bytes()))["traceEvents"]
        assert "resharder: copy and digest" in {event["name"] for event in events}
        assert "Self CPU" in Path(one["table"]).read_text()
    server = wait_serving(double.daemon, double.version)
    assert {one["install"] for one in profiles} == {server.install.id}
    phases = [[timing.phase for timing in worker.timings if timing.phase != "verify"] for worker in server.workers]
    assert phases == [["stage", "apply"]] * 2
    after = double.server.generate(PROMPT, 8)
    assert (after.version, after.token_ids) == (before.version, before.token_ids)


@pytest.mark.full
def test_a_server_of_two_engines_is_lost_when_one_of_its_engine_cores_dies(double: Deployment) -> None:
    """The last of its tests. vLLM then ends both API servers by SIGTERM, as an order would."""
    double.server.child("EngineCore").kill()
    wait_until(lambda: servers(double.daemon)[0].state == resources_pb2.Server.LOST, "it is lost")
    assert "its engine" in servers(double.daemon)[0].reason
