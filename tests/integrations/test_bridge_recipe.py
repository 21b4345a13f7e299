"""Megatron-Bridge's own LoRA recipe, two steps on two CPU ranks: what the callback publishes is what Megatron-Bridge saves."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from resharder.client.operator import Operator
from safetensors.torch import load_file

from tests.client.models import equal
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.tiny_hf import load_model, save_checkpoint, tiny_config

PYTHON = os.environ.get("RESHARDER_TEST_BRIDGE_PYTHON")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not PYTHON, reason="needs Python 3.12 with Megatron-Bridge: make integrations BRIDGE_PYTHON=…"),
]
ROOT = Path(__file__).parents[2]
TOKENS = torch.tensor([[5, 17, 300, 41, 8]])


def test_a_lora_recipe_publishes_what_megatron_bridge_saves_and_peft_opens(daemon: Daemon, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tiny_config("qwen3", vocab_size=512), seed=3)
    for ranks in (1, 2):  # the base is imported, and the recipe run
        launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
        program = ["-m", "tests.integrations.bridge_recipe_ranks", str(folder), daemon.endpoint, str(tmp_path)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [str(PYTHON), *launch, *program], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with Operator(daemon.endpoint) as operator:
        assert [version.step for version in operator.versions("bridge-lora")][::-1] == [0, 1, 2]
        for version in (1, 2, 3):
            operator.export(version, tmp_path / str(version), model="bridge-lora")
    assert equal(load_file(tmp_path / "3/adapter_model.safetensors"), load_file(tmp_path / "saved/adapter_model.safetensors"))
    base = logits(load_model(folder))
    found = [logits(PeftModel.from_pretrained(load_model(folder), tmp_path / str(version))) for version in (1, 2, 3)]
    assert torch.equal(found[0], base), "lora_B begins as zeros"
    assert not torch.allclose(found[1], base, atol=1e-3)
    assert not torch.allclose(found[2], found[1], atol=1e-3)
    assert torch.allclose(found[2], logits(PeftModel.from_pretrained(load_model(folder), tmp_path / "saved")), atol=1e-6)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(TOKENS).logits
    return found
