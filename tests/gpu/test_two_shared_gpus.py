"""Two ranks of a trainer and the two workers of a vLLM server take turns on two GPUs, a rank and a worker on each.

Each rank has half of the tensors, so each worker reads the memory of both. Memory is looked at on both GPUs in each phase.
"""

import json
import multiprocessing
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.gpu_server import (
    KV_CACHE_BYTES,
    SHAPES,
    SLEEP_MODE,
    answers,
    free_bytes,
    tokens_and_logprobs,
    worker_fingerprints,
)
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.ports import free_port
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
SLACK = 512 << 20
"""Contexts of the processes, workspaces, and NCCL's buffers of the two workers."""
FAMILY, CHANGES = SHAPES["dense"]
CONFIG = tiny_config(FAMILY, dtype="bfloat16", **CHANGES)
CONTEXT = multiprocessing.get_context("spawn")


def rank_process(rank: int, endpoint: str, folder: Path, port: int, commands: Any, answered: Any) -> None:
    """Run one rank of the trainer, which publishes step 1 and then enters a generation for each command."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    drawn = random_weights(CONFIG, 1, torch.bfloat16)
    weights = {name: tensor.cuda() for name, tensor in list(drawn.items())[rank::2]}
    with connect(endpoint, model="policy", job="j", rank=rank, world_size=2, direct_wait=60) as publisher:
        publisher.attach(weights, CONFIG, folder, ranks=[rank])
        publisher.publish(1).wait_ready(120)
        answered.put("ready")
        while (step := commands.get()) is not None:
            for tensor in weights.values():
                tensor.mul_(1.01)
            kept = {name: tensor.clone().cpu() for name, tensor in weights.items()}
            torch.cuda.empty_cache()
            training = free_bytes(rank)
            with publisher.generation(step, offload=True, direct=True, timeout=120) as generation:
                answered.put({"version": generation.version, "lent": training - free_bytes(rank)})
                commands.get()
            same = all(torch.equal(tensor.cpu(), kept[name]) for name, tensor in weights.items())
            answered.put({"same": same, "kept": training - free_bytes(rank)})


def processes() -> list[str]:
    """Process ids, once for each GPU on which a process has a context."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


class Rank:
    """Process of one rank."""

    def __init__(self, rank: int, endpoint: str, folder: Path, port: int) -> None:
        self.commands, self._answered = CONTEXT.Queue(), CONTEXT.Queue()
        arguments = (rank, endpoint, folder, port, self.commands, self._answered)
        self.process = CONTEXT.Process(target=rank_process, args=arguments, daemon=True)
        self.process.start()

    def answer(self) -> Any:
        return self._answered.get(timeout=180)


@contextmanager
def shared_gpus(folder: Path) -> Iterator[tuple[Daemon, list[Rank], VllmServer]]:
    """Two ranks, and a server of two workers, asleep, which booted the first version."""
    save_tokenizer(folder, CONFIG["vocab_size"])
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with Daemon() as daemon, Operator(daemon.endpoint) as operator:
        port = free_port()
        ranks = [Rank(rank, daemon.endpoint, folder, port) for rank in range(2)]
        try:
            assert [rank.answer() for rank in ranks] == ["ready", "ready"]
            sizes = ["--tensor-parallel-size", "2", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
            environment = {"VLLM_SERVER_DEV_MODE": "1", "RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
            options = ["--load-format", "resharder", *SLEEP_MODE, *sizes]
            with VllmServer(folder, options, environment, dtype="bfloat16", timeout=300) as server:
                wait_serving(daemon, 1)
                operator.sleep("policy", level=2)
                wait_until(lambda: servers(daemon)[0].power == resources_pb2.ASLEEP_2, "the server sleeps", 120)
                yield daemon, ranks, server
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def test_generations_of_two_ranks_lend_two_gpus_to_two_workers_in_phases(tmp_path: Path) -> None:
    with shared_gpus(tmp_path) as (daemon, ranks, server):
        seen = []
        for step in (2, 3):
            for rank in ranks:
                rank.commands.put(step)
            entered = [rank.answer() for rank in ranks]
            (one,) = servers(daemon)
            assert {answer["version"] for answer in entered} == {one.version}
            assert [worker.path for worker in one.workers] == ["peer-memory"] * 2
            # Each GPU lends the rank's half of the weights, and holds the worker's half and its KV cache.
            assert all(abs(answer["lent"] - KV_CACHE_BYTES) < SLACK for answer in entered), entered
            seen.append((worker_fingerprints(server), tokens_and_logprobs(answers(server))))
            for rank in ranks:
                rank.commands.put("leave")
            for answer in (rank.answer() for rank in ranks):
                assert answer["same"]
                assert abs(answer["kept"]) < SLACK, answer
            assert servers(daemon)[0].power == resources_pb2.ASLEEP_2
            assert len(processes()) == len(set(processes()))  # two ranks and two workers, each on its GPU alone
        assert seen[0] != seen[1]
        with Operator(daemon.endpoint) as operator:
            operator.wake("policy")
            wait_serving(daemon, 3)
            assert (worker_fingerprints(server), tokens_and_logprobs(answers(server))) == seen[1], "as installed from the store"
