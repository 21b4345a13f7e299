"""prime-rl's broadcast and its client of the servers, with the lines of examples/prime_rl, a real daemon and a real vLLM server.

prime-rl is in no package index: RESHARDER_TEST_PRIME_RL is a checkout of it (`make integrations PRIME_RL=…`).
"""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from tests.integrations.prime_rl_ranks import STEPS, train, use
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer

CHECKOUT = os.environ.get("RESHARDER_TEST_PRIME_RL", "")
pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not CHECKOUT, reason="no checkout of prime-rl: make integrations PRIME_RL=…"),
]

PROMPT, TOKENS = [5, 17, 42, 7], 8
ROOT = Path(__file__).parents[2]


@torch.no_grad()
def expected(folder: Path) -> list[tuple[int, ...]]:
    """Return for each step the greedy answer of transformers. prime-rl gathers in BF16."""
    answers, model = [], load_model(folder)
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    for _ in range(STEPS):
        answers.append(greedy_answer(model, PROMPT, TOKENS))
        train(model)
    return answers


def test_prime_rls_client_returns_when_the_servers_have_the_weights_of_its_step(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path / "model", tiny_config("qwen3", num_hidden_layers=2), seed=3)
    shutil.copytree(folder, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy"}
    program = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    arguments = ["-m", "tests.integrations.prime_rl_ranks", CHECKOUT, str(folder), str(tmp_path / "output")]
    environment = os.environ | common | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, *program, *arguments], env=environment, cwd=ROOT, check=True, timeout=500)
    assert sorted(path.parent.name for path in (tmp_path / "output").rglob("STABLE")) == ["step_0", "step_1"]

    for name, value in common.items():
        monkeypatch.setenv(name, value)
    use(Path(CHECKOUT))
    from examples.prime_rl.orchestrator import client

    async def update(step: int) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as admin:
            await client.InferencePool.update_weights(SimplePool([admin]), tmp_path / "unused", step=step)  # type: ignore[arg-type]

    plugin = common | {"VLLM_PLUGINS": "resharder", "VLLM_SERVER_DEV_MODE": "1"}
    options = ["--load-format", "resharder", "--weight-transfer-config", '{"backend": "resharder"}']
    with VllmServer(tmp_path / "config", options, plugin) as server:
        for step, tokens in enumerate(expected(folder)):
            asyncio.run(update(step))
            answer = server.generate(PROMPT, TOKENS)
            assert (answer.version, answer.token_ids) == (str(step + 1), tokens)


class SimplePool:
    """prime-rl's `InferencePool` with its clients of the servers alone."""

    def __init__(self, admin_clients: list[httpx.AsyncClient]) -> None:
        self._admin_clients = admin_clients
