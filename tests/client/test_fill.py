"""The way back: checkpoints and versions into models, any rank of any world in one process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, wrap_float16

# isort: split
from resharder.client.errors import CorruptData, NotFound, UsageError
from resharder.client.trainer import fill as trainer_fill
from resharder.client.trainer.connect import connect
from resharder.client.trainer.fill import fill
from resharder.converters.architectures import architecture_of
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import box_index, full_box
from resharder.converters.models import local_layout
from resharder.converters.models.tensor_io import read_piece, write_piece
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from tests.client.models import CONFIG, equal, exported
from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.variants import sampled
from tests.support.weights import random_weights

pytestmark = pytest.mark.compat("fill")

Tensors = dict[str, torch.Tensor]


def checkpoint(folder: Path, config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Tensors:
    """Random weights, in two files with an index. What Megatron keeps once is the same wherever HF stores it."""
    full = random_weights(config, 3, dtype)
    for weight in (weight for weights in architecture_of(config).table(config).values() for weight in weights):
        rows: dict[int, torch.Tensor] = {}
        for overlap in weight.overlaps(full_box(weight.shape)):
            part = full[overlap.tensor][box_index(overlap.box)]
            part.copy_(rows.setdefault(overlap.row, part))
    names = sorted(full)
    halves = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: full[name] for name in half}, folder / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return full


def build(config: Mapping[str, Any], rank: int, world: int, **layout: Any) -> list[torch.nn.Module]:
    """A rank's chunks, full of garbage."""
    fakepg.enter(rank, world)
    chunks = build_model(config, spec="te", **layout)
    for chunk in chunks:
        for tensor in chunk.parameters():
            tensor.data.fill_(float("nan"))
    return chunks


def assert_filled(model: Any, config: Mapping[str, Any], full: Tensors) -> None:
    """Every piece, replicas too, has the checkpoint's values, and everything else is zero."""
    layout, tensors = local_layout(model, config)
    for piece in layout.pieces:
        found, wanted = read_piece(tensors, piece), full[piece.tensor][box_index(piece.box)].to(tensors[piece.local].dtype)
        assert torch.equal(found, wanted) or (piece.plus and torch.allclose(found, wanted, atol=1e-6)), piece
    rest = {name: tensor.clone() for name, tensor in tensors.items()}
    for piece in layout.pieces:
        write_piece(rest, piece._replace(plus=0.0), torch.zeros(()))
    assert [name for name, tensor in rest.items() if bool((tensor != 0).any())] == []


def with_experts(config: Mapping[str, Any]) -> bool:
    return "num_moe_experts" in architecture_of(config).recipe(config).transformer


