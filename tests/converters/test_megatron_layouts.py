"""Layouts that need a look of their own, and what is refused: one rank or all ranks of a world, in one process. The parallel
layouts of all families are in test_layout_matrix.py."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import Spec, build_model, fill_from_hf, wrap_ddp, wrap_float16
from tests.support.megatron_rebuild import Chunks, Model, assert_rebuilt, rebuild
from tests.support.weights import random_weights

# isort: split
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from resharder.converters import architectures
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Layout, box_index
from resharder.converters.geometry.plan import plan
from resharder.converters.models.megatron.layout import gather_parameters, local_layout, stale_parameters
from resharder.converters.models.tensor_io import read_piece, view_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer_engine.pytorch.float8_tensor import Float8Tensor


def model_of(family: str, **changes: Any) -> Model:
    config = tiny_hf.tiny_config(family, **changes)
    return config, random_weights(config, 1)


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


# What is refused


@pytest.fixture
def chunk() -> Any:
    config, _ = model_of("qwen3")
    fakepg.enter(0, 2)
    return build_model(config, tp=2)[0]


def layout_of(chunk: Any, **changes: Any) -> None:
    local_layout([chunk], tiny_hf.tiny_config("qwen3") | changes)


def test_a_parameter_that_the_table_does_not_know_is_refused_by_name(chunk: Any) -> None:
    chunk.decoder.layers[1].self_attention.register_parameter("adapter", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(UnknownTensor, match=r"0\.decoder\.layers\.1\.self_attention\.adapter"):
        layout_of(chunk)


def test_rows_that_the_table_leaves_out_are_refused_by_name(chunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = architectures.architecture_of(tiny_hf.tiny_config("qwen3"))

    def without_up(config: Any) -> dict[str, Any]:
        table = dict(right.table(config))
        key = "decoder.layers.1.mlp.linear_fc1.weight"
        table[key] = tuple(replace(weight, runs=weight.runs[:1]) for weight in table[key])
        return table

    monkeypatch.setattr(architectures, "ARCHITECTURES", (replace(right, table=without_up),))
    with pytest.raises(LayoutError, match=r"linear_fc1\.weight: expected HF rows for 96 rows in the table, found 0"):
        layout_of(chunk)


def test_a_parameter_that_is_not_placed_is_refused_by_name(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_parameter("adapter", torch.nn.Parameter(torch.zeros(3)))  # MLP lists its linears only
    with pytest.raises(LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.adapter: .* found none"):
        layout_of(chunk)


def test_a_parameter_without_elements_is_not_taken_for_a_freed_one(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_parameter("adapter", torch.nn.Parameter(torch.zeros(0)))
    with pytest.raises(LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.adapter: .* found none"):
        layout_of(chunk)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 191}, r"mlp\.linear_fc1\.weight: expected \(382, 128\) from the config, found \(384, 128\)"),
        (
            {"vocab_size": 2000},
            r"word_embeddings\.weight: expected \(2000, 128\) or more rows \(padding\) .* found \(1004, 128\)",
        ),
        ({"head_dim": 16}, "head_dim is 16 in the config, the model has kv_channels=32"),
        ({"hidden_size": 64}, "hidden_size is 64 in the config, the model has hidden_size=128"),
    ],
)
def test_a_shape_that_the_config_does_not_have_is_refused_with_both(chunk: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        layout_of(chunk, **changes)


def test_embeddings_of_another_width_are_no_padding(chunk: Any) -> None:
    chunk.embedding.word_embeddings.weight = torch.nn.Parameter(torch.zeros(502, 64))
    message = r"word_embeddings\.weight: expected \(1003, 128\) or more rows \(padding\) .* found \(1004, 64\)"
    with pytest.raises(LayoutError, match=message):
        layout_of(chunk)


def test_layers_that_the_config_does_not_have_are_refused(chunk: Any) -> None:
    with pytest.raises(LayoutError, match="num_hidden_layers is 3 in the config, the model has num_layers=4"):
        layout_of(chunk, num_hidden_layers=3)


def test_an_output_layer_of_its_own_is_refused_where_the_config_ties_it(chunk: Any) -> None:
    with pytest.raises(LayoutError, match="tie_word_embeddings is True in the config, the model has share_embed"):
        layout_of(chunk, tie_word_embeddings=True)


@pytest.mark.parametrize("spec", ["local", "te"])
def test_a_single_expert_is_laid_out(spec: Spec) -> None:
    model = model_of("qwen3_moe", num_experts=1, num_experts_per_tok=1, norm_topk_prob=False)
    assert_rebuilt(model, rebuild(model, 2, spec=spec, tp=2))


def test_another_number_of_experts_is_refused() -> None:
    config, _ = model_of("qwen3_moe")
    fakepg.enter(0, 1)
    chunks = build_model(config)
    del chunks[0].decoder.layers[0].mlp.experts.local_experts[7]
    chunks[0].decoder.layers[0].mlp.experts.num_local_experts = 7
    with pytest.raises(LayoutError, match=r"0\.linear_fc1\.weight: expected \(8, 128, 128\) .* found \(7, 128, 128\)"):
        local_layout(chunks, config)


def test_quantised_parameters_are_refused(chunk: Any) -> None:
    linear = chunk.decoder.layers[0].mlp.linear_fc2
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Float8Tensor))
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.0\.mlp\.linear_fc2\.weight: .* Float8Tensor: quantised"):
        layout_of(chunk)


def test_a_dtype_without_proof_is_refused(chunk: Any) -> None:
    chunk.double()
    with pytest.raises(UnsupportedModel, match=r"found torch\.float64"):
        layout_of(chunk)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_a_tensor_is_published_in_the_dtype_that_the_model_has(chunk: Any, dtype: torch.dtype, name: str) -> None:
    layout, _ = local_layout([chunk.to(dtype)], tiny_hf.tiny_config("qwen3"))
    assert {spec.dtype for spec in layout.tensors.values()} == {name}


def test_experts_of_two_dtypes_that_are_one_tensor_on_disk_are_refused() -> None:
    config, _ = model_of("gpt_oss")
    fakepg.enter(0, 1)
    chunks: Any = build_model(config)
    chunks[0].decoder.layers[0].mlp.experts.local_experts[3].linear_fc2.weight.data = torch.zeros(128, 192).bfloat16()
    with pytest.raises(LayoutError, match=r"experts\.3\S*: holds model\.layers\.0\.mlp\.experts\.down_proj as BF16, .* as F32"):
        local_layout(chunks, config)


def test_padding_is_that_of_as_many_ranks_as_are_said() -> None:
    config, _ = model_of("llama", vocab_size=1100)
    fakepg.enter(0, 1)
    chunks = build_model(config, vocab_multiple=256)
    with pytest.raises(LayoutError, match="found 1280: the config leaves out 180 rows"):
        local_layout(chunks, config)
    layout, _ = local_layout(chunks, config, padded_for=2)
    assert layout.tensors["lm_head.weight"].shape == (1100, 128)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda shard: replace(shard, data=shard.data.clone()), UnsupportedModel, "sharded_state_dict copies it"),
        (lambda shard: shard.narrow(0, 0, 64), LayoutError, "expected shards for 12288 elements .* found 6144"),
        (lambda shard: shard.data, LayoutError, "expected sharded tensors from its factory, found Parameter"),
    ],
    ids=["a copy", "a part", "no shard"],
)
def test_a_factory_that_does_not_say_where_all_its_memory_belongs_is_refused(
    chunk: Any, build: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    linear = chunk.decoder.layers[0].mlp.linear_fc2
    honest = linear.sharded_state_dict

    def other(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = honest(*args, **kwargs)
        (key,) = [key for key in state if key.endswith("weight")]
        shard = state[key]
        state[key] = ShardedTensorFactory(shard.key, shard.data, lambda *_: build(shard), lambda s: s, shard.replica_id)
        return state

    linear.sharded_state_dict = other
    with pytest.raises(error, match=r"0\.decoder\.layers\.0\.mlp\.linear_fc2\.weight: .*" + message):
        layout_of(chunk)


def with_state(chunk: Any, change: Callable[[Any], Any]) -> None:
    """Changes how one linear places its weight."""
    linear = chunk.decoder.layers[0].mlp.linear_fc2
    honest = linear.sharded_state_dict

    def other(*args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = honest(*args, **kwargs)
        return {key: change(value) if key.endswith("weight") else value for key, value in state.items()}

    linear.sharded_state_dict = other


def test_a_factory_may_build_views_in_lists_tuples_and_dicts(chunk: Any) -> None:
    config = tiny_hf.tiny_config("qwen3")
    expected, _ = local_layout([chunk], config)

    def build(shard: Any) -> Any:
        rows = shard.data.shape[0]
        return {"weight": [(replace(shard, data=shard.data.narrow(dim=0, start=0, length=rows)),)]}

    with_state(chunk, lambda shard: ShardedTensorFactory(shard.key, shard.data, lambda *_: build(shard), lambda s: s, 0))
    assert local_layout([chunk], config)[0] == expected


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda shard: shard.data, "Parameter"),
        (lambda shard: ShardedObject(shard.key, shard.data, (1,), (0,)), "ShardedObject"),
    ],
    ids=["a parameter", "an object"],
)
def test_state_that_is_not_sharded_is_refused_by_name(chunk: Any, change: Callable[[Any], Any], found: str) -> None:
    with_state(chunk, change)
    with pytest.raises(UnknownTensor, match=rf"linear_fc2\.weight: expected a sharded tensor in .*, found {found}"):
        layout_of(chunk)


def test_what_is_not_a_megatron_module_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="found Linear"):
        local_layout([torch.nn.Linear(2, 2)], tiny_hf.tiny_config("qwen3"))


def test_a_buffer_that_is_not_placed_is_refused_by_name(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_buffer("scale", torch.ones(3))
    with pytest.raises(LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.scale: .* found none"):
        layout_of(chunk)


def test_a_wrapper_that_may_shard_parameters_is_refused(chunk: Any) -> None:
    """The base of Megatron's FSDP, of its own for torch's FSDP2, and of DDP."""
    with pytest.raises(UnsupportedModel, match=r"expected Float16Module or .*, found _BaseDataParallel: .*FSDP"):
        layout_of(_BaseDataParallel(chunk.config, chunk))


def test_parameters_that_fsdp_has_sharded_are_refused_by_name(chunk: Any) -> None:
    fully_shard(chunk.decoder.layers[2], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.2\.\S+: .* found a DTensor: .*FSDP"):
        layout_of(chunk)


def test_grouped_experts_that_are_not_contiguous_are_refused_by_name() -> None:
    config, _ = model_of("qwen3_moe")
    fakepg.enter(0, 1)
    chunks: Any = build_model(config, moe_grouped_gemm=True)
    weight = chunks[0].decoder.layers[1].mlp.experts.weight1
    weight.data = weight.data.T.contiguous().T
    with pytest.raises(
        LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.experts\.weight1: its factory .* fails on strides \(1, 128\)"
    ):
        local_layout(chunks, config)


def test_parameters_whose_memory_is_freed_are_refused_by_name(chunk: Any) -> None:
    chunk.decoder.layers[2].mlp.linear_fc2.weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.2\.mlp\.linear_fc2\.weight: .* in memory, found none"):
        layout_of(chunk)


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
