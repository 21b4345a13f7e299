"""Weights that another hand changes behind the daemon's back: refused at vLLM's routes, else found and brought back."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from resharder.client import connect
from resharder.client.inference.control.route_rules import Handling
from resharder.client.inference.vllm.route_rules import RULES
from resharder.client.operator import Operator
from resharder.client.operator.answers import Power
from resharder.client.trainer.publisher import Publisher
from resharder.v1 import resources_pb2

from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = pytest.mark.full

PLUGINS = Path(__file__).parents[1] / "support" / "raw_mode"
PROMPT = [5, 17, 42, 7, 300, 11]
needs_native_versions = pytest.mark.skipif(not find_spec("vllm.entrypoints.rl"), reason="this vLLM stamps no tokens")
NORM = "model.layers.0.input_layernorm.weight"


@dataclass
class Deployment:
    daemon: Daemon
    publisher: Publisher
    server: VllmServer
    config: dict[str, Any]
    hand: Path
    version: int = 0
    changes: int = 0

    def publish(self) -> int:
        self.version += 1
        self.publisher.publish_tensors(self.version, random_weights(self.config, self.version).items()).wait_ready(120)
        return self.version

    def serve(self) -> None:
        wait_serving(self.daemon, self.publish())

    def change(self, path: str, rank: int = 0) -> None:
        """Another hand changes one element of this tensor in this worker."""
        self.changes += 1
        line, done = f"{self.changes} {rank} {path}", self.hand.with_name(f"{self.hand.name}.{rank}")
        self.hand.write_text(line)
        wait_until(lambda: done.exists() and done.read_text() == line, "the other hand's change")

    def verify(self) -> list[resources_pb2.Verification]:
        with Operator(self.daemon.endpoint) as operator:
            return operator.verify(servers(self.daemon)[0].name, timeout=60)

    def vllms_own(self) -> tuple[str, dict[str, str]]:
        """vLLM's weight version, which is that of the header, and its checksum of each parameter of each worker."""
        info = self.server.request("GET", "/weight_info")
        assert info.json() == {"weight_version": info.version}, info.headers
        checked = self.server.request("POST", "/weight_checker", {"action": "checksum"})
        return info.json()["weight_version"], checked.json()["checksums"]

    def mismatches(self, baseline: dict[str, str]) -> list[str]:
        answer = self.server.request("POST", "/weight_checker", {"action": "compare", "baseline": baseline})
        return answer.json()["mismatches"]


@contextmanager
def deployment(folder: Path, *args: str, plugins: str = "raw_mode,", **environment: str) -> Iterator[Deployment]:
    config = tiny_config("qwen3")
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(lease_seconds=20.0))
        publisher = stack.enter_context(
            connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=folder)
        )
        given = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "VLLM_PLUGINS": f"resharder,{plugins}dropping_sleep,other_hand",
            "PYTHONPATH": str(PLUGINS),
            "OTHER_HAND": str(folder / "hand"),
            "VLLM_SERVER_DEV_MODE": "1",
        }
        server = VllmServer(folder, ["--load-format", "resharder", *args], given | environment, timeout=900)
        deployed = Deployment(daemon, publisher, server, config, folder / "hand")
        deployed.publish()
        stack.enter_context(server)
        yield deployed


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("single")) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("packed"), plugins="") as deployed:
        yield deployed


