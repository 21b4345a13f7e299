"""verl's checkpoint engine `resharder` without Ray: its calls from threads, a restart, errors, a server that follows."""

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make integrations")

from resharder.client import Operator, UsageError, VersionAborted, WaitTimeout
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

pytestmark = pytest.mark.integrations

Tensors = dict[str, torch.Tensor]

VLLM_PYTHON = str(Path(__file__).parents[2] / ".venv" / "bin" / "python")
"""vLLM is in the environment of `make setup`: verl 0.9.1 needs an older transformers than vLLM 0.32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_external_libs("resharder.client.integrations.verl")
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3", num_hidden_layers=1), seed=3)


class Engines:
    """Checkpoint engines of two actor ranks and a rollout worker. verl's manager calls in the order of `round`."""

    def __init__(self, daemon: Daemon, model: str, **arguments: Any) -> None:
        def engine(is_master: bool = False) -> Any:
            given = {"model": model, "endpoint": daemon.endpoint} | arguments
            return CheckpointEngineRegistry.new("resharder", bucket_size=1 << 20, is_master=is_master, **given)

        self.actors, self.rollout = [engine(is_master=True), engine()], engine()

    def round(self) -> None:
        everyone = [*self.actors, self.rollout]
        metadata = [engine.prepare() for engine in everyone]
        actors, rollouts = CheckpointEngineRegistry.get("resharder").build_topology(2, 1, metadata)
        for rank, engine in enumerate(self.actors):
            engine.init_process_group(**{name: values[rank] for name, values in actors.items()})
        self.rollout.init_process_group(**{name: values[0] for name, values in rollouts.items()})

    def send(self, rank: int, tensors: Tensors, step: int) -> Any:
        return asyncio.run(self.actors[rank].send_weights(iter(tensors.items()), step))

    def receive(self, step: int) -> Tensors:
        async def received() -> Tensors:
            return {name: tensor.clone() async for name, tensor in self.rollout.receive_weights(step)}

        return asyncio.run(received())


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@pytest.fixture
def full(folder: Path) -> Tensors:
    return load_checkpoint(folder)


def test_a_job_that_starts_again_repeats_its_steps_with_other_weights(daemon: Daemon, folder: Path, full: Tensors) -> None:
    for factor in (1.0, 2.0):
        weights = {name: tensor * factor for name, tensor in full.items()}
        engines = Engines(daemon, "again", path=str(folder))
        engines.round()
        *_, received = together(
            lambda e=engines, w=weights: e.send(0, w, 5),
            lambda e=engines, w=weights: e.send(1, w, 5),
            lambda e=engines: e.receive(5),
        )
        assert received.keys() == weights.keys()
        assert all(torch.equal(received[name], weights[name]) for name in weights)


def test_a_worker_of_an_aborted_step_gets_its_reason(daemon: Daemon, folder: Path, full: Tensors) -> None:
    engines = Engines(daemon, "aborted", path=str(folder))
    engines.round()
    together(lambda: engines.send(0, full, 1), lambda: engines.send(1, full, 1))
    engines.send(0, full, 2)
    engines.actors[0]._publisher.abort("the loss is NaN")
    with pytest.raises(VersionAborted, match=r"versions/2 \(step 2\) was aborted: .*the loss is NaN"):
        engines.receive(2)


def test_what_is_missing_is_one_clear_error(daemon: Daemon, folder: Path, full: Tensors) -> None:
    engines = Engines(daemon, "missing", timeout=0.2)
    with pytest.raises(UsageError, match="send_weights was called in an actor rank before init_process_group"):
        engines.send(0, full, 1)
    engines.round()
    with pytest.raises(UsageError, match=r"NoneType has no model_config.hf_config: set engine_kwargs.resharder.path"):
        engines.send(0, full, 1)
    with pytest.raises(WaitTimeout, match=r"the actor has not published step 1 of model 'missing' after 0.2 s"):
        engines.receive(1)
    with Operator(daemon.endpoint) as operator:
        assert "missing" not in {version.model for version in operator.versions()}


def test_a_worker_of_a_following_server_copies_nothing_and_returns_when_it_serves(
    daemon: Daemon, folder: Path, full: Tensors, tmp_path: Path
) -> None:
    def update(weights: Tensors, step: int) -> Tensors:
        engines.round()
        return together(
            lambda: engines.send(0, weights, step), lambda: engines.send(1, weights, step), lambda: engines.receive(step)
        )[-1]

    engines = Engines(daemon, "followed", path=str(folder))
    assert update(full, 1).keys() == full.keys()
    shutil.copytree(folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "followed", "VLLM_PLUGINS": "resharder"}
    with VllmServer(tmp_path / "config", ["--load-format", "resharder"], environment, python=VLLM_PYTHON) as server:
        before = server.generate([5, 17, 42], 4)
        engines = Engines(daemon, "followed", path=str(folder), follow=True)
        assert update({name: -tensor for name, tensor in full.items()}, 2) == {}
        after = server.generate([5, 17, 42], 4)
    assert (before.version, after.version) == ("1", "2")
    assert before.token_ids != after.token_ids
