"""Layouts for `benchmarks.direct_path`: recorded from Megatron and vLLM if they can be imported, otherwise the ones defined here.

The layouts defined here are for Qwen3, dense and MoE, at tensor parallel sizes that divide all heads.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from resharder.converters.architectures.checkpoint import HFConfig, expected_shapes
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, box_shape

Layouts = dict[str, Layout]  # by process
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}

_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
DENSE: dict[str, Any] = _SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "intermediate_size": 768,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


class Place(NamedTuple):
    """Rows or columns `[start, start + count)` of an HF matrix, placed in a local matrix of `width` columns from row `row`."""

    tensor: str
    local: str
    axis: int
    start: int
    count: int
    row: int
    width: int
    skipped: int = 0  # elements of the local tensor before its first row


class Sizes(NamedTuple):
    """Sizes of the part of one of `tp` ranks."""

    hidden: int
    heads: int
    groups: int
    head: int
    vocab: int
    inner: int
    layers: int
    experts: int
    tied: bool

    @staticmethod
    def of(config: HFConfig, tp: int) -> "Sizes":
        experts = config.get("num_experts", 0)
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        return Sizes(
            config["hidden_size"],
            config["num_attention_heads"] // tp,
            config["num_key_value_heads"] // tp,
            config["head_dim"],
            config["vocab_size"] // tp,
            inner,
            config["num_hidden_layers"],
            experts,
            config["tie_word_embeddings"],
        )


def specs_of(config: HFConfig) -> dict[str, TensorSpec]:
    return {name: TensorSpec(name, "BF16", tuple(shape)) for name, shape in expected_shapes(config).items()}


def layout_of(config: HFConfig, specs: Mapping[str, TensorSpec], places: list[Place]) -> Layout:
    pieces = []
    for place in places:
        shape = specs[place.tensor].shape
        box = [Range(0, n) for n in shape]
        box[place.axis] = Range(place.start, place.count)
        strides = (1,) if len(shape) == 1 else (place.width, 1)
        pieces.append(Piece(place.tensor, tuple(box), place.local, place.skipped + place.row * place.width, strides))
    return Layout({piece.tensor: specs[piece.tensor] for piece in pieces}, tuple(pieces))


def shared_places(s: Sizes, rank: int, whole: Callable[[str], str]) -> list[Place]:
    """Return the places that are the same on both sides. `whole` returns the local tensor's name of an HF tensor."""
    vocab = ["model.embed_tokens.weight"] + ([] if s.tied else ["lm_head.weight"])
    places = [Place(name, whole(name), 0, rank * s.vocab, s.vocab, 0, s.hidden) for name in vocab]
    places.append(Place("model.norm.weight", "model.norm.weight", 0, 0, s.hidden, 0, 1))
    for i in range(s.layers):
        p, width = f"model.layers.{i}.", s.heads * s.head
        for name, n in (("input_layernorm", s.hidden), ("post_attention_layernorm", s.hidden)):
            places.append(Place(f"{p}{name}.weight", f"{p}{name}.weight", 0, 0, n, 0, 1))
        for name in ("q_norm", "k_norm"):
            places.append(Place(f"{p}self_attn.{name}.weight", f"{p}self_attn.{name}.weight", 0, 0, s.head, 0, 1))
        places.append(Place(f"{p}self_attn.o_proj.weight", f"{p}o_proj", 1, rank * width, width, 0, width))
        if s.experts:
            places.append(Place(f"{p}mlp.gate.weight", f"{p}mlp.gate.weight", 0, 0, s.experts, 0, s.hidden))
    return places


