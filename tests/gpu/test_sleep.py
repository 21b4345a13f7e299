"""Sleep where memory is really freed: a vLLM server on a GPU, put to sleep and woken by an operator through the daemon."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.client.operator import Operator
from resharder.client.trainer.publisher import Publisher
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.gpu_server import (
    KV_CACHE_BYTES,
    PROMPTS,
    SHAPES,
    SLEEP_MODE,
    answers,
    fingerprints,
    free_bytes,
    tokens_and_logprobs,
)
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import ServerFailed, VllmServer
from tests.support.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

AWAKE, ASLEEP_1, ASLEEP_2 = resources_pb2.AWAKE, resources_pb2.ASLEEP_1, resources_pb2.ASLEEP_2
LIVE = (resources_pb2.Server.SERVING, resources_pb2.Server.ASLEEP)


@dataclass
class Site:
    """A server that sleeps, what it follows, and an operator."""

    daemon: Daemon
    publisher: Publisher
    operator: Operator
    config: dict[str, Any]
    folder: Path
    size_bytes: int = 0
    version: int = 0

    def publish(self) -> int:
        self.version += 1
        weights = random_weights(self.config, self.version, torch.bfloat16)
        self.size_bytes = sum(tensor.nbytes for tensor in weights.values())
        self.publisher.publish_tensors(self.version, weights.items()).wait_ready(120)
        return self.version

    def server(self) -> VllmServer:
        options = ["--load-format", "resharder", *SLEEP_MODE, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        # vLLM's own /collective_rpc, for the fingerprints.
        environment = {"VLLM_SERVER_DEV_MODE": "1", "RESHARDER_ENDPOINT": self.daemon.endpoint, "VLLM_PLUGINS": PLUGINS}
        return VllmServer(self.folder, options, environment, dtype="bfloat16", timeout=300)

    def held(self) -> int:
        """The version that all workers hold; 0: none."""
        return servers(self.daemon)[0].version

    def set_power(self, power: resources_pb2.Power) -> float:
        """Until it is so; how long that took, in seconds."""
        began = time.monotonic()
        if power == AWAKE:
            self.operator.wake("policy")
        else:
            self.operator.sleep("policy", level=1 if power == resources_pb2.ASLEEP_1 else 2)
        name = resources_pb2.Power.Name(power)
        wait_until(lambda: any(s.state in LIVE and s.power == power for s in servers(self.daemon)), f"the server is {name}", 120)
        if power == AWAKE:
            wait_serving(self.daemon, self.version, 120)
        return time.monotonic() - began


PLUGINS = "resharder"


@contextmanager
def site(folder: Path, family: str, changes: dict[str, Any]) -> Iterator[Site]:
    config = tiny_config(family, dtype="bfloat16", **changes)
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon())
        publisher = stack.enter_context(
            connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=folder)
        )
        operator = stack.enter_context(Operator(daemon.endpoint))
        yield Site(daemon, publisher, operator, config, folder)


def assert_serves_nothing(server: VllmServer) -> None:
    with pytest.raises(ServerFailed, match="503"):
        server.generate(PROMPTS[0], 1)
    assert server.request("GET", "/health").status == 503


@pytest.mark.parametrize("shape", SHAPES)
def test_a_server_that_slept_frees_its_memory_and_wakes_to_exactly_the_version_it_should_serve(
    shape: str, tmp_path: Path
) -> None:
    with site(tmp_path, *SHAPES[shape]) as here:
        here.publish()
        with here.server() as server:
            wait_serving(here.daemon, here.publish(), 120)
            before, tensors, awake = tokens_and_logprobs(answers(server)), fingerprints(server), free_bytes()
            (installed,) = servers(here.daemon)

            for power in (ASLEEP_1, ASLEEP_2, ASLEEP_2):
                slept = here.set_power(power)
                freed = free_bytes() - awake
                assert_serves_nothing(server)
                held = 0 if power == ASLEEP_2 else 2
                wait_until(lambda held=held: here.held() == held, f"the workers hold version {held}", 30)  # type: ignore[misc]
                woke = here.set_power(AWAKE)
                print(
                    f"{shape}, {here.size_bytes / 2**30:.2f} GiB: {resources_pb2.Power.Name(power)} in {slept:.2f} s freed "
                    f"{freed / 2**30:.2f} GiB, woke in {woke:.2f} s, then {(awake - free_bytes()) / 2**20:.0f} MiB less are free"
                )
                assert freed > 0.9 * (here.size_bytes + KV_CACHE_BYTES)
                assert fingerprints(server) == tensors
                assert tokens_and_logprobs(answers(server)) == before
                assert (servers(here.daemon)[0].install.id == installed.install.id) == (power == ASLEEP_1)

            print(*(line for line in server.log_text().splitlines() if "asleep at level" in line), sep="\n")
            here.set_power(ASLEEP_2)
            assert here.publish() == 3
            assert_serves_nothing(server)
            here.set_power(AWAKE)
            updated, tensors = answers(server), fingerprints(server)
            assert {answer.version for answer in updated} == {"3"}
            assert tokens_and_logprobs(updated) != before
        with here.server() as fresh:
            assert fingerprints(fresh) == tensors
            assert tokens_and_logprobs(answers(fresh)) == tokens_and_logprobs(updated)
