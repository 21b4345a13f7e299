"""Weights that two Megatron ranks cast to FP8 blocks, in one vLLM server of two workers: attention cut by tensor parallelism,
experts whole, over both paths.

The tests share the server and run in order; each leaves it serving.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import vllm
from packaging.version import Version
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.direct_server import PROMPT, System, running
from tests.support.fp8_checkpoint import fp8_config
from tests.support.observing import servers, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="older CPU builds have no FP8 blocks"),
]

CONFIG = fp8_config("qwen3_moe")
PLAIN = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
QUANTIZATION = CONFIG["quantization_config"]
TRAINER: dict[str, Any] = {
    "config": PLAIN,
    "tp": 2,
    "ep": 2,
    "dtype": "bfloat16",
    "connect": {"direct_wait": 60.0, "quantization_config": QUANTIZATION},
}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("config")
    with running(folder, CONFIG, TRAINER, "--enable-expert-parallel", plugins=",reference_fp8", dtype="bfloat16") as built:
        yield built


def answer(system: System) -> tuple[Any, Any]:
    found = system.server.generate(PROMPT, 12)
    return found.token_ids, found.logprobs


def test_cast_weights_and_their_scales_go_from_the_ranks_memory_to_the_workers_parameters(system: System) -> None:
    """The server has booted with version 1, from the store."""
    booted = system.fingerprints(), answer(system)
    assert any("weight_scale_inv" in path for path in booted[0][0])
    assert system.sent(system.publish(2)), system.transfers()
    assert system.fingerprints() != booted[0]
    system.trainer.ask(do="reseed", step=3, seed=1)
    assert system.sent(system.publish(3)), system.transfers()
    assert (system.fingerprints(), answer(system)) == booted
    (server,) = servers(system.daemon)
    assert [worker.boxed_bytes for worker in server.workers] == [worker.needed_bytes for worker in server.workers]


def test_the_staged_path_leaves_the_same_and_so_does_a_way_back_to_an_earlier_version(system: System) -> None:
    system.trainer.ask(do="withhold")
    system.trainer.ask(do="reseed", step=4, seed=2)
    staged = system.publish(4)
    assert not system.sent(staged)
    second = system.fingerprints(), answer(system)
    system.trainer.ask(do="reseed", step=5, seed=1)
    direct = system.publish(5)
    first = system.fingerprints(), answer(system)
    assert first != second
    with Operator(system.daemon.endpoint) as operator:
        for version, held in ((staged, second), (direct, first)):
            operator.update("policy", version)
            system.serves(version)
            assert (system.fingerprints(), answer(system)) == held
        operator.update("policy")


@pytest.mark.parametrize("fault", ["old scale", "other block"])
def test_a_scale_of_another_block_or_version_in_a_transfer_is_noticed_and_the_stores_is_installed(
    system: System, fault: str
) -> None:
    step = max(system.steps.values()) + 1
    system.trainer.ask(do="reseed", step=step, seed=1)
    system.publish(step)
    held = system.fingerprints()
    system.trainer.ask(do="reseed", step=step + 1, seed=1)
    system.trainer.ask(do="fault", rank=0, what=fault)
    version = system.publish(step + 1)
    assert not system.sent(version)
    assert "differ from the store's digests" in system.failures()[-1]
    assert system.fingerprints() == held


def test_after_a_sleep_at_level_2_the_version_is_as_it_was(system: System) -> None:
    held = system.fingerprints(), answer(system)
    with Operator(system.daemon.endpoint) as operator:
        operator.sleep("policy", level=2)
        wait_until(lambda: servers(system.daemon)[0].power == resources_pb2.ASLEEP_2, "the server sleeps")
        operator.wake("policy")
    system.serves(max(system.steps))
    assert (system.fingerprints(), answer(system)) == held