def written_trainer(config: HFConfig, ranks: int) -> Layouts:
    """Return layouts of tensor parallel ranks whose experts are expert parallel, each expert a separate tensor."""
    s, specs = Sizes.of(config, ranks), specs_of(config)
    found = {}
    for rank in range(ranks):
        places = shared_places(s, rank, lambda name: name)
        for i in range(s.layers):
            p, per = f"model.layers.{i}.", s.heads // s.groups
            for g in range(s.groups):
                row, group = g * (per + 2) * s.head, rank * s.groups + g
                parts = (("q", group * per, per, 0), ("k", group, 1, per), ("v", group, 1, per + 1))
                for name, first, heads, after in parts:
                    tensor = f"{p}self_attn.{name}_proj.weight"
                    place = (first * s.head, heads * s.head, row + after * s.head, s.hidden)
                    places.append(Place(tensor, f"{p}qkv", 0, *place))
            mine = s.experts // ranks
            for e in range(rank * mine, (rank + 1) * mine):
                expert, local = f"{p}mlp.experts.{e}.", f"{p}experts.{e % mine}."
                places.append(Place(f"{expert}gate_proj.weight", f"{local}fc1", 0, 0, s.inner, 0, s.hidden))
                places.append(Place(f"{expert}up_proj.weight", f"{local}fc1", 0, 0, s.inner, s.inner, s.hidden))
                places.append(Place(f"{expert}down_proj.weight", f"{local}fc2", 1, 0, s.inner, 0, s.inner))
            if not s.experts:
                places += _mlp(p, s.inner // ranks, rank, s.hidden)
        found[f"rank {rank}"] = layout_of(config, specs, places)
    return found


def _mlp(p: str, inner: int, rank: int, hidden: int) -> list[Place]:
    return [
        Place(f"{p}mlp.gate_proj.weight", f"{p}gate_up", 0, rank * inner, inner, 0, hidden),
        Place(f"{p}mlp.up_proj.weight", f"{p}gate_up", 0, rank * inner, inner, inner, hidden),
        Place(f"{p}mlp.down_proj.weight", f"{p}down", 1, rank * inner, inner, 0, inner),
    ]


def written_workers(config: HFConfig, tp: int) -> Layouts:
    """Return layouts with vLLM's fused tensors: q, k and v; gate and up; all experts of a layer."""
    s, specs = Sizes.of(config, tp), specs_of(config)
    found = {}
    for rank in range(tp):
        places = shared_places(s, rank, lambda name: name)
        inner = s.inner // tp
        for i in range(s.layers):
            p, row = f"model.layers.{i}.", 0
            for name, heads in (("q", s.heads), ("k", s.groups), ("v", s.groups)):
                n = heads * s.head
                places.append(Place(f"{p}self_attn.{name}_proj.weight", f"{p}qkv", 0, rank * n, n, row, s.hidden))
                row += n
            for e in range(s.experts):
                expert, size = f"{p}mlp.experts.{e}.", e * 2 * inner * s.hidden
                for name, first in (("gate", 0), ("up", inner)):
                    place = (0, rank * inner, inner, first, s.hidden, size)
                    places.append(Place(f"{expert}{name}_proj.weight", f"{p}w13", *place))
                place = (1, rank * inner, inner, 0, inner, e * s.hidden * inner)
                places.append(Place(f"{expert}down_proj.weight", f"{p}w2", *place))
            if not s.experts:
                places += _mlp(p, inner, rank, s.hidden)
        found[f"worker {rank}"] = layout_of(config, specs, places)
    return found


def megatron_trainer(config: HFConfig, ranks: int) -> Layouts:
    from tests.support import megatron_shim  # noqa: F401

    # isort: split
    from resharder.converters.models.megatron.worlds import Parallel, world_layouts

    parallel = Parallel(ranks, tp=ranks, ep=ranks if config.get("num_experts") else 1)
    found = world_layouts(config, parallel, dtype=torch.bfloat16, vocab_multiple=ranks)
    return {f"rank {rank}": layout for rank, layout in found}


def vllm_workers(config: HFConfig, tp: int) -> Layouts:
    from resharder.client.inference.vllm.blueprint import ServerSizes, worker_recording

    server, found = ServerSizes(tp=tp), {}
    for worker in range(tp):
        recording = worker_recording(config, specs_of(config), server, worker, dtype="bfloat16")
        if recording.impure:
            raise ValueError(f"loaded by more than copies: {next(iter(recording.impure))}")
        found[f"worker {worker}"] = recording.layout
    return found


def memory_of(layout: Layout) -> dict[str, tuple[int, torch.dtype]]:
    """Return the least elements, and the dtype, of each local tensor."""
    found: dict[str, tuple[int, torch.dtype]] = {}
    for piece in layout.pieces:
        end = piece.offset + 1 + sum((n - 1) * s for n, s in zip(box_shape(piece.box), piece.strides, strict=True))
        before, dtype = found.get(piece.local, (0, DTYPES[layout.tensors[piece.tensor].dtype]))
        found[piece.local] = max(before, end), dtype
    return found


def layouts(make: Callable[[], Layouts], otherwise: Callable[[], Layouts], name: str) -> tuple[Layouts, str]:
    """Return layouts and their origin: those of `make` if it can be imported, otherwise those of `otherwise`."""
    try:
        return make(), name
    except Exception as error:
        return otherwise(), f"written ({name} said: {type(error).__name__}: {str(error)[:100]})"


def both_sides(config: dict[str, Any], size: int, written: bool = False) -> tuple[Layouts, Layouts, str]:
    """Return the layouts of trainer ranks and of workers, and their origin."""
    if written:
        return written_trainer(config, size), written_workers(config, size), "trainer: written, workers: written"
    have, whose = layouts(lambda: megatron_trainer(config, size), lambda: written_trainer(config, size), "Megatron")
    want, theirs = layouts(lambda: vllm_workers(config, size), lambda: written_workers(config, size), "vLLM")
    return have, want, f"trainer: {whose}, workers: {theirs}"
