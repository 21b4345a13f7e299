"""A LoRA adapter of verl's own FSDP2 engine on two CPU ranks, by the checkpoint engine `resharder`, on a real server."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: make integrations")

from resharder.client import Operator, UsageError
from resharder.client.tools.import_checkpoint import import_checkpoint
from safetensors.torch import load_file
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

from tests.client.models import equal
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.tiny_hf import save_checkpoint, tiny_config
from tests.support.vllm_server import VllmServer, completion

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = str(ROOT / ".venv" / "bin" / "python")
STEPS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_external_libs("resharder.client.integrations.verl")
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3"), seed=3)


def engine(**arguments: Any) -> Any:
    return CheckpointEngineRegistry.new("resharder", bucket_size=1 << 20, **arguments)


def test_servers_load_every_adapter_of_verls_fsdp_engine_beside_its_base(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    import_checkpoint(daemon.endpoint, folder, model="verl", step=0)
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": "verl",
        "RESHARDER_ADAPTERS": "verl-lora",
        "VLLM_PLUGINS": "resharder",
    }
    options = ["--load-format", "resharder", "--enable-lora", "--max-loras", "3", "--max-lora-rank", "8"]
    ranks = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        "-m",
        "tests.integrations.verl_lora_ranks",
    ]
    command = [sys.executable, *ranks, str(folder), daemon.endpoint, "job-1", str(STEPS), str(tmp_path)]
    with VllmServer(folder, options, environment, python=VLLM_PYTHON) as server:
        trained = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert trained.returncode == 0, trained.stderr[-4000:]
        worker = engine(model="verl-lora", base="verl", endpoint=daemon.endpoint, follow=True, timeout=60.0)
        worker.init_process_group(-1, 2, "job-1", STEPS)
        assert asyncio.run(received(worker, STEPS)) == [], "the server has the adapter from the daemon"
        answer = server.request("POST", "/v1/completions", completion([5, 17, 42], 4, model="verl-lora"))
        assert (answer.status, answer.version) == (200, f"1;verl-lora={STEPS}"), answer.body
    exported = []
    with Operator(daemon.endpoint) as operator:
        assert [version.step for version in operator.versions("verl-lora")][::-1] == [1, 2]
        for version in (1, 2):
            operator.export(version, tmp_path / f"out-{version}", model="verl-lora")
            exported.append(load_file(tmp_path / f"out-{version}" / "adapter_model.safetensors"))
            assert equal(exported[-1], load_file(tmp_path / f"{version}.safetensors"))
    assert not equal(*exported), "the optimizer changed nothing"
    config = json.loads((tmp_path / "out-2" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], "q_proj" in config["target_modules"]) == (8, 16, True)


async def received(worker: Any, step: int) -> list[str]:
    return [name async for name, _ in worker.receive_weights(step)]


def test_an_adapter_is_sent_as_one_or_is_merged_and_never_left_out(daemon: Daemon, folder: Path) -> None:
    from resharder.client.integrations.verl import EngineWeights

    with pytest.raises(
        UsageError, match=r"take no adapter .*: set engine_kwargs.resharder.follow, and start servers with RESH.*=a"
    ):
        engine(model="a", base="b", endpoint=daemon.endpoint)
    plain = engine(model="plain", endpoint=daemon.endpoint, path=str(folder))
    plain.init_process_group(0, 1, "job-2", 1)
    with pytest.raises(
        UsageError, match=r"adapter is not merged, .* set engine_kwargs.resharder.base and follow, or .*merge=True"
    ):
        asyncio.run(plain.send_weights(EngineWeights(None, [], {"r": 8}), 1))
    adapter = engine(model="other-lora", base="verl", endpoint=daemon.endpoint, follow=True)
    adapter.init_process_group(0, 1, "job-3", 1)
    with pytest.raises(UsageError, match=r"has no LoRA adapter, .*: leave engine_kwargs.resharder.base out"):
        asyncio.run(adapter.send_weights(EngineWeights(None, []), 1))
