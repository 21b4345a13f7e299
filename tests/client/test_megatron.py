"""Four real Megatron ranks publish; what is exported is the checkpoint that they were filled from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config


@pytest.mark.parametrize(
    ("family", "layout", "wrapped"),
    [
        ("qwen3_tied", {"tp": 2, "pp": 2, "vocab_multiple": 128}, False),
        ("qwen3_moe", {"tp": 2, "ep": 2}, True),
    ],
    ids=["pipeline, tied, padded", "experts, bf16, under DDP"],
)
def test_the_exported_checkpoint_is_the_source_bit_for_bit(
    family: str, layout: dict[str, Any], wrapped: bool, tmp_path: Path
) -> None:
    config = tiny_config(family)
    source = save_checkpoint(tmp_path / "source", config, seed=3, dtype=torch.bfloat16 if wrapped else torch.float32)
    (tmp_path / "layout.json").write_text(json.dumps({"layout": layout, "wrapped": wrapped}))
    with Daemon() as daemon:
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
                *("-m", "tests.client.megatron_publisher", daemon.endpoint, tmp_path),
            ],
            check=True,
            timeout=1000,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        found = exported(daemon.endpoint, "latest", tmp_path / "out")
    assert equal(found, load_checkpoint(source))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == config["vocab_size"]
    model, reference = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert equal(model.state_dict(), reference.state_dict())