@pytest.fixture(scope="module")
def double(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployment(tmp_path_factory.mktemp("double"), "--tensor-parallel-size", "2") as deployed:
        yield deployed


def no_difference(found: list[resources_pb2.Verification], version: int) -> None:
    for one in found:
        assert (one.skipped, list(one.different), one.version) == ("", [], version), one
        assert one.tensors > 0


def test_every_route_that_changes_the_engine_is_refused_with_the_reason(single: Deployment) -> None:
    before = single.server.generate(PROMPT)
    for (method, path), rule in RULES.items():
        if rule.handling is Handling.REFUSED:
            answer = single.server.request(
                method, path.replace("{adapter_name}", "a"), {"method": "reload_weights", "action": "reset"}
            )
            assert answer.status == 409, path
            assert rule.instead in answer.json()["error"]["message"], path
    assert single.server.generate(PROMPT) == before


def test_what_vllm_itself_does_is_no_difference(single: Deployment) -> None:
    single.server.generate(PROMPT)
    found = single.verify()
    no_difference(found, single.version)
    assert all(one.covered_bytes == one.total_bytes > 0 for one in found)
    for _ in range(2):
        single.serve()
        single.server.generate(PROMPT)
        no_difference(single.verify(), single.version)


def test_weights_that_another_hand_changed_are_found_and_not_served_under_the_old_name(single: Deployment) -> None:
    before = single.server.generate(PROMPT)
    single.change(NORM)
    assert single.server.generate(PROMPT).logprobs != before.logprobs, "the hand did not change what is served"
    done = resharder("verify", servers(single.daemon)[0].name, "--endpoint", single.daemon.endpoint, "--json")
    assert done.code == 1, done.err
    (one,) = json.loads(done.out)["verifications"]
    assert one["different"] == [NORM]
    wait_serving(single.daemon, single.version)
    after = single.server.generate(PROMPT)
    assert (after.logprobs, after.version) == (before.logprobs, before.version)
    no_difference(single.verify(), single.version)
    with Operator(single.daemon.endpoint) as operator:
        altered = [event for event in operator.events(last=200) if event.what == "altered"]
    assert NORM in altered[-1].reason


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_is_not_verifiable_and_an_awakened_one_has_no_difference(single: Deployment, level: int) -> None:
    with Operator(single.daemon.endpoint) as operator:
        operator.sleep("policy", level=level)
        operator.wait_power("policy", Power.ASLEEP_1 if level == 1 else Power.ASLEEP_2, timeout=60)
        assert "asleep" in single.verify()[0].skipped
        operator.wake("policy")
        wait_serving(single.daemon, single.version)
    no_difference(single.verify(), single.version)


def test_packed_weights_are_no_difference_and_not_said_to_be_covered(packed: Deployment) -> None:
    no_difference(packed.verify(), packed.version)
    for _ in range(2):
        packed.serve()
        packed.server.generate(PROMPT)
        found = packed.verify()
        no_difference(found, packed.version)
        for one in found:
            assert 0 < one.covered_bytes < one.total_bytes
            (packed_away,) = one.uncompared
            assert "packed them into memory of a kernel" in packed_away.reason
            assert one.covered_bytes + packed_away.bytes == one.total_bytes
            assert all(name.endswith("_proj.weight") or name == "lm_head.weight" for name in packed_away.names)


@pytest.mark.engine  # its fixtures are named at run time
@needs_native_versions
@pytest.mark.parametrize("scene", ["single", "double"])
def test_vllms_own_version_and_checksums_agree_over_updates_rollbacks_and_sleep(
    scene: str, request: pytest.FixtureRequest
) -> None:
    deployed: Deployment = request.getfixturevalue(scene)
    deployed.serve()
    first, second = deployed.version, deployed.version + 1
    reported, before = deployed.vllms_own()
    assert reported == str(first)
    assert {name.split(":")[3] for name in before} == ({"tp0"} if scene == "single" else {"tp0", "tp1"})
    assert not deployed.mismatches(before)
    deployed.serve()
    reported, after = deployed.vllms_own()
    assert reported == str(second)
    assert sorted(after) == sorted(before) == deployed.mismatches(before), "the versions differ in every parameter"
    with Operator(deployed.daemon.endpoint) as operator:
        operator.rollback("policy", first)
        wait_serving(deployed.daemon, first)
        assert deployed.vllms_own() == (str(first), before)
        operator.sleep("policy", level=2)
        operator.wait_power("policy", Power.ASLEEP_2, timeout=60)
        operator.wake("policy")
        wait_serving(deployed.daemon, first)
        assert deployed.vllms_own() == (str(first), before)
    deployed.change(NORM)
    assert [name.rpartition(":")[2] for name in deployed.mismatches(before)] == [NORM], "the other hand's change alone"
    assert any(one.different for one in deployed.verify())
    wait_serving(deployed.daemon, first)
    assert deployed.vllms_own() == (str(first), before)
    deployed.serve()


def test_resume_hammered_during_installs_at_tp_2_ends_no_pause(double: Deployment) -> None:
    ended, statuses = threading.Event(), set()

    def hammer() -> None:
        while not ended.is_set():
            statuses.add(double.server.request("POST", "/resume").status)

    hands = [threading.Thread(target=hammer) for _ in range(2)]
    for hand in hands:
        hand.start()
    try:
        for _ in range(3):
            double.serve()
            no_difference(double.verify(), double.version)
    finally:
        ended.set()
        for hand in hands:
            hand.join()
    assert statuses == {409}


def test_a_change_in_one_of_two_workers_is_found_there(double: Deployment) -> None:
    double.change(NORM, rank=1)
    assert [list(one.different) for one in double.verify()] == [[], [NORM]]
    wait_serving(double.daemon, double.version)
    no_difference(double.verify(), double.version)
