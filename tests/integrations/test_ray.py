"""Trainers and servers that are Ray actors, with vLLM's own client for them (`RayVLLMWeightSyncClient`) and a real daemon."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="Ray is not installed: make integrations")
pytest.importorskip("vllm.entrypoints.rl", reason="this vLLM has no factory for trainers")

import ray
from resharder.client import NotServed, Operator, ResharderTrainerInitInfo, VersionTarget, attach
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import ModuleSource, RayVLLMWeightSyncClient, WeightTransferTrainerFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from tests.integrations.ray_cluster import start
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import CPU_ENVIRONMENT

pytestmark = pytest.mark.integrations

MODEL, PROMPT = "policy", [5, 17, 42, 7]


class Answers:
    """Answers of an engine."""

    async def answer(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """Return a greedy answer and vLLM's weight version."""
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        async for output in self.generate({"prompt_token_ids": list(prompt)}, greedy, os.urandom(8).hex()):
            last = output
        return list(last.outputs[0].token_ids), await self.get_weight_version()


class Subclass(AsyncLLM, Answers):
    """An actor as in vLLM's examples (`examples/rl`): the engine itself."""

    def __init__(self, folder: str) -> None:
        config = engine_args(folder).create_engine_config()
        super().__init__(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)


class Forwarding(Answers):
    """An actor that has an engine, attaches it itself, and forwards the calls."""

    def __init__(self, folder: str) -> None:
        self.engine = AsyncLLM.from_engine_args(engine_args(folder))
        self.generate, self.get_weight_version = self.engine.generate, self.engine.get_weight_version

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.follower = await attach(self.engine)
        await self.engine.init_weight_transfer_engine(request)

    async def start_weight_update(self) -> None:
        await self.engine.start_weight_update()

    async def update_weights(self, request: Any) -> None:
        await self.engine.update_weights(request)

    async def finish_weight_update(self) -> None:
        await self.engine.finish_weight_update()

    async def update_weight_version(self, version: str) -> None:
        await self.engine.update_weight_version(version)


def engine_args(folder: str) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=folder,
        load_format="dummy",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        weight_transfer_config=WeightTransferConfig(backend="resharder"),
    )


class TrainerActor:
    """A trainer that sends its weights by vLLM's API."""

    def __init__(self, folder: str, endpoint: str, servers: list[Any]) -> None:
        self.model = load_model(Path(folder))
        self.engine = WeightTransferTrainerFactory.trainer_init(
            ResharderTrainerInitInfo(rank=0, model=MODEL, endpoint=endpoint, tokenizer=folder),
            client=RayVLLMWeightSyncClient(servers),
            source=ModuleSource(self.model),
        )

    @torch.no_grad()
    def send(self, factor: float) -> tuple[list[int], str]:
        """Send changed weights; return transformers' greedy answer by them, and the version."""
        self.model.lm_head.weight.mul_(factor)
        self.engine.send_weights()
        return list(greedy_answer(self.model, PROMPT)), str(self.engine.handle.version)

    def refusal(self) -> str:
        """Send the weights; return the error."""
        try:
            self.engine.send_weights()
        except NotServed as error:
            return str(error)
        return ""


@pytest.fixture(scope="module")
def cluster(daemon: Daemon) -> Iterator[None]:
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": MODEL,
        "RESHARDER_UNREACHABLE": "prefer",
        "VLLM_PLUGINS": "resharder",
        "TORCH_COMPILE_DISABLE": "1",
    }
    with start(3, CPU_ENVIRONMENT | environment):
        yield


def test_actors_that_publish_move_servers_that_are_actors(daemon: Daemon, cluster: None, tmp_path: Path) -> None:
    folder = str(save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3))
    servers = [ray.remote(kind).remote(folder) for kind in (Subclass, Forwarding)]
    trainer = ray.remote(TrainerActor).remote(folder, daemon.endpoint, servers)
    sent = []
    for factor in (1.0, -1.0):
        sent.append(ray.get(trainer.send.remote(factor)))
        answers = ray.get([server.answer.remote(PROMPT) for server in servers])
        assert answers == [sent[-1]] * len(servers), "send_weights returns when all servers serve the version"
    assert [version for _, version in sent] == ["1", "2"]
    assert sent[0][0] != sent[1][0]
    with Operator(daemon.endpoint) as operator:
        assert [server.version for server in operator.servers()] == [2, 2]
        operator.set_fleet(MODEL, target=VersionTarget(VersionTarget.Kind.NUMBER, 2))
        refusal = ray.get(trainer.refusal.remote())
        assert refusal.startswith(
            f"expected models/{MODEL}/versions/3 to be served, got expected version 3 to be served, got version 2"
        )
        assert refusal.endswith(f"fleet {MODEL} is pinned to version 2"), "the reason, without an actor's traceback"
        ray.get(servers[0].shutdown.remote())
        wait_until(lambda: len(operator.servers()) == 1, "the server that was shut down leaves the fleet")
