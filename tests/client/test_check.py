"""`resharder check`: every rank of a trainer and every worker of a server, from a config alone."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
import torch
from resharder.client.errors import UsageError
from resharder.client.tools.check import Report, check, parallel, settings
from resharder.converters.errors import LayoutError, UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.megatron.worlds import Parallel, world_layouts

from tests.support.command import resharder

pytestmark = pytest.mark.compat("check")

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3_tied", 8, {"tp": 2, "pp": 2}),
    ("qwen3", 8, {"tp": 2, "cp": 2}),
    ("qwen3_moe", 8, {"tp": 2, "ep": 2, "etp": 1}),
    ("qwen3_moe", 8, {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "etp": 2}),
    ("qwen3_moe", 8, {"ep": 4, "cp": 2}),
]


@pytest.mark.parametrize(("family", "world", "sizes"), CASES, ids=repr)
def test_ranks_put_together_from_parts_hold_what_ranks_built_one_by_one_hold(
    family: str, world: int, sizes: dict[str, Any]
) -> None:
    config = tiny_hf.tiny_config(family)
    fakepg.leave()
    together = dict(world_layouts(config, Parallel(world, **sizes), spec="te", vocab_multiple=8))
    try:
        for rank in range(world):
            fakepg.enter(rank, world)
            alone, _ = local_layout(build_model(config, spec="te", vocab_multiple=8, device="meta", **sizes), config)
            assert set(together[rank].pieces) == set(alone.pieces)
            assert together[rank].tensors == alone.tensors
    finally:
        fakepg.leave()


def checked(family: str, world: int, changes: dict[str, Any] | None = None, **sizes: Any) -> Report:
    fakepg.leave()
    return check(tiny_hf.tiny_config(family, **changes or {}), Parallel(world, **sizes), dtype="float32")


def test_ranks_send_each_byte_of_the_model_once_and_evenly() -> None:
    report = checked("qwen3_moe", 8, tp=2, ep=2)
    assert report.sends is not None
    assert len(report.sends.bytes_each) == 8
    assert report.sends.total == report.size
    assert report.sends.imbalance < 1.05
    assert report.direct is report.receives is None


def test_a_world_that_the_sizes_do_not_divide_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="tp x cp x pp = 4 and etp x ep x pp = 4 divide, got 6"):
        checked("qwen3", 6, tp=2, pp=2)


def test_a_stage_that_is_missing_is_named_by_its_first_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = world_layouts

    def without_the_last_stage(config: Any, trainer: Parallel, **options: Any) -> Any:
        return ((rank, layout if rank < 2 else Layout({}, ())) for rank, layout in everyone(config, trainer, **options))

    monkeypatch.setattr("resharder.converters.models.megatron.worlds.world_layouts", without_the_last_stage)
    with pytest.raises(LayoutError, match=r"model\.norm\.weight is missing: no source has it"):
        checked("qwen3", 4, tp=2, pp=2)


def test_sizes_and_settings_that_make_no_sense_are_usage_errors() -> None:
    with pytest.raises(UsageError, match="expected tp of at least 1, got 0"):
        parallel(4, 0, 1, 0, 1, 1, 0)
    with pytest.raises(UsageError, match="expected KEY=VALUE, got 'x'"):
        settings(["x"])
    assert settings(["a=[1]", "b=E|t|L"]) == {"a": [1], "b": "E|t|L"}


def run(config: dict[str, Any], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "resharder.client.cli", "check", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.skipif(find_spec("vllm") is None, reason="a server's layout needs vllm")
def test_the_command_plans_a_trainer_and_a_server_without_cuda_or_transformer_engine(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_moe", num_hidden_layers=2, vocab_size=1024)
    sizes = ("--world", "8", "--tp", "2", "--ep", "2", "--pp", "2", "--server-tp", "2", "--server-ep", "--dtype", "float32")
    done = run(config, tmp_path, *sizes, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["architecture"] == "Qwen3MoeForCausalLM"
    assert sum(report["sends"]["bytes_each"]) == report["size"]
    half, whole = report["size"] // 2, report["size"]
    assert all(half <= worker < 0.6 * whole for worker in report["receives"]["bytes_each"])
    assert sum(report["direct"]["bytes_each"]) == sum(report["receives"]["bytes_each"])
    sizes = report["traffic"]["sizes"]
    assert [sum(row) for row in sizes] == report["direct"]["bytes_each"]
    assert [sum(column) for column in zip(*sizes, strict=True)] == report["receives"]["bytes_each"]
    assert len(report["traffic"]["ranks"]) == len(sizes)
    assert report["copies"] >= 2 * report["tensors"] // 2
    assert report["through_load_weights"] == []


def test_the_command_says_what_does_not_fit_and_exits_4(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf.tiny_config("qwen3", vocab_size=1024)))
    done = resharder("check", tmp_path, "--world", 6, "--tp", 4)
    assert (done.code, done.out) == (4, "")
    assert done.err.splitlines()[-1].startswith("resharder: expected a world size that tp x cp x pp = 4")
    assert "Traceback" not in done.err


def test_what_megatron_refuses_is_one_error() -> None:
    with pytest.raises(UnsupportedModel, match=r"megatron-core refuses this: ValueError: num_attention_heads \(8\) must be a"):
        checked("qwen3", 3, tp=3)


def test_layouts_take_no_memory() -> None:
    fakepg.leave()
    (_, layout), *_ = world_layouts(tiny_hf.tiny_config("llama", hidden_size=8192, intermediate_size=28672), Parallel(1))
    assert sum(spec.size for spec in layout.tensors.values()) > 1 << 30
    assert not torch.cuda.is_initialized()