@pytest.mark.parametrize(
    "family", sampled(tiny_hf.ALL, ["qwen3_tied", "qwen3_moe", "glm4_moe", "kimi_k2", "qwen3_next", "qwen3_vl_moe"])
)
def test_what_is_filled_and_published_is_the_checkpoint_and_its_version_fills_another_layout(
    daemon: Daemon, family: str, tmp_path: Path
) -> None:
    config = tiny_hf.tiny_config(family)
    full = checkpoint(tmp_path, config)
    experts = {"ep": 2} if with_experts(config) else {}
    publishers, inexact = [], set[str]()
    for rank in range(4):
        chunks = build(config, rank, 4, tp=2, pp=2, vocab_multiple=128, **experts)
        fill(chunks, config, tmp_path)
        assert_filled(chunks, config, full)
        inexact |= {piece.tensor for piece in local_layout(chunks, config)[0].pieces if piece.plus}
        publishers.append(connect(daemon.endpoint, model=family, job="fill", rank=rank, world_size=4))
        publishers[-1].attach(chunks, config, wait=False)
    handle, *_ = [publisher.publish(1) for publisher in publishers]
    handle.wait_ready(60)
    published = exported(daemon.endpoint, handle.name, tmp_path / "out")
    assert published.keys() == full.keys()
    assert [name for name in full if name not in inexact and not torch.equal(published[name], full[name])] == []
    for rank in range(2):
        chunks = build(config, rank, 2, tp=2, **experts)
        filled = fill(chunks, config, f"resharder://{daemon.endpoint}/{handle.name}", shared=rank == 0)
        assert_filled(chunks, config, published)
        layout, _ = local_layout(chunks, config)
        assert filled.proven == len({(piece.tensor, piece.box) for piece in layout.pieces if not piece.plus})
        assert filled.source == handle.name
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("qwen3_tied", 8, {"tp": 2, "pp": 2, "vpp": 2}),
        ("qwen3_tied", 4, {"tp": 4, "vocab_multiple": 128}),
        ("qwen3", 8, {"tp": 2, "cp": 2}),
        ("qwen3_moe", 8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
        ("qwen3_moe", 8, {"tp": 4, "ep": 2, "etp": 2}),
    ],
    ids=repr,
)
def test_every_rank_of_every_layout_is_filled_replicas_and_padding_too(
    family: str, world: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_hf.tiny_config(family)
    full = checkpoint(tmp_path, config)
    for rank in range(world):
        chunks = build(config, rank, world, **layout)
        fill(chunks, config, tmp_path)
        assert_filled(chunks, config, full)


def fsdp(config: dict[str, Any], rank: int, world: int) -> Any:
    fakepg.enter(rank, world)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def test_a_model_of_dtensors_reads_only_what_its_rank_holds(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_tied")
    full = checkpoint(tmp_path, config)
    read = 0
    for rank in range(3):
        model = fsdp(config, rank, 3)
        read += fill(model, config, tmp_path).bytes
        assert_filled(model, config, full)
    assert read == sum(tensor.nbytes for tensor in full.values())


@pytest.mark.parametrize(("stored", "held"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_values_of_another_dtype_are_cast_as_torch_casts_them(
    daemon: Daemon, stored: torch.dtype, held: torch.dtype, tmp_path: Path
) -> None:
    config = tiny_hf.tiny_config("qwen3")
    full = checkpoint(tmp_path, config, stored)
    for source in (tmp_path, publish(daemon, str(stored).removeprefix("torch."), config, full)):
        chunks = build(config, 1, 2, tp=2, dtype=held)
        assert fill(wrap_float16(chunks) if held == torch.bfloat16 else chunks, config, source).proven == 0
        assert_filled(chunks, config, full)


def publish(daemon: Daemon, model: str, config: Mapping[str, Any], full: Tensors) -> str:
    """A version with these tensors, as a source."""
    with connect(daemon.endpoint, model=model, job="whole", config=config) as publisher:
        publisher.publish_tensors(1, list(full.items())).wait_ready(60)
    return f"resharder://{daemon.endpoint}/models/{model}/versions/latest"


def test_a_cut_connection_only_delays_a_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    full = {name: torch.arange(4 << 20, dtype=torch.int32).view(-1, 1024) + number for number, name in enumerate("abc")}
    port, parts = f"127.0.0.1:{free_port()}", []
    proxy = Proxy(port)

    def write_and_cut(*args: Any) -> None:
        write_piece(*args)
        parts.append(args[1].tensor)
        if len(parts) == 20:
            proxy.cut()

    monkeypatch.setattr(trainer_fill, "write_piece", write_and_cut)
    model = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    with Daemon(data_listen=port, data_address=proxy.endpoint) as daemon:
        filled = fill(model, CONFIG, publish(daemon, "large", CONFIG, full), shared=False)
    assert equal(model, full)
    assert filled.proven == 3
    assert proxy.cuts == 1
    assert 48 <= len(parts) < 48 + 16  # at most one box again
    proxy.close()


def test_a_wrong_write_does_not_pass_the_proof(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_hf.tiny_config("qwen3")
    source = publish(daemon, "proof", config, random_weights(config, 1))

    def write(tensors: Any, piece: Any, values: torch.Tensor) -> None:
        write_piece(tensors, piece, values.flip(0) if piece.tensor == "model.norm.weight" else values)

    monkeypatch.setattr(trainer_fill, "write_piece", write)
    with pytest.raises(CorruptData, match=r"model.norm.weight\[0:128\]: the model's digest is 0x"):
        fill(build(config, 0, 1), config, source)


def test_two_values_for_one_place_do_not_pass_either(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("deepseek_v3")
    save_file(random_weights(config, 1), tmp_path / "model.safetensors")
    with pytest.raises(CorruptData, match=r"embed_tokens.weight.* must have equal values"):
        fill(build(config, 0, 1), config, tmp_path)


def released_without_copies(folder: Path, config: Mapping[str, Any]) -> Tensors:
    """A checkpoint without embedding and head of its MTP layer, as GLM-4.6 was released; what is left out, too."""
    full = checkpoint(folder, config)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    copies = {name for name in full if name.startswith("model.layers.4.") and ("embed_tokens" in name or "head.head" in name)}
    assert len(copies) == 2
    save_file({name: values for name, values in full.items() if name not in copies}, folder / "model.safetensors")
    return full


@pytest.mark.parametrize("pp", [1, 2])
def test_copies_in_mtp_layers_that_are_not_stored_are_the_models_own(tmp_path: Path, pp: int) -> None:
    config = tiny_hf.tiny_config("glm4_moe")
    full = released_without_copies(tmp_path, config)
    for rank in range(pp):
        chunks = build(config, rank, pp, pp=pp)
        fill(chunks, config, tmp_path)
        assert_filled(chunks, config, full)


def test_a_head_of_its_own_that_is_not_stored_is_missing(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("qwen3")
    full = random_weights(config, 1)
    del full["lm_head.weight"]
    save_file(full, tmp_path / "model.safetensors")
    with pytest.raises(UnknownTensor, match=r"lacks 1 tensors of the model: lm_head\.weight"):
        fill(build(config, 0, 1), config, tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda full: full.pop("model.norm.weight"), UnknownTensor, "lacks 1 tensors of the model: model.norm.weight"),
        (
            lambda full: full.update({"model.norm.weight": torch.zeros(64)}),
            LayoutError,
            r"the model has shape \[128\], .* has \[64\]",
        ),
        (
            lambda full: full.update({"model.norm.weight": torch.zeros(128).int()}),
            UnsupportedModel,
            "the model has F32, and I32, .* cannot be cast",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_before_the_first_write(
    change: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = tiny_hf.tiny_config("qwen3")
    full = random_weights(config, 1)
    change(full)
    save_file(full, tmp_path / "model.safetensors")
    chunks = build(config, 0, 1)
    with pytest.raises(error, match=message):
        fill(chunks, config, tmp_path)
    assert all(bool(parameter.isnan().all()) for chunk in chunks for parameter in chunk.parameters())


def test_what_from_pretrained_reads_is_read_and_what_no_model_wants_is_said(tmp_path: Path) -> None:
    full = {"a": torch.randn(3, 5), "b": torch.randn(7), "scale": torch.randn(())}
    save_file(full, tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    model = {"a": torch.zeros(5, 3).t(), "b": torch.zeros(7), "scale": torch.zeros(())}
    fill(model, CONFIG, str(tmp_path))
    assert all(torch.equal(model[name], full[name]) for name in full)
    config = tiny_hf.tiny_config("qwen3_tied")
    save_file(random_weights(config, 1) | {"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert fill(build(config, 0, 1), config, tmp_path).unused == ("lm_head.weight",)


def test_sources_that_are_none_are_refused_by_what_was_expected(daemon: Daemon, tmp_path: Path) -> None:
    model = {"a": torch.zeros(3)}
    with pytest.raises(UsageError, match="expected a folder with a checkpoint"):
        fill(model, CONFIG, tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no safetensors file named \*\.safetensors"):
        fill(model, CONFIG, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with pytest.raises(UsageError, match=r"has no safetensors file named model-1.safetensors"):
        fill(model, CONFIG, tmp_path)
    with pytest.raises(UsageError, match="expected resharder://HOST:PORT/models/MODEL/versions/NUMBER"):
        fill(model, CONFIG, "resharder://somewhere/policy")
    with pytest.raises(NotFound):
        fill(model, CONFIG, f"resharder://{daemon.endpoint}/models/nothing/versions/latest")
    with pytest.raises(NotFound):
        fill(model, CONFIG, f"resharder://{daemon.endpoint}/models/nothing/versions/7")
    save_file({"a": torch.zeros(3)}, tmp_path / "model-1.safetensors")
    with pytest.raises(UnsupportedModel, match=r"1 tensors of the model are on the meta device: .*: a"):
        fill({"a": torch.zeros(3, device="meta")}, CONFIG, tmp_path)
