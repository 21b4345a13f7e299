"""The weight sync of SkyRL 0.4.0, its own source and client, with the lines of examples/skyrl/sender.py and a real vLLM server.

SkyRL 0.4.0 is in no package index: RESHARDER_TEST_SKYRL is a checkout of it (`make integrations SKYRL=…`).
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.daemon import Daemon
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

CHECKOUT = os.environ.get("RESHARDER_TEST_SKYRL", "")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not CHECKOUT, reason="no checkout of SkyRL 0.4.0: make integrations SKYRL=…"),
]

MODEL, PROMPT, TOKENS = "policy", [5, 17, 42, 7], 8
SYNC = "skyrl.backends.skyrl_train.weight_sync"


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """SkyRL's modules of its source and its client, from the checkout; what else the example imports of SkyRL is replaced."""
    found = {name: ModuleType(name) for name in (f"{SYNC}.weight_senders", "skyrl.train.utils.utils")}
    found["skyrl.train.utils.utils"].str_to_torch_dtype = lambda name: getattr(torch, name)  # type: ignore[attr-defined]
    for name in ("sources", "control_plane"):
        path = Path(CHECKOUT).joinpath(*SYNC.split("."), f"{name}.py")
        spec = importlib.util.spec_from_file_location(f"{SYNC}.{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = found[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    for name in list(found):
        parent, _, own = name.rpartition(".")
        while parent:
            setattr(found.setdefault(parent, ModuleType(parent)), own, found[name])
            name, (parent, _, own) = parent, parent.rpartition(".")
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_each_sync_of_skyrl_is_served_when_send_weights_returns(
    skyrl: dict[str, ModuleType], daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.skyrl import sender

    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": MODEL}
    for name, value in common.items():
        monkeypatch.setenv(name, value)
    module = load_model(folder)
    environment = common | {"RESHARDER_UNREACHABLE": "prefer", "VLLM_PLUGINS": "resharder", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(folder, ["--weight-transfer-config", '{"backend": "resharder"}'], environment) as server:
        engine = sender.weight_senders.build_trainer_engine(
            ie_cfg=SimpleNamespace(model_dtype="float32"),
            colocate_all=False,
            rank=0,
            inference_world_size=1,
            source_factory=lambda dtype, _: skyrl[f"{SYNC}.sources"].FsdpWeightSource(module, dtype),
            draft_source_factory=None,
            server_urls=[f"http://127.0.0.1:{server.port}"],
            data_parallel_size=1,
            base_model_path=str(folder),
        )
        for version in (1, 2):
            engine.send_weights()
            answer = server.generate(PROMPT, TOKENS)
            assert (answer.version, answer.token_ids) == (str(version), greedy_answer(module, PROMPT, TOKENS))
            with torch.no_grad():
                module.get_parameter("lm_head.weight").mul_(-1)
        engine.shutdown()
