"""Models that a layout refuses, by the name of what it does not support, and their nearest ones that it takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import Spec, build_model, legacy_experts
from tests.support.megatron_rebuild import assert_rebuilt, model_of, rebuild

# isort: split
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from resharder.converters import architectures
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.models.megatron.layout import local_layout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformer_engine.pytorch.float8_tensor import Float8Tensor

pytestmark = pytest.mark.compat("refusals")


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
    with pytest.raises(
        LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.adapter: sharded_state_dict does not say where it belongs"
    ):
        layout_of(chunk)


def test_a_parameter_without_elements_is_not_taken_for_a_freed_one(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_parameter("adapter", torch.nn.Parameter(torch.zeros(0)))
    with pytest.raises(
        LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.adapter: sharded_state_dict does not say where it belongs"
    ):
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
    with pytest.raises(UnknownTensor, match=rf"linear_fc2\.weight: sharded_state_dict has {found} instead of a sharded tensor"):
        layout_of(chunk)


def test_what_is_not_a_megatron_module_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="megatron-core modules, not Linear"):
        local_layout([torch.nn.Linear(2, 2)], tiny_hf.tiny_config("qwen3"))


def test_a_buffer_that_is_not_placed_is_refused_by_name(chunk: Any) -> None:
    chunk.decoder.layers[1].mlp.register_buffer("scale", torch.ones(3))
    with pytest.raises(LayoutError, match=r"0\.decoder\.layers\.1\.mlp\.scale: sharded_state_dict does not say where it belongs"):
        layout_of(chunk)


def test_a_wrapper_that_may_shard_parameters_is_refused(chunk: Any) -> None:
    """The base of Megatron's FSDP, of its own for torch's FSDP2, and of DDP."""
    with pytest.raises(UnsupportedModel, match=r"expected Float16Module or .*, found _BaseDataParallel: .*FSDP"):
        layout_of(_BaseDataParallel(chunk.config, chunk))


def test_parameters_that_fsdp_has_sharded_are_refused_by_name(chunk: Any) -> None:
    fully_shard(chunk.decoder.layers[2], mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.2\.\S+ is a DTensor: .*FSDP"):
        layout_of(chunk)


@legacy_experts
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
    with pytest.raises(UnsupportedModel, match=r"0\.decoder\.layers\.2\.mlp\.linear_fc2\.weight: none of its .* in memory"):
        layout_of(chunk)
