"""Layouts that need a look of their own, and what is refused: one rank or all ranks of a world, in one process. The parallel
layouts of all families are in test_layout_matrix.py."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import Spec, build_model, fill_from_hf, legacy_experts, wrap_ddp, wrap_float16
from tests.support.megatron_rebuild import Chunks, assert_rebuilt, model_of, rebuild

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from resharder.converters.geometry.layout import Layout, box_index
from resharder.converters.geometry.plan import plan
from resharder.converters.models.megatron.layout import gather_parameters, local_layout, stale_parameters
from resharder.converters.models.tensor_io import read_piece, view_of

pytestmark = pytest.mark.compat("layouts")


@pytest.mark.parametrize("spec", ["local", "te"])
def test_dense_and_expert_layers_may_alternate(spec: Spec) -> None:
    model = model_of("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1])
    assert_rebuilt(model, rebuild(model, 4, spec=spec, tp=2, ep=2, pp=2))


def test_parameters_need_not_be_contiguous() -> None:
    def scatter_in_memory(chunks: Chunks) -> Chunks:
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            room = torch.full([2 * n + 3 for n in reversed(parameter.shape)], float("inf")).permute(
                *reversed(range(parameter.dim()))
            )
            parameter.data = room[tuple(slice(3, 3 + 2 * n, 2) for n in parameter.shape)]
            assert not parameter.is_contiguous()
        return chunks

    model = model_of("qwen3_moe")
    assert_rebuilt(model, rebuild(model, 4, scatter_in_memory, tp=2, ep=2, pp=2))


def test_pieces_say_where_elements_lie_in_local_memory() -> None:
    config, checkpoint = model_of("qwen3")
    fakepg.enter(1, 4)
    chunks = build_model(config, tp=2, pp=2, vpp=2)
    fill_from_hf(chunks, config, checkpoint)
    layout, tensors = local_layout(chunks, config)
    assert set(tensors) == {f"{n}.{name}" for n, chunk in enumerate(chunks) for name, _ in chunk.named_parameters()}
    for piece in layout.pieces:
        local, view = tensors[piece.local].detach(), piece.view(piece.box)
        there = torch.as_strided(local, view.shape, view.strides, local.storage_offset() + view.offset)
        assert torch.equal(there, checkpoint[piece.tensor][tuple(r.as_slice() for r in piece.box)])
        assert layout.tensors[piece.tensor][1:] == ("F32", tuple(checkpoint[piece.tensor].shape))


def test_a_tied_output_layer_is_a_replica_that_its_rank_holds_but_does_not_own() -> None:
    config, _ = model_of("qwen3_tied")
    fakepg.enter(2, 4)
    layout, _ = local_layout(build_model(config, tp=2, pp=2), config)
    (head,) = [piece for piece in layout.pieces if piece.local == "0.output_layer.weight"]
    assert (head.tensor, head.replica) == ("model.embed_tokens.weight", True)
    assert all(piece.tensor != "model.embed_tokens.weight" for piece in layout.owned())


def test_only_the_first_data_parallel_rank_owns() -> None:
    config, _ = model_of("llama")
    fakepg.enter(1, 2)
    layout, _ = local_layout(build_model(config), config)
    assert layout.pieces
    assert all(piece.replica for piece in layout.pieces)


def test_the_first_context_parallel_rank_owns() -> None:
    config, _ = model_of("qwen3")
    for rank in (0, 1):
        fakepg.enter(rank, 2)
        layout, _ = local_layout(build_model(config, spec="te", cp=2), config)
        assert {piece.replica for piece in layout.pieces} == {rank == 1}


def test_layouts_of_real_sizes_need_no_memory() -> None:
    config = tiny_hf.tiny_config("qwen3", hidden_size=4096, intermediate_size=12288, num_attention_heads=32, head_dim=128)
    fakepg.enter(3, 8)
    layout, tensors = local_layout(build_model(config, tp=8, device="meta"), config)
    assert all(tensor.is_meta for tensor in tensors.values())
    assert sum(piece.view(piece.box).shape[0] for piece in layout.pieces if piece.tensor.endswith("up_proj.weight")) == 4 * 1536


@legacy_experts
def test_legacy_grouped_experts_are_transposed_views_of_one_tensor() -> None:
    """The memory of weight1 is [experts, hidden, 2 F] whatever its shape says (transformer/moe/experts.py)."""
    config, checkpoint = model_of("qwen3_moe")
    fakepg.enter(1, 4)
    chunks = build_model(config, tp=2, ep=2, etp=2, moe_grouped_gemm=True)
    fill_from_hf(chunks, config, checkpoint)
    layout, tensors = local_layout(chunks, config)
    hidden, ffn = config["hidden_size"], config["moe_intermediate_size"] // 2
    memory = tensors["0.decoder.layers.3.mlp.experts.weight1"].detach().view(4, hidden, 2 * ffn)
    up = checkpoint["model.layers.3.mlp.experts.2.up_proj.weight"][ffn:]  # the second half, of ETP rank 1
    assert torch.equal(memory[2, :, ffn:], up.T)
    (piece,) = [p for p in layout.pieces if p.tensor == "model.layers.3.mlp.experts.2.up_proj.weight"]
    assert piece.strides == (1, 2 * ffn)


def test_tensor_parallel_sizes_of_two_sides_need_not_divide_each_other() -> None:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 12, "head_dim": 16, "moe_intermediate_size": 48}
    config, checkpoint = model_of("qwen3_moe", **heads)
    sides: list[dict[int, tuple[Layout, Mapping[str, torch.Tensor]]]] = []
    for world, layout in ((6, {"tp": 3, "pp": 2}), (4, {"tp": 4, "ep": 4})):
        ranks = {}
        for rank in range(world):
            fakepg.enter(rank, world)
            chunks = build_model(config, **layout)
            fill_from_hf(chunks, config, checkpoint, padding=float("nan"))
            ranks[rank] = local_layout(chunks, config)
        sides.append(ranks)
    here, there = sides
    for _, tensors in there.values():
        for tensor in tensors.values():
            tensor.detach().fill_(float("inf"))
    for copy in plan(*({rank: layout for rank, (layout, _) in side.items()} for side in sides)).copies():
        source, target = here[copy.source][1][copy.source_local], there[copy.target][1][copy.target_local]
        view_of(target, copy.target_view).copy_(view_of(source, copy.source_view))
    for layout, tensors in there.values():
        for piece in layout.pieces:
            assert torch.equal(read_piece(tensors, piece), checkpoint[piece.tensor][box_index(piece.box)]), piece


@pytest.mark.parametrize("wrap", [wrap_ddp, lambda chunks: wrap_ddp(chunks, overlap=True)], ids=["ddp", "overlapping ddp"])
def test_frozen_parts_are_published_and_never_stale(wrap: Callable[[Chunks], Chunks]) -> None:
    def freeze(chunks: Chunks) -> Chunks:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_("mlp" in name)
        return wrap(chunks)

    model = model_of("qwen3_moe")
    assert_rebuilt(model, rebuild(model, 4, freeze, tp=2, ep=2, pp=2))
    fakepg.enter(0, 2)
    wrapped: Any = freeze(build_model(model[0], spec="te"))
    train(wrapped)
    assert all("mlp" in name for name in stale_parameters(wrapped))


# Parameters that are gathered late


def test_parameters_are_stale_between_the_gradients_and_the_gather() -> None:
    config, _ = model_of("qwen3_moe")
    fakepg.enter(0, 2)
    (chunk,) = build_model(config, ep=2, spec="te")
    wrapped: Any = wrap_ddp([chunk], overlap=True)[0]
    assert stale_parameters([wrapped]) == []
    every = {f"0.{name}" for name, _ in chunk.named_parameters()}
    for group in wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups:
        group.start_grad_sync()
    wrapped.finish_grad_sync()
    assert set(stale_parameters([wrapped])) == every
    wrapped.bucket_groups[0].start_param_sync()
    assert set(stale_parameters([wrapped])) == every
    wrapped.start_param_sync(force_sync=True)
    assert stale_parameters([wrapped]) == []


def test_nothing_is_stale_without_overlap() -> None:
    config, _ = model_of("qwen3")
    fakepg.enter(0, 2)
    wrapped: Any = wrap_ddp(build_model(config))
    wrapped[0].finish_grad_sync()
    assert stale_parameters(wrapped) == []
    assert stale_parameters(build_model(config)) == []


@pytest.mark.parametrize(("optimizer", "gather"), [(True, False), (False, True)])
def test_nothing_is_stale_where_parameters_are_gathered_at_once(optimizer: bool, gather: bool) -> None:
    config, _ = model_of("qwen3")
    fakepg.enter(0, 2)
    (chunk,) = build_model(config)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=optimizer, overlap_param_gather=gather, overlap_grad_reduce=True
    )
    wrapped: Any = DistributedDataParallel(chunk.config, settings, chunk)
    for group in wrapped.bucket_groups:
        for parameter in group.params:
            group.register_grad_ready(parameter)
    train([wrapped])
    assert stale_parameters([wrapped]) == []


def train(wrapped: Any) -> None:
    """The gradients' part of a training step, after which an optimizer changes this rank's shard of each bucket."""
    for chunk in wrapped:
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            group.start_grad_sync()
        chunk.finish_grad_sync()


def overlapping(chunks: Chunks, **settings: Any) -> list[Any]:
    late = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
    return [DistributedDataParallel(chunk.config, DistributedDataParallelConfig(**late, **settings), chunk) for chunk in chunks]


@pytest.mark.parametrize("aligned", [False, True])
def test_every_chunk_and_expert_bucket_is_stale_until_it_is_gathered(aligned: bool) -> None:
    config, _ = model_of("qwen3_moe")
    fakepg.enter(0, 4)
    chunks = build_model(config, spec="te", pp=2, vpp=2, ep=2)
    wrapped = overlapping(wrap_float16(chunks), align_param_gather=aligned, bucket_size=20000)
    assert stale_parameters(wrapped) == []
    train(wrapped)
    every = {f"{number}.{name}" for number, chunk in enumerate(chunks) for name, _ in chunk.named_parameters()}
    assert set(stale_parameters(wrapped)) == every
    wrapped[0].start_param_sync(force_sync=True)
    assert {name[0] for name in stale_parameters(wrapped)} == {"1"}
    gather_parameters(wrapped)
    assert stale_parameters(wrapped) == []


def test_the_chunk_inside_an_overlapping_ddp_is_known_to_be_stale_and_gathered() -> None:
    config, _ = model_of("qwen3")
    fakepg.enter(0, 2)
    (chunk,) = build_model(config, spec="te")
    wrapped = overlapping([chunk])
    train(wrapped)
    assert len(stale_parameters(chunk)) == len(list(chunk.parameters()))
    gather_parameters(chunk)
    assert stale_parameters(chunk) == stale_parameters(wrapped) == []


def test_a_backward_pass_without_shards_of_gradients_counts_as_use() -> None:
    """`finish_grad_sync(force_all_reduce=True)` reduces whole buckets."""
    config, _ = model_of("qwen3")
    fakepg.enter(0, 2)
    wrapped = overlapping(build_model(config, spec="te"))
    for group in wrapped[0].bucket_groups:
        for parameter in group.params:
            group.register_grad_ready(parameter)
    wrapped[0].finish_grad_sync(force_all_reduce=True)
    assert len(stale_parameters(wrapped)) == len(list(wrapped[0].parameters()))
