"""The callback for Megatron-Bridge's training loop, against a real daemon, called in the order of its `train()` (0.6.0)."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client import Operator, UsageError, Version
from resharder.client.integrations.megatron_bridge import PublishCallback

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import load_checkpoint, load_model, save_checkpoint, tiny_config


@dataclass
class Job:
    daemon: Daemon
    folder: Path
    model: torch.nn.Module

    def callback(self, name: str, **options: Any) -> PublishCallback:
        config = tiny_config("qwen3", num_hidden_layers=1)
        return PublishCallback(name, config, self.folder, endpoint=self.daemon.endpoint, **options)

    def versions(self, name: str) -> list[tuple[int, Version.State]]:
        with Operator(self.daemon.endpoint) as operator:
            return [(version.step, version.state) for version in reversed(operator.versions(name))]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3", num_hidden_layers=1), seed=3)
    with Daemon(keep_count=8) as daemon:
        yield Job(daemon, folder, load_model(folder))


@pytest.fixture(autouse=True)
def without_warnings(job: Job) -> Iterator[None]:
    """After the test, no version has a warning in its record."""
    yield
    with Operator(job.daemon.endpoint) as operator:
        assert {version.name: version.warnings for version in operator.versions() if version.warnings} == {}


def train(
    callback: PublishCallback, model: torch.nn.Module, iterations: int, skipped: tuple[int, ...] = (), first: int = 0
) -> None:
    """Call as `train()` does: the step is counted after `on_train_step_end`."""
    progress = SimpleNamespace(step=first)
    context = SimpleNamespace(state=SimpleNamespace(train_state=progress), model=[model], skipped_iter=None)
    callback.on_train_start(context)
    for number in range(first, first + iterations):
        if number not in skipped:
            with torch.no_grad():
                model.get_parameter("lm_head.weight").add_(1.0)
        context.skipped_iter = number in skipped
        callback.on_train_step_end(context)
        progress.step += 1
    context.skipped_iter = None
    callback.on_train_end(context)


def test_versions_are_published_at_the_start_every_nth_step_and_at_the_end(job: Job, tmp_path: Path) -> None:
    callback = job.callback("every", every=2)
    train(callback, job.model, iterations=5)
    wait_until(lambda: job.versions("every") == [(step, Version.State.READY) for step in (0, 2, 4, 5)], "all are READY")
    assert callback.handle is not None
    with Operator(job.daemon.endpoint) as operator:
        operator.export(callback.handle.version, tmp_path / "last", model="every")
    stored = load_checkpoint(tmp_path / "last")
    assert torch.equal(stored["lm_head.weight"], job.model.get_parameter("lm_head.weight"))


def test_a_skipped_iteration_is_not_published_and_a_resumed_job_counts_on(job: Job) -> None:
    train(job.callback("skipped"), job.model, iterations=3, skipped=(11, 12), first=10)
    assert [step for step, _ in job.versions("skipped")] == [10, 11]


def test_wrong_use_is_one_clear_error(job: Job) -> None:
    with pytest.raises(UsageError, match="expected every to be 1 or more, got 0"):
        job.callback("wrong", every=0)
    context = SimpleNamespace(state=SimpleNamespace(train_state=SimpleNamespace(step=0)), model=[job.model], skipped_iter=False)
    with pytest.raises(UsageError, match="on_train_start was not called before the first step"):
        job.callback("wrong").on_train_step_end(context)


@pytest.fixture(scope="module")
def bridge() -> ModuleType:
    """Megatron-Bridge's module of callbacks, without the package, whose import needs a GPU's libraries."""
    folder = os.environ.get("RESHARDER_TEST_MEGATRON_BRIDGE")
    if not folder:
        pytest.skip("Megatron-Bridge is not here: make integrations")
    spec = importlib.util.spec_from_file_location("bridge_callbacks", Path(folder) / "megatron/bridge/training/callbacks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    return module


@pytest.mark.integrations
def test_megatron_bridges_own_manager_calls_it(bridge: ModuleType, job: Job) -> None:
    callback = job.callback("bridge", every=2)
    manager = bridge.normalize_callbacks([callback])
    progress = SimpleNamespace(step=0)

    def fire(event: str, **fields: Any) -> None:
        assert bridge.should_fire(manager, event) == hasattr(callback, event)
        state = SimpleNamespace(train_state=progress)
        manager.fire(event, bridge.CallbackContext(state=state, model=[job.model], user_state=manager.user_state, **fields))

    fire("on_train_start")
    for _ in range(3):
        fire("on_train_step_start")
        fire("on_train_step_end", loss_dict={}, grad_norm=1.0, skipped_iter=False)
        progress.step += 1
    fire("on_train_end")
    assert [step for step, _ in job.versions("bridge")] == [0, 2, 3]
