"""SkyRL's own policy worker, as far as it imports without CUDA, with the lines of examples/skyrl and a real vLLM server."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typing_extensions

pytest.importorskip("skyrl", reason="SkyRL is not installed: make integrations")

from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

pytestmark = pytest.mark.integrations

MODEL, PROMPT = "policy", [5, 17, 42, 7]


@pytest.fixture(scope="module")
def worker_kind() -> type:
    """SkyRL's base class with the example's mixin. Before Python 3.12, its pydantic models need typing_extensions' TypedDict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typing.TypedDict", typing_extensions.TypedDict)
        from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

        from examples.skyrl.worker import Publishes

    class Worker(Publishes, PolicyWorkerBase):
        """A worker without a process group of its own, whose model SkyRL's strategy would make."""

        def __init__(self, module: torch.nn.Module, folder: Path) -> None:
            self.cfg = SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path=str(folder))))
            self.model = SimpleNamespace(model=module)

        def send(self) -> None:
            """Make the call of `broadcast_to_inference_engines`."""
            asyncio.run(self._weight_transfer_sender.send_chunks(gathered(), weight_metadata={"names": []}))

    return Worker


def gathered() -> Iterator[Any]:
    raise AssertionError("expected no gather")
    yield


def test_each_update_of_a_skyrl_worker_is_served_when_send_chunks_returns(
    worker_kind: Any, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": MODEL}
    for name, value in common.items():
        monkeypatch.setenv(name, value)
    module = load_model(folder)
    environment = common | {"RESHARDER_UNREACHABLE": "prefer", "VLLM_PLUGINS": "resharder"}
    with VllmServer(folder, [], environment) as server:
        worker = worker_kind(module, folder)
        asyncio.run(worker.init_weight_sync_state(None, None))
        for version in (1, 2):
            worker.send()
            answer = server.generate(PROMPT, 8)
            assert (answer.version, answer.token_ids) == (str(version), greedy_answer(module, PROMPT))
            with torch.no_grad():
                module.lm_head.weight.mul_(-1)
        assert wait_serving(daemon, 2).version == 2
        worker._weight_transfer_sender.teardown()
