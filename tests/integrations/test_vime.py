"""vime's weight updater `resharder`: two Megatron ranks, a real daemon and a real vLLM server; and vime's own source.

vime is in no package index. With RESHARDER_TEST_VIME, a checkout of it (`make integrations VIME=…`), its source is read too.
"""

import ast
import inspect
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from resharder.client import Operator, UsageError
from resharder.client.integrations.vime import ResharderWeightUpdater

from tests.integrations.vime_ranks import options
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config
from tests.support.updating_ranks import expected, run
from tests.support.vllm_server import VllmServer

pytestmark = [pytest.mark.integrations, pytest.mark.full]

CHECKOUT = os.environ.get("RESHARDER_TEST_VIME")


def test_each_update_of_vimes_actor_is_served_when_it_returns(daemon: Daemon, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    common = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy"}
    plugin = common | {"RESHARDER_UNREACHABLE": "prefer", "VLLM_PLUGINS": "resharder", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(folder, ["--weight-transfer-config", '{"backend": "resharder"}'], plugin) as server:
        assert run("tests.integrations.vime_ranks", folder, server, common) == expected(folder)


def test_a_job_whose_trainer_gives_its_memory_to_the_servers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the job was started with --colocate or --offload-train.*GPUs of their own"):
        ResharderWeightUpdater(SimpleNamespace(**vars(options(str(tmp_path))) | {"offload_train": True}), [])


def test_ranks_cast_to_the_format_of_the_checkpoint_that_vime_serves(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config = tiny_config("qwen3", num_hidden_layers=1)
    folder = save_checkpoint(tmp_path / "model", config, seed=3)
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)
    monkeypatch.setenv("RESHARDER_MODEL", "cast")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        chunks = build_model(config)
        fill_from_hf(chunks, config, load_checkpoint(folder))
        saved = json.loads((folder / "config.json").read_text()) | {"quantization_config": fp8}
        (folder / "config.json").write_text(json.dumps(saved))
        updater = ResharderWeightUpdater(options(str(folder)), chunks, quantization_config=fp8)
        updater.update_weights()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    with Operator(daemon.endpoint) as operator:
        operator.export(1, tmp_path / "version", model="cast")
    version = load_checkpoint(tmp_path / "version")
    assert version["model.layers.0.mlp.down_proj.weight"].dtype is torch.float8_e4m3fn
    assert json.loads((tmp_path / "version" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.skipif(not CHECKOUT, reason="no checkout of vime: make integrations VIME=…")
def test_vimes_source_calls_the_hook_and_makes_no_other_calls_of_the_updater() -> None:
    assert CHECKOUT
    utils = Path(CHECKOUT) / "vime" / "backends" / "megatron_utils"
    actor, hook = ((utils / name).read_text() for name in ("actor.py", "initialize.py"))
    assert "custom_init = load_function(args.custom_megatron_init_path)\n        custom_init(args)" in hook
    nodes = list(ast.walk(ast.parse(actor)))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.weight_updater"}
    assert used
    assert used - set(dir(ResharderWeightUpdater)) - set(ResharderWeightUpdater.__annotations__) <= {"weight_version"}
    (made,) = (node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "create_weight_updater")
    given: dict[str, Any] = {str(keyword.arg): None for keyword in made.keywords}
    inspect.signature(ResharderWeightUpdater).bind(*made.args, **given)
