"""TRL's own GRPOTrainer, with the lines of examples/trl, a real daemon and a real vLLM server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make integrations")

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.tiny_hf import save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

pytestmark = pytest.mark.integrations

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl" / "trainer.py"
STEPS = 2


@pytest.mark.parametrize("ranks", [1, 2], ids=["one rank", "FSDP2"])
def test_version_n_of_trl_has_the_weights_after_n_optimizer_steps_and_is_served(
    ranks: int, daemon: Daemon, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=2), seed=3)
    shutil.copytree(folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    port = free_port()
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy", "VLLM_PLUGINS": "resharder"}
    program = [str(EXAMPLE)]
    if ranks > 1:
        rendezvous = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
        program = ["-m", "torch.distributed.run", *rendezvous, "-m", "tests.integrations.trl_ranks", str(tmp_path)]
    command = [sys.executable, *program, str(folder), "--server", f"http://127.0.0.1:{port}", "--steps", str(STEPS)]
    with (tmp_path / "log").open("wb") as log:
        trainer = subprocess.Popen(
            command, env=os.environ | common | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log, cwd=EXAMPLE.parents[2]
        )
    try:
        options = ["--load-format", "resharder", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        with VllmServer(tmp_path / "config", options, common | {"VLLM_SERVER_DEV_MODE": "1"}, port=port) as server:
            status = trainer.wait(800)
            text = (tmp_path / "log").read_text(errors="replace")
            assert status == 0, text[-3000:] + server.log_tail()
            lines = [json.loads(found) for found in re.findall(r'{"step": .*?}', text)]  # beside a progress bar's
            assert [line["step"] for line in lines] == list(range(STEPS))
            assert server.generate([5, 17, 42], 2).version == str(lines[-1]["version"])
        if ranks > 1:
            trained = [torch.load(tmp_path / f"{step}.pt") for step in range(STEPS)]
            assert not equal(*trained), "the optimizer changed nothing"
            for line, expected in zip(lines, trained, strict=True):
                assert equal(exported(daemon.endpoint, str(line["version"]), tmp_path / f"out-{line['step']}"), expected)
    finally:
        trainer.kill()
        trainer.wait()
