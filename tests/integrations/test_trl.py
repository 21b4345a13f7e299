"""TRL's own GRPOTrainer, with the lines of examples/trl, a real daemon and a real vLLM server."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: make integrations")

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.shell_session import Session
from tests.support.tiny_hf import save_checkpoint, tiny_config
from tests.support.typed_page import type_page
from tests.support.vllm_server import CPU_ENVIRONMENT, VllmServer

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl" / "trainer.py"
STEPS = 2


def test_the_page_s_commands_for_one_rank_print_what_it_says(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "copy", tiny_config("qwen3", num_hidden_layers=2), seed=3)
    page, port, endpoint = (ROOT / "docs" / "frameworks.md").read_text(), str(free_port()), f"127.0.0.1:{free_port()}"
    for shown, own in (("8000", port), ("127.0.0.1:7677", endpoint), ("examples/trl", str(EXAMPLE.parent))):
        assert shown in page
        page = page.replace(shown, own)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARDER", "VLLM"))}
    environment |= {**CPU_ENVIRONMENT, "RESHARDERD_LISTEN": endpoint, "RESHARDERD_WEB_LISTEN": ""}
    environment["PATH"] = f"{Path(sys.executable).parent}:{ROOT / '.venv' / 'bin'}:{environment['PATH']}"
    with (
        TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as memory,
        Session(tmp_path, environment, tmp_path / "log") as session,
    ):
        found = type_page(session, page.replace("/dev/shm/trl", f"{memory}/store"), "docs/frameworks.md")
    assert not found, "\n\n".join([*found, (tmp_path / "log").read_text()[-8000:]])


def test_version_n_of_fsdp2_has_the_weights_after_n_optimizer_steps_and_is_served(daemon: Daemon, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=2), seed=3)
    shutil.copytree(folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    port = free_port()
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy", "VLLM_PLUGINS": "resharder"}
    rendezvous = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    program = ["-m", "torch.distributed.run", *rendezvous, "-m", "tests.integrations.trl_ranks", str(tmp_path)]
    command = [sys.executable, *program, str(folder), "--server", f"http://127.0.0.1:{port}", "--steps", str(STEPS)]
    with (tmp_path / "log").open("wb") as log:
        trainer = subprocess.Popen(command, env=os.environ | common | {"HF_HUB_OFFLINE": "1"}, stdout=log, stderr=log, cwd=ROOT)
    try:
        options = ["--load-format", "resharder", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        with VllmServer(tmp_path / "config", options, common | {"VLLM_SERVER_DEV_MODE": "1"}, port=port) as server:
            status = trainer.wait(800)
            text = (tmp_path / "log").read_text(errors="replace")
            assert status == 0, text[-3000:] + server.log_tail()
            lines = [json.loads(found) for found in re.findall(r'{"step": .*?}', text)]  # beside a progress bar's
            assert [line["step"] for line in lines] == list(range(STEPS))
            assert server.generate([5, 17, 42], 2).version == str(lines[-1]["version"])
        trained = [torch.load(tmp_path / f"{step}.pt") for step in range(STEPS)]
        assert not equal(*trained), "the optimizer changed nothing"
        for line, expected in zip(lines, trained, strict=True):
            assert equal(exported(daemon.endpoint, str(line["version"]), tmp_path / f"out-{line['step']}"), expected)
    finally:
        trainer.kill()
        trainer.wait()
