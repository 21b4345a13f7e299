"""The weight sync of SkyRL 0.4.0, its own modules, with the lines of examples/skyrl/sender.py and a real vLLM server.

RESHARDER_TEST_SKYRL is a folder that has SkyRL 0.4.0 (`make integrations`); what is installed is 0.3.0.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.daemon import Daemon
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

FOLDER = os.environ.get("RESHARDER_TEST_SKYRL", "")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not FOLDER, reason="SkyRL 0.4.0 is not installed: make integrations"),
]

MODEL, PROMPT, TOKENS = "policy", [5, 17, 42, 7], 8
SYNC = "skyrl.backends.skyrl_train.weight_sync"


@pytest.fixture
def skyrl() -> Iterator[dict[str, ModuleType]]:
    """SkyRL's modules of the sync. Parents that import Ray or JAX are replaced by the folders of their modules."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_skyrls(name)}
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.train", "skyrl.train.utils"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [str(Path(FOLDER, *name.split(".")))]
    utils = sys.modules["skyrl.train.utils.utils"] = ModuleType("skyrl.train.utils.utils")
    utils.str_to_torch_dtype = lambda name: getattr(torch, name)  # type: ignore[attr-defined]
    yield {name: import_module(f"{SYNC}.{name}") for name in ("sources", "control_plane", "weight_senders")}
    for name in list(sys.modules):
        if _is_skyrls(name):
            del sys.modules[name]
    sys.modules.update(others)


def _is_skyrls(module: str) -> bool:
    return module.partition(".")[0] == "skyrl" or module == "examples.skyrl.sender"


def test_each_sync_of_skyrl_is_served_when_send_weights_returns(
    skyrl: dict[str, ModuleType], daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = inspect.signature(skyrl["weight_senders"].build_trainer_engine)
    from examples.skyrl import sender

    assert skyrl["weight_senders"].build_trainer_engine is sender.build_trainer_engine
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": MODEL}
    for name, value in common.items():
        monkeypatch.setenv(name, value)
    module = load_model(folder)
    environment = common | {"RESHARDER_UNREACHABLE": "prefer", "VLLM_PLUGINS": "resharder", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(folder, ["--weight-transfer-config", '{"backend": "resharder"}'], environment) as server:
        arguments: dict[str, Any] = dict(
            ie_cfg=SimpleNamespace(model_dtype="float32"),
            colocate_all=False,
            rank=0,
            inference_world_size=1,
            source_factory=lambda dtype, _: skyrl["sources"].FsdpWeightSource(module, dtype),
            draft_source_factory=None,
            server_urls=[f"http://127.0.0.1:{server.port}"],
            data_parallel_size=1,
            base_model_path=str(folder),
        )
        theirs.bind(**arguments)
        engine = sender.build_trainer_engine(**arguments)
        for version in (1, 2):
            engine.send_weights()
            answer = server.generate(PROMPT, TOKENS)
            assert (answer.version, answer.token_ids) == (str(version), greedy_answer(module, PROMPT, TOKENS))
            with torch.no_grad():
                module.get_parameter("lm_head.weight").mul_(-1)
        skyrl["weight_senders"].teardown_engine(engine)
