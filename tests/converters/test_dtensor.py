"""Layouts of models of DTensors: every rank of every mesh in one process, against the whole tensors."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fakepg, tiny_hf

# isort: split
from resharder.converters.allowances import collecting
from resharder.converters.architectures.checkpoint import expected_shapes, tower_shapes
from resharder.converters.architectures.wrapped import language_config
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Layout, TensorSpec
from resharder.converters.geometry.tiling import Held, check_tiling
from resharder.converters.models.dtensor import local_layout, shard_order
from resharder.converters.models.tensor_io import read_piece
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

NOBODY = {"model_type": "nobody"}
Tensors = dict[str, torch.Tensor]
Held_ = tuple[Layout, Mapping[str, torch.Tensor]]


def assert_every_element_once(full: Tensors, world: int, hold: Callable[[], Held_]) -> list[Layout]:
    """`hold` is called as each rank; all pieces have the whole tensors' bytes, and the owned ones tile them."""
    layouts, specs = [], {name: TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in full.items()}
    held: dict[str, list[Held]] = {name: [] for name in full}
    for rank in range(world):
        fakepg.enter(rank, world)
        layout, tensors = hold()
        for position, piece in enumerate(layout.pieces):
            assert layout.tensors[piece.tensor] == specs[piece.tensor]
            index = tuple(r.as_slice() for r in piece.box)
            assert torch.equal(read_piece(tensors, piece), full[piece.tensor][index]), (rank, piece)
            held[piece.tensor].append(Held(rank, position, piece.box, piece.replica))
        layouts.append(layout)
    for name, pieces in held.items():
        check_tiling(specs[name], pieces)
    return layouts


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Replicate()]),
    ((2, 2), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(-1)]),
    ((2, 4), [Shard(0), Replicate()]),
    ((2, 2, 2), [Replicate(), Shard(0), Shard(0)]),
    ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((4, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 4), [_StridedShard(1, split_factor=4), Shard(1)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
    ((2, 2, 2), [_StridedShard(0, split_factor=2), Shard(1), Shard(0)]),
]


@pytest.mark.parametrize(("mesh", "placements"), PLACEMENTS, ids=repr)
@pytest.mark.parametrize("shape", [(16, 24), (7, 9), (3, 2)], ids=repr)
def test_a_tensor_over_any_mesh_is_held_once(mesh: tuple[int, ...], placements: list[Any], shape: tuple[int, ...]) -> None:
    full = numbers(*shape)

    def hold() -> Held_:
        return local_layout({"w": placed(full, init_device_mesh("cpu", mesh), placements)}, NOBODY)

    assert_every_element_once({"w": full}, int(torch.tensor(mesh).prod()), hold)


def placed(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """As FSDP makes it: plain shards of the inner mesh dimensions first, then those that are strided."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = full
    dims = range(len(placements))
    inner_first = [d for d in dims if type(placements[d]) is Shard] + [
        d for d in reversed(dims) if type(placements[d]) is _StridedShard
    ]
    for d in inner_first:
        chunks = local.chunk(mesh.size(d), dim=placements[d].dim)
        none = local.narrow(placements[d].dim, 0, 0)
        local = chunks[coordinate[d]] if coordinate[d] < len(chunks) else none
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def test_plain_shards_are_where_torch_itself_puts_them() -> None:
    full = numbers(10, 6)
    for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        assert_every_element_once(
            {"w": full},
            6,
            lambda placements=placements: local_layout(
                {"w": distribute_tensor(full, init_device_mesh("cpu", (3, 2)), placements, src_data_rank=None)}, NOBODY
            ),
        )


@pytest.mark.parametrize(
    ("factors", "order"),
    [
        ([(2, 1), (3, 1)], [0, 1]),
        ([(2, 3), (3, 1)], [1, 0]),
        ([(2, 4), (2, 2), (2, 1)], [2, 1, 0]),
        ([(2, 1), (2, 2), (2, 1)], [0, 2, 1]),
        ([(2, 2), (2, 2), (3, 3)], None),
        ([(2, 5), (2, 1)], None),
    ],
)
def test_split_factors_say_who_cut_first(factors: list[tuple[int, int]], order: list[int] | None) -> None:
    if order is None:
        with pytest.raises(ValueError, match="expected a split factor among"):
            shard_order(factors)
    else:
        assert shard_order(factors) == order


def test_fsdp_over_tensor_parallelism_holds_every_element_once() -> None:
    config, full = tiny("qwen3")
    assert_every_element_once(full, 8, lambda: local_layout(sharded(config, full, (2, 2, 2)), config))


@pytest.mark.parametrize(
    ("world", "shape", "wrap"),
    [(3, (1, 3, 1), False), (4, (2, 2, 1), True), (4, (1, 1, 4), False), (4, (1, 2, 2), True), (6, (1, 3, 2), False)],
    ids=repr,
)
def test_uneven_hybrid_and_wrapped_models_hold_every_element_once(world: int, shape: tuple[int, int, int], wrap: bool) -> None:
    config, full = tiny("qwen3_tied")
    layouts = assert_every_element_once(full, world, lambda: local_layout(sharded(config, full, shape, wrap=wrap), config))
    assert "lm_head.weight" not in layouts[0].tensors


def tiny(family: str, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    config = tiny_hf.tiny_config(family, num_hidden_layers=2, **changes)
    torch.manual_seed(5)
    state = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    return config, {name: tensor for name, tensor in state.items() if name != "lm_head.weight" or family != "qwen3_tied"}


def sharded(config: dict[str, Any], full: Tensors, shape: tuple[int, int, int], *, wrap: bool = False) -> torch.nn.Module:
    """transformers' model with these weights: replicated, sharded by FSDP2, tensor parallel, by so many ranks each."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.load_state_dict(full, strict=False)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    if shape[2] > 1:
        columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
        for layer in model.model.layers:
            plan = {f"{block}.{name}": ColwiseParallel() for block in ("self_attn", "mlp") for name in columns}
            plan |= {f"{block}.{name}": RowwiseParallel() for block in ("self_attn", "mlp") for name in rows}
            there = {name: style for name, style in plan.items() if has(layer, name)}
            parallelize_module(layer, mesh["tp"], there, src_data_rank=None)
    for number, layer in enumerate(model.model.layers):
        if wrap:
            layer = torch.compile(checkpoint_wrapper(layer)) if number else checkpoint_wrapper(layer)
            model.model.layers[number] = layer
        if shape[0] * shape[1] > 1:
            fully_shard(layer, mesh=mesh["replicate", "shard"])
    if shape[0] * shape[1] > 1:
        fully_shard(model, mesh=mesh["replicate", "shard"])
    return torch.compile(model) if wrap else model


def has(module: torch.nn.Module, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_that_transformers_stacks_are_those_on_disk(family: str, tmp_path: Path) -> None:
    config = tiny_hf.tiny_config(family, num_hidden_layers=2)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    full, state = tiny_hf.load_checkpoint(tmp_path), model.state_dict()
    assert_every_element_once(full, 4, lambda: local_layout(sharded(config, state, (2, 2, 1)), config))

    def cut_across_gate_and_up() -> Held_:
        mesh = init_device_mesh("cpu", (3,))
        cut = {
            name: distribute_tensor(tensor, mesh, [Shard(1)], src_data_rank=None) if tensor.dim() == 3 else tensor
            for name, tensor in state.items()
        }
        return local_layout(cut, config)

    assert_every_element_once(full, 3, cut_across_gate_and_up)


def test_a_stage_of_a_pipeline_says_which_ranks_hold_it() -> None:
    config, full = tiny("qwen3")
    last = ("model.layers.1.", "model.norm.", "lm_head.")
    stages = [{name: t for name, t in full.items() if name.startswith(last) == bool(stage)} for stage in (0, 1)]

    def hold() -> Held_:
        rank = torch.distributed.get_rank()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
        tensors = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) if tensor.dim() == 2 else tensor
            for name, tensor in stages[rank // 2].items()
        }
        return local_layout(tensors, config, ranks=[2 * (rank // 2), 2 * (rank // 2) + 1])

    assert_every_element_once(full, 4, hold)


def test_memory_that_fsdp_gives_a_parameter_later_is_read() -> None:
    config, full = tiny("qwen3")
    fakepg.enter(1, 2)
    model = sharded(config, full, (1, 2, 1))
    layout, tensors = local_layout(model, config)
    parameter: Any = model.get_parameter("model.norm.weight")
    parameter._local_tensor = torch.full_like(parameter._local_tensor, 7.0)
    piece = next(piece for piece in layout.pieces if piece.tensor == "model.norm.weight")
    assert read_piece(tensors, piece).tolist() == [7.0] * 64


def test_whole_parameters_left_by_a_forward_pass_are_sharded_again() -> None:
    config, full = tiny("qwen3")
    fakepg.enter(0, 2)
    model: Any = sharded(config, full, (1, 2, 1))
    model.unshard()
    assert not isinstance(model.model.norm.weight, DTensor)
    _, tensors = local_layout(model, config)
    assert tensors["model.norm.weight"].shape == (64,)


def test_quantities_that_are_partial_are_refused() -> None:
    fakepg.enter(0, 2)
    part = DTensor.from_local(numbers(4, 4), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    with pytest.raises(LayoutError, match=r"w has the placement .*P"):
        local_layout({"w": part}, NOBODY)


def test_a_local_tensor_of_another_shape_than_its_placement_says_is_refused() -> None:
    fakepg.enter(0, 2)
    wrong = DTensor.from_local(
        numbers(5, 4), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
    )
    with pytest.raises(LayoutError, match=r"w: .* should hold \[0:4, 0:4\] of \[8, 4\], its local tensor has shape \[5, 4\]"):
        local_layout({"w": wrong}, NOBODY)


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    fakepg.enter(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    layout, tensors = local_layout({"w": distribute_tensor(numbers(4, 4), mesh, [Shard(0)], src_data_rank=None)}, NOBODY)
    assert layout.pieces == ()
    assert dict(tensors) == {}


def test_names_that_are_not_those_on_disk_are_refused_with_the_difference() -> None:
    config, full = tiny("qwen3")
    full["model.layers.0.mlp.gate_up"] = full.pop("model.layers.0.mlp.gate_proj.weight")
    with pytest.raises(UnknownTensor, match=r"1 unexpected: model.layers.0.mlp.gate_up; 1 missing: .*gate_proj"):
        local_layout(full, config)
    layout, _ = local_layout(full, config, rename=lambda name: name.replace("gate_up", "gate_proj.weight"))
    assert "model.layers.0.mlp.gate_proj.weight" in layout.tensors
    with pytest.raises(UnknownTensor, match="1 missing"):
        local_layout(full, config, rename=lambda name: None if name.endswith("gate_up") else name)


@pytest.mark.parametrize(
    ("family", "count"),
    [
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("glm4_moe", "num_nextn_predict_layers"),
        ("mimo", "num_nextn_predict_layers"),
        ("qwen3_next", "num_nextn_predict_layers"),
        ("qwen3_5", "mtp_num_hidden_layers"),
        ("qwen3_5_moe", "mtp_num_hidden_layers"),
        ("qwen3_5_vl", "mtp_num_hidden_layers"),
        ("qwen3_5_moe_vl", "mtp_num_hidden_layers"),
    ],
)
def test_mtp_layers_that_transformers_does_not_build_are_refused_with_the_field_that_counts_them(family: str, count: str) -> None:
    without = tiny_hf.tiny_config(family, **{count: 0})
    config = tiny_hf.tiny_config(family, **{count: 1})
    built = {name: torch.empty(shape) for name, shape in expected_shapes(without).items()}
    with pytest.raises(UnknownTensor, match=f"the config counts MTP layers that the model does not have: attach .* {count} is 0"):
        local_layout(built, config)
    assert local_layout(built, without)[0].tensors.keys() == built.keys()
    del built[next(name for name in built if name.endswith(".norm.weight") and "layers" not in name)]
    with pytest.raises(UnknownTensor, match=r"[0-9]+ missing: .*pass rename="):
        local_layout(built, config)


@pytest.mark.parametrize("family", [family for family in tiny_hf.WRAPPED if family != "kimi_k25"])
def test_a_model_with_a_tower_sharded_by_fsdp_has_the_names_and_values_of_the_released_checkpoint(
    family: str, tmp_path: Path
) -> None:
    config = tiny_hf.tiny_config(family)
    folder = tiny_hf.save_checkpoint(tmp_path, config)

    def hold() -> Held_:
        model = tiny_hf.load_model(folder)
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=(mesh := init_device_mesh("cpu", (3,))))
        fully_shard(model, mesh=mesh)
        return local_layout(model, config)

    assert_every_element_once(tiny_hf.load_checkpoint(folder), 3, hold)


@pytest.mark.parametrize("family", [family for family in tiny_hf.WRAPPED if family != "kimi_k25"])
def test_a_head_that_is_not_tied_has_the_released_name(family: str) -> None:
    config = tiny_hf.tiny_config(family, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    assert local_layout(model, config)[0].tensors.keys() == expected_shapes(config).keys()


def test_modules_of_transformers_that_have_a_tower_of_other_tensors_are_refused(tmp_path: Path) -> None:
    """transformers divides the fused projections of Kimi-K2.5's tower, and exchanges rows."""
    config = tiny_hf.tiny_config("kimi_k25")
    model = tiny_hf.load_model(tiny_hf.save_checkpoint(tmp_path, config))
    with pytest.raises(UnknownTensor, match=r"expected the names of the checkpoint on disk, found .*vision_tower"):
        local_layout(model, config)


TEXT = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "glm4v_moe": "glm4_moe"}
"""Model types under which transformers has a class for the language model alone, by the family of the wrapper."""


@pytest.mark.parametrize("family", tiny_hf.WRAPPED)
def test_a_language_model_of_transformers_alone_has_the_names_of_its_wrapper(family: str) -> None:
    config = tiny_hf.tiny_config(family, tie_word_embeddings=False)
    text = dict(language_config(config))
    text["model_type"] = TEXT.get(family, text["model_type"])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    layout, _ = local_layout(model, config, tower=False)
    assert layout.tensors.keys() == expected_shapes(config).keys() - tower_shapes(config).keys()


def test_stacked_experts_of_which_no_shape_says_how_they_are_stored_are_refused(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_vl_moe", moe_intermediate_size=64)
    built = {name: torch.empty(shape) for name, shape in expected_shapes(config).items()}
    with pytest.raises(UnsupportedModel, match="does not say whether it is transposed in memory"):
        local_layout(built, config)


def test_another_shape_than_the_config_says_is_refused_with_both() -> None:
    config, full = tiny("qwen3")
    full["model.norm.weight"] = torch.zeros(64)
    with pytest.raises(LayoutError, match=r"model.norm.weight: expected \[128\] from the config, found \[64\]"):
        local_layout(full, config)


def test_a_tied_output_layer_that_has_memory_of_its_own_is_refused() -> None:
    config, full = tiny("qwen3_tied")
    full["lm_head.weight"] = full["model.embed_tokens.weight"]
    layout, _ = local_layout(full, config)
    assert "lm_head.weight" not in layout.tensors
    full["lm_head.weight"] = full["model.embed_tokens.weight"].clone()
    with pytest.raises(UnknownTensor, match=r"lm_head.weight has memory of its own, .* ties it to model.embed_tokens"):
        local_layout(full, config)


@pytest.mark.parametrize("table", [True, False])
def test_a_head_that_to_empty_untied_is_refused_for_every_family_until_it_is_tied_or_allowed(
    table: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = tiny("qwen3_tied")
    family = config if table else NOBODY
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.to_empty(device="cpu")
    with pytest.raises(UnknownTensor, match=r"lm_head.weight has memory of its own, .*model.tie_weights\(\)"):
        local_layout(model, family)
    if not table:
        assert "lm_head.weight" in local_layout(model, NOBODY | {"tie_word_embeddings": False})[0].tensors
    monkeypatch.setenv("RESHARDER_ALLOW", "second-head")
    with collecting() as texts:
        assert "lm_head.weight" not in local_layout(model, family)[0].tensors
    (text,) = texts
    assert "lm_head.weight has memory of its own" in text
    monkeypatch.delenv("RESHARDER_ALLOW")
    model.tie_weights()
    assert "lm_head.weight" not in local_layout(model, family)[0].tensors


def test_a_head_tied_to_embeddings_is_accepted_beside_further_copies_of_them() -> None:
    full = {name: numbers(3, 2) for name in ("model.embed_tokens.weight", "model.layers.2.embed_tokens.weight")}
    layout, _ = local_layout(full | {"lm_head.weight": full["model.embed_tokens.weight"]}, NOBODY)
    assert sorted(layout.tensors) == sorted(full)


@pytest.mark.parametrize(("config", "names"), [(NOBODY, ["a"]), (NOBODY | {"tie_word_embeddings": False}, ["a", "b"])], ids=str)
def test_one_tensor_of_two_names_is_one_where_the_config_ties(config: dict[str, Any], names: list[str]) -> None:
    tensor = numbers(3, 2)
    layout, _ = local_layout({"a": tensor, "b": tensor.detach(), "empty": torch.zeros(0)}, config)
    assert sorted(layout.tensors) == names


def test_what_holds_no_plain_values_is_refused() -> None:
    config, full = tiny("qwen3")
    with pytest.raises(UnsupportedModel, match="quantised checkpoints have no table"):
        local_layout(full, config | {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(UnsupportedModel, match=r"w: expected one of BF16.*found torch.float8_e4m3fn"):
        local_layout({"w": torch.zeros(4, dtype=torch.float8_e4m3fn)}, NOBODY)
    with pytest.raises(UnknownTensor, match="w: expected a tensor, found int"):
        local_layout({"w": 3}, NOBODY)  # type: ignore[dict-item]
    with pytest.raises(UnsupportedModel, match=r"w is a Quantised"):
        local_layout({"w": torch.zeros(4).as_subclass(Quantised)}, NOBODY)
    with pytest.raises(UnsupportedModel, match="expected a module, a list of them or a state dict, found int"):
        local_layout([3], NOBODY)  # type: ignore[list-item]


class Quantised(torch.Tensor):
    """A tensor whose elements are not what its dtype says."""


def test_a_split_factor_that_no_order_of_cuts_has_is_refused() -> None:
    fakepg.enter(0, 4)
    placements = [_StridedShard(0, split_factor=5), Shard(0)]
    part = DTensor.from_local(
        numbers(2, 4), init_device_mesh("cpu", (2, 2)), placements, run_check=False, shape=torch.Size((8, 4)), stride=(4, 1)
    )
    with pytest.raises(LayoutError, match=r"w: .* over mesh \(2, 2\): expected a split factor among \[1, 2\], found 5"):
        local_layout({"w": part}, NOBODY)


# Names and owners


def test_wrappers_are_no_part_of_a_name() -> None:
    wrapped = "module._fsdp_wrapped_module.layers.0._checkpoint_wrapped_module._orig_mod.w"
    layout, tensors = local_layout({wrapped: numbers(3, 2)}, NOBODY)
    assert set(layout.tensors) == set(tensors) == {"layers.0.w"}


def test_state_that_is_no_tensor_is_left_out_where_it_is_transformer_engines() -> None:
    layout, _ = local_layout({"w": numbers(3, 2), "w._extra_state": b""}, NOBODY)  # type: ignore[dict-item]
    assert set(layout.tensors) == {"w"}


def test_two_tensors_of_one_name_are_refused_but_for_one_memory() -> None:
    tensor = numbers(3, 2)
    layout, _ = local_layout({"w": tensor, "module.w": tensor.detach()}, NOBODY)
    assert set(layout.tensors) == {"w"}
    with pytest.raises(UnknownTensor, match=r"w: two tensors have this name, the second is module\.w"):
        local_layout({"w": tensor, "module.w": tensor.clone()}, NOBODY)


def test_parts_of_a_model_are_laid_out_together() -> None:
    parts = [torch.nn.ModuleDict({name: torch.nn.Linear(2, 3, bias=False)}) for name in ("a", "b")]
    layout, tensors = local_layout(parts, NOBODY)
    assert set(layout.tensors) == {"a.weight", "b.weight"}
    assert torch.equal(tensors["b.weight"], parts[1]["b"].weight)


def test_stacked_experts_of_other_dimensions_are_refused_by_name() -> None:
    config = tiny_hf.tiny_config("qwen3_moe", num_hidden_layers=1)
    with pytest.raises(UnknownTensor, match=r"1 unexpected: model\.layers\.0\.mlp\.experts\.down_proj"):
        local_layout({"model.layers.0.mlp.experts.down_proj": numbers(8, 128)}, config)


def test_the_first_rank_owns_plain_tensors() -> None:
    for rank in (0, 1):
        fakepg.enter(rank, 2)
        layout, _ = local_layout({"w": numbers(3, 2)}, NOBODY)
        assert [piece.replica for piece in layout.pieces] == [rank > 0]
    fakepg.leave()
    layout, _ = local_layout({"w": numbers(3, 2)}, NOBODY)
    assert [piece.replica for piece in layout.pieces] == [False]
