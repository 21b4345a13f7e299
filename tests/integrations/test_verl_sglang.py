"""verl's SGLang rollout with backend `resharder` on CPUs: verl's replica, server, adapter and manager, and a real SGLang server.

verl 0.9.1 pins SGLang 0.5.12; this runs with the newest one that the plugin supports. Not verl's: the trainer's engine.
"""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.sglang_server import STAND_INS, environment

pytest.importorskip("verl", reason="verl is not installed: make integrations")
pytest.importorskip("sglang", reason="SGLang is not installed: make integrations")
sys.path.insert(0, str(STAND_INS))

import ray
import torch
from resharder.client import Operator
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import get_rollout_replica_class

from tests.integrations.ray_cluster import start
from tests.integrations.verl_workers import ServedRollout, TrainerWorker, group
from tests.support.daemon import Daemon
from tests.support.sglang_program import OPTIONS
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config

pytestmark = pytest.mark.integrations

PROMPT, TOKENS = [5, 17, 42, 7], 8
ENGINE = {name: value for name, value in OPTIONS.items() if name not in ("dtype", "mem_fraction_static", "disable_cuda_graph")}


class Job:
    """An actor of one rank, a rollout with its server, and verl's manager of updates."""

    def __init__(self, folder: Path, **arguments: object) -> None:
        config = CheckpointEngineConfig(
            backend="resharder",
            custom_backend_module="resharder.client.integrations.verl",
            update_weights_bucket_megabytes=1,
            engine_kwargs={"resharder": arguments},
        )
        model = HFModelConfig(path=str(folder))
        rollout = RolloutConfig(
            name="sglang",
            mode="async",
            dtype="float32",
            load_format="auto",
            enforce_eager=True,
            skip_tokenizer_init=True,
            tensor_model_parallel_size=1,
            gpu_memory_utilization=0.6,
            prompt_length=64,
            response_length=64,
            checkpoint_engine=config,
            engine_kwargs={"sglang": ENGINE | {"enable_memory_saver": False}},
        )
        self.actors = group(1, RayClassWithInitArgs(ray.remote(TrainerWorker), "stream", model, config))
        self.rollouts = group(
            1, RayClassWithInitArgs(ray.remote(ServedRollout), rollout_config=rollout, model_config=model, replica_rank=0)
        )
        self.replica = get_rollout_replica_class("sglang")(replica_rank=0, config=rollout, model_config=model)
        asyncio.run(self.replica.init_hybrid(self.rollouts))
        self.manager = CheckpointEngineManager(config=config, actor_wg=self.actors, replicas=[self.replica])

    def ask(self) -> tuple[list[int], int | None]:
        """The tokens of a greedy answer, and verl's label of them."""
        sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
        server = self.replica.server_handle
        answer: Any = ray.get(server.generate.remote(prompt_ids=PROMPT, sampling_params=sampling, request_id="one"))
        return answer.token_ids, answer.extra_fields["global_steps"]


def expected(folder: Path, factor: float) -> list[int]:
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return list(greedy_answer(model, PROMPT, TOKENS))


@contextmanager
def cluster(variables: dict[str, str]) -> Iterator[None]:
    given = environment() | {"CUDA_VISIBLE_DEVICES": ""} | variables
    with start(4, given):
        yield


def test_a_server_that_verl_starts_serves_each_update_when_verl_goes_on(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    with Daemon() as daemon:
        plugin = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy", "RESHARDER_UNREACHABLE": "prefer"}
        with cluster(plugin), Operator(daemon.endpoint) as operator:
            job = Job(folder, model="policy", endpoint=daemon.endpoint, follow=True, timeout=120.0)
            assert job.ask() == (expected(folder, 1.0), None)
            for step, wire_format in enumerate(("named_tensors", "delta_flush"), start=1):  # on CPUs; where verl has CUDA IPC
                job.actors.scale(-1.0)
                job.rollouts.receive_as(wire_format)
                job.manager.update_weights(global_steps=step)
                assert job.ask() == (expected(folder, (-1.0) ** step), step)
                assert [server.version for server in operator.servers()] == [step]


def test_a_server_without_the_plugin_takes_the_copies_of_its_rollout_worker(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    with Daemon() as daemon, cluster({"SGLANG_PLUGINS": "none"}):
        job = Job(folder, model="policy", endpoint=daemon.endpoint, timeout=120.0)
        for step in (1, 2):
            job.actors.scale(-1.0)
            job.manager.update_weights(global_steps=step)
            assert job.ask() == (expected(folder, (-1.0) ** step), step)
