"""A trainer and a vLLM server take turns on one GPU. Weights go from the trainer's memory to the server's, beside each other; the
KV cache gets the trainer's place.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from resharder.client import connect
from resharder.client.operator import Operator
from resharder.client.trainer.publisher import Publisher
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.gpu_server import KV_CACHE_BYTES, SHAPES, SLEEP_MODE, answers, fingerprints, free_bytes, tokens_and_logprobs
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SLACK = 160 << 20  # of contexts, workspaces and torch's caches
GIB = 2**30


class FreeMemory:
    """Samples of the GPU's free bytes, in a thread of their own."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(0.005):
            self.seen.append((time.monotonic(), free_bytes()))

    def least(self, begin: float, end: float) -> int:
        return min(free for at, free in self.seen if begin <= at <= end)

    def __enter__(self) -> "FreeMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()


@contextmanager
def shared_gpu(folder: Path) -> Iterator[tuple[Daemon, Publisher, dict[str, torch.Tensor], VllmServer]]:
    """A trainer in this process and a server, asleep, which booted the trainer's first version."""
    family, changes = SHAPES["dense"]
    config = tiny_config(family, dtype="bfloat16", **changes)
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.cuda() for name, tensor in random_weights(config, 1, torch.bfloat16).items()}
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, direct_wait=60) as publisher,
        Operator(daemon.endpoint) as operator,
    ):
        publisher.attach(weights, config, folder)
        publisher.publish(1).wait_ready(120)
        options = ["--load-format", "resharder", *SLEEP_MODE, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        environment = {"VLLM_SERVER_DEV_MODE": "1", "RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
        with VllmServer(folder, options, environment, dtype="bfloat16", timeout=300) as server:
            wait_serving(daemon, 1)
            operator.sleep("policy", level=2)
            wait_until(lambda: servers(daemon)[0].power == resources_pb2.ASLEEP_2, "the server sleeps", 120)
            yield daemon, publisher, weights, server


def test_a_generation_installs_within_the_gpu_and_lends_the_memory_in_phases(tmp_path: Path) -> None:
    with shared_gpu(tmp_path) as (daemon, publisher, weights, server):
        size = sum(tensor.nbytes for tensor in weights.values())
        for step in (2, 3):
            for tensor in weights.values():
                tensor.mul_(1.01)
            kept = {name: tensor.clone().cpu() for name, tensor in weights.items()}
            torch.cuda.empty_cache()
            training = free_bytes()
            with FreeMemory() as free:
                began = time.monotonic()
                with publisher.generation(step, offload=True, direct=True, timeout=120) as generation:
                    entered, lent = time.monotonic(), free_bytes()
                    (seen,) = servers(daemon)
                    assert (seen.version, seen.workers[0].path) == (generation.version, "peer-memory")
                    direct, generated = fingerprints(server), tokens_and_logprobs(answers(server))
                    left = time.monotonic()
                ended = time.monotonic()
            both, back = training - free.least(began, entered), free_bytes()
            print(
                f"{size / GIB:.2f} GiB: served {entered - began:.2f} s after the call, back after {ended - left:.2f} s; more GPU "
                f"memory than in training: at most {both / GIB:.2f} GiB before the server serves, {(training - lent) / GIB:.2f} "
                f"GiB while it does, {(training - back) / GIB:.2f} GiB afterwards"
            )
            assert both < max(size, KV_CACHE_BYTES) + SLACK, "weights, but not their copy nor the KV cache beside the trainer"
            assert abs(training - lent - KV_CACHE_BYTES) < SLACK, (
                "the server's weights and KV cache, without the trainer's weights"
            )
            assert abs(training - back) < SLACK
            assert all(torch.equal(tensor.cpu(), kept[name]) for name, tensor in weights.items())

        began = time.monotonic()
        with publisher.generation(4, offload=True, timeout=120):
            print(f"from the store: served {time.monotonic() - began:.2f} s after the call")
            assert servers(daemon)[0].workers[0].path == ""
            assert (fingerprints(server), tokens_and_logprobs(answers(server))) == (direct, generated), (
                "the same weights, from the store"
            )
