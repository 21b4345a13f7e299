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
from resharder.client.operator import Operator
from resharder.client.tools.import_checkpoint import import_checkpoint

pytest.importorskip("trl", reason="TRL is not installed: make integrations")

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.shell_session import Session
from tests.support.tiny_hf import load_model, save_checkpoint, tiny_config
from tests.support.typed_page import type_page
from tests.support.vllm_server import CPU_ENVIRONMENT, VllmServer, completion

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


def test_a_server_generates_for_trl_from_the_versions_of_pefts_adapter(daemon: Daemon, tmp_path: Path) -> None:
    from peft import PeftModel

    folder, prompt, port = save_checkpoint(tmp_path / "model", tiny_config("qwen3"), seed=3), [5, 17, 42], free_port()
    import_checkpoint(daemon.endpoint, folder, model="trl", step=0)
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "trl", "RESHARDER_ADAPTERS": "trl-lora"}
    options = ["--load-format", "resharder", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    options += ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"]
    environment = common | {"VLLM_PLUGINS": "resharder", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(folder, options, environment, port=port) as server:
        program = [sys.executable, str(EXAMPLE), str(folder), "--server", f"http://127.0.0.1:{port}", "--steps", "3", "--lora"]
        trained = subprocess.run(
            program, env=os.environ | common | {"HF_HUB_OFFLINE": "1"}, cwd=EXAMPLE.parents[2], capture_output=True, text=True
        )
        assert trained.returncode == 0, trained.stderr[-3000:] + server.log_tail()
        lines = [json.loads(found) for found in re.findall(r'{"step": .*?}', trained.stdout)]
        assert [line["step"] for line in lines] == [0, 1, 2]
        asked = [line for line in (server.log or folder).read_text().splitlines() if "trl-lora" in line]
        answer = server.request("POST", "/v1/completions", completion(prompt, 8, model="trl-lora"))
        assert (answer.status, answer.version) == (200, f"1;trl-lora={lines[-1]['version']}"), asked[-5:]
    with Operator(daemon.endpoint) as operator:
        for line in lines:
            operator.export(line["version"], tmp_path / f"out-{line['step']}", model="trl-lora")
    written = [(tmp_path / f"out-{step}" / "adapter_model.safetensors").read_bytes() for step in range(3)]
    assert len(set(written)) == 3, "each optimizer step changed the adapter"
    model = PeftModel.from_pretrained(load_model(folder), tmp_path / "out-2").eval()
    tokens = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert tokens[0, len(prompt) :].tolist() == answer.json()["choices"][0]["token_ids"]
