"""Casts to FP8 blocks: any tiling of matrices among ranks, after the exchange of maxima, is one cast of the whole."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_index, full_box
from resharder.converters.geometry.plan import plan
from resharder.converters.geometry.tiling import Held, check_tiling
from resharder.converters.models.blockwise import MasterPart
from resharder.converters.models.tensor_io import read_piece, view_of
from resharder.converters.quantization.cast import QuantisedTensors, quantise_whole
from resharder.converters.quantization.checkpoint import expected_tensors
from resharder.converters.quantization.layout import pieces_within
from resharder.converters.quantization.scheme import CHANNELS as CHANNEL_CONFIG
from resharder.converters.quantization.scheme import Scheme, check_family, scheme_of
from resharder.converters.storage.digest import MASK, digest
from resharder.server.ingest.maxima import RankBlocks, VersionMaxima, plan_shared, read_shared
from resharder.v1 import publisher_pb2
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from tests.support.fp8_reference import FP8, cast
from tests.support.tiny_hf import family_of, tiny_config
from tools.formats_table import PAGE, page

NAME, SCALES = "a.weight", "a.weight_scale_inv"
BLOCKS, CHANNELS = Scheme(), Scheme(channels=True)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, int], list[list[tuple[Box, bool]]]]:
    """A shape, and the boxes of each rank with whether it is a replica: rows and columns in runs, some of them interleaved."""
    shape = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    rows, columns = (list(draw(st.sampled_from([runs, interleaved]))(draw, n)) for n in shape)
    ranks = draw(st.integers(1, 4))
    held: list[list[tuple[Box, bool]]] = [[] for _ in range(ranks)]
    for box in ((r, c) for r in rows for c in columns):
        owner = draw(st.integers(0, ranks - 1))
        for rank in {owner, *draw(st.sets(st.integers(0, ranks - 1), max_size=1))}:
            held[rank].append((box, rank != owner))
    return shape, held


def runs(draw: st.DrawFn, n: int) -> Iterator[Range]:
    cuts = sorted({0, n, *(cut % n for cut in draw(st.lists(st.integers(0, 400), max_size=3)))})
    return (Range(a, b - a) for a, b in pairwise(cuts))


def interleaved(draw: st.DrawFn, n: int) -> Iterator[Range]:
    step = draw(st.integers(1, min(n, 3)))
    counts = [len(range(first, n, step)) for first in range(step)]
    return (Range(first, count, step if count > 1 else 1) for first, count in enumerate(counts))


def quantised(
    whole: torch.Tensor, held: list[list[tuple[Box, bool]]], transposed: bool = False, scheme: Scheme = BLOCKS
) -> list[QuantisedTensors]:
    """Each rank's cast tensors, after an exchange through the daemon's own functions."""
    spec, ranks = TensorSpec(NAME, "BF16", tuple(whole.shape)), []
    for boxes in held:
        local, pieces = dict[str, torch.Tensor](), list[Piece]()
        for number, (box, replica) in enumerate(boxes):
            part = whole[box_index(box)]
            part = part.T.contiguous().T if transposed else part.contiguous()
            local[str(number)] = part
            pieces.append(Piece(NAME, box, str(number), 0, part.stride(), replica))
        ranks.append(QuantisedTensors(Layout({NAME: spec} if pieces else {}, tuple(pieces)), local, scheme))
    keys = {}
    for rank, made in enumerate(ranks):
        specs = list(made.plan.layout.tensors.values())
        numbers = [0 if spec.name == scheme.scale_of(NAME) else 1 for spec in specs]
        both = (
            [
                publisher_pb2.SharedBlocks(tensor=[s.name for s in specs].index(name), blocks=blocks)
                for name, blocks in side.items()
            ]
            for side in (made.plan.contributed.blocks, made.plan.received.blocks)
        )
        keys[rank] = RankBlocks(*(read_shared(side, specs) for side in both)).renumber(numbers)
    maxima = VersionMaxima(plan_shared(keys))
    assert all(maxima.contribute(rank, made.measure()) for rank, made in enumerate(ranks))
    for rank, made in enumerate(ranks):
        assert maxima.missing(rank) == []
        made.cast(maxima.of(rank))
    return ranks


def bits(tensor: torch.Tensor) -> np.ndarray:
    kind = torch.uint8 if tensor.element_size() == 1 else torch.int32
    return tensor.contiguous().view(kind).numpy().view(f"u{tensor.element_size()}")


def random_matrix(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Blocks of different sizes, some below the smallest scale, some of zeros."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    made[: shape[0] // 2] *= 1e-5
    made[:, : shape[1] // 3] = 0
    return (made * torch.linspace(0.1, 5, shape[1])).bfloat16()


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(tiling=tilings(), seed=st.integers(0, 99), transposed=st.booleans(), scheme=st.sampled_from([BLOCKS, CHANNELS]))
def test_any_tiling_with_an_exchange_of_maxima_is_one_cast_of_the_whole(
    tiling: tuple[Any, Any], seed: int, transposed: bool, scheme: Scheme
) -> None:
    shape, held = tiling
    whole = random_matrix(shape, seed)
    ranks = quantised(whole, held, transposed, scheme)
    blocks = {"quantization_config": {"modules_to_not_convert": []}}
    want = by_channel(whole) if scheme.channels else cast({NAME: whole}, blocks)
    boxes: dict[str, list[Held]] = {NAME: [], scheme.scale_of(NAME): []}
    sums = dict.fromkeys(boxes, 0)
    for rank, made in enumerate(ranks):
        for position, piece in enumerate(made.plan.layout.pieces):
            found = read_piece(made.tensors, piece)
            assert np.array_equal(bits(found), bits(want[piece.tensor])[box_index(piece.box)])
            boxes[piece.tensor].append(Held(rank, position, piece.box, piece.replica))
            if not piece.replica:
                sums[piece.tensor] += digest(bits(found), piece.box, tuple(want[piece.tensor].shape))
    specs = {name: spec for made in ranks for name, spec in made.plan.layout.tensors.items()}
    for name, tensor in want.items():
        check_tiling(specs[name], boxes[name])
        assert sums[name] & MASK == digest(bits(tensor), full_box(tuple(tensor.shape)), tuple(tensor.shape))


def by_channel(whole: torch.Tensor) -> dict[str, torch.Tensor]:
    """The cast by channel, written anew."""
    found = whole.float()
    scales = found.abs().amax(1, keepdim=True).clamp(min=1e-4) / torch.tensor(448.0)
    return {NAME: (found * (1 / scales)).clamp(-448, 448).to(torch.float8_e4m3fn), f"{NAME}_scale": scales}


@settings(max_examples=200)
@given(st.data())
def test_parts_of_a_flat_tensor_have_each_element_of_a_piece_once(data: st.DataObject) -> None:
    """Rows of a piece may be interleaved with others, and have other elements before and after them."""
    number = st.integers(1, 5)
    counts = [data.draw(number) for _ in range(2)]
    rows, columns = (Range(data.draw(number), count, data.draw(number) if count > 1 else 1) for count in counts)
    stride, offset = columns.count + data.draw(st.integers(0, 4)), data.draw(st.integers(0, 9))
    flat = torch.arange(offset + rows.count * stride)
    cuts = sorted({0, flat.numel(), *data.draw(st.lists(st.integers(0, flat.numel()), max_size=4))})
    piece, owned = Piece(NAME, (rows, columns), "0", offset, (stride, 1), data.draw(st.booleans())), data.draw(st.booleans())
    found = torch.full((rows.last + 1, columns.last + 1), -1)
    whole = found.clone()
    whole[box_index(piece.box)] = view_of(flat, piece.view(piece.box))
    for start, end in [*pairwise(cuts), (3, 3)]:
        for cut in pieces_within(piece, MasterPart(start, end, owned)):
            assert (cut.tensor, cut.local, cut.replica) == (NAME, "0", not owned)
            values = read_piece({"0": flat[start:end].clone()}, cut)
            assert (found[box_index(cut.box)] == -1).all()
            found[box_index(cut.box)] = values
    assert torch.equal(found, whole)


def test_a_divided_master_weight_has_contiguous_rows() -> None:
    piece = Piece(NAME, full_box((2, 2)), "0", 0, (1, 2))
    with pytest.raises(UnsupportedModel, match=r"0: the rows of its divided master weight are not contiguous: \(1, 2\)"):
        pieces_within(piece, MasterPart(0, 4, True))


def test_a_rank_that_has_whole_blocks_waits_for_no_other() -> None:
    halves = [[((Range(0, 128), Range(0, 256)), False)], [((Range(128, 128), Range(0, 256)), False)]]
    ranks = quantised(random_matrix((256, 256), 1), halves)
    assert all(not made.plan.contributed.blocks and not made.plan.received.blocks for made in ranks)


def test_a_plan_moves_cast_tensors_into_a_worker_with_another_division() -> None:
    """As the direct path does, of which these tensors are the sources."""
    whole = random_matrix((300, 200), 1)
    quarters = [[((Range(r, 150), Range(c, 100)), False)] for r in (0, 150) for c in (0, 100)]
    ranks = quantised(whole, quarters)
    want = dict(zip((NAME, SCALES), quantise_whole(NAME, whole, Scheme()), strict=True))
    specs = {name: made for rank in ranks for name, made in rank.plan.layout.tensors.items()}
    memory = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    pieces = tuple(Piece(name, full_box(spec.shape), name, 0, memory[name].stride()) for name, spec in specs.items())
    layouts = {rank: made.plan.layout for rank, made in enumerate(ranks)}
    for copy in plan(layouts, {0: Layout(specs, pieces)}).copies():
        source = view_of(ranks[copy.source].tensors[copy.source_local], copy.source_view)
        view_of(memory[copy.target_local], copy.target_view).copy_(source)
    assert all(np.array_equal(bits(memory[name]), bits(tensor)) for name, tensor in want.items())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_values_that_are_not_finite_are_refused_with_the_tensors_name(value: float) -> None:
    whole = random_matrix((200, 200), 1)
    whole[150, 7] = value
    with pytest.raises(UnsupportedModel, match=r"a\.weight has an infinity or NaN"):
        quantise_whole(NAME, whole, Scheme())


@pytest.mark.parametrize("value", [0.0, 1e-8, 9e-5])
def test_blocks_below_the_smallest_scale_have_it(value: float) -> None:
    weights, scales = quantise_whole(NAME, torch.full((130, 130), value, dtype=torch.bfloat16), Scheme())
    assert scales.unique().tolist() == [float(torch.tensor(1e-4) / 448)]
    assert weights.float().isfinite().all()


def test_a_misplaced_element_of_eight_bits_changes_the_digest() -> None:
    weights, _ = quantise_whole(NAME, random_matrix((64, 90), 1) + 1, Scheme())
    swapped = bits(weights).copy()
    swapped[3, 4], swapped[50, 80] = swapped[50, 80], swapped[3, 4]
    assert swapped[3, 4] != bits(weights)[3, 4]
    box = full_box((64, 90))
    assert digest(swapped, box, (64, 90)) != digest(bits(weights), box, (64, 90))


ACCEPTED = [FP8, FP8 | {"fmt": "e4m3", "modules_to_not_convert": ["model.layers.0.self_attn.q_proj"], "ignored_layers": None}]
REFUSED: list[Any] = [
    {},
    {"quant_method": "awq"},
    FP8 | {"weight_block_size": [64, 64]},
    FP8 | {"activation_scheme": "static"},
    FP8 | {"scale_fmt": "ue8m0"},
    FP8 | {"modules_to_not_convert": "lm_head"},
    CHANNEL_CONFIG | {"ignore": ["re:.*gate$"]},
    CHANNEL_CONFIG | {"format": "int-quantized"},
    CHANNEL_CONFIG | {"kv_cache_scheme": {"num_bits": 8}},
    "fp8",
]


def test_a_dictionary_of_released_checkpoints_is_accepted_and_written_back() -> None:
    shapes = expected_shapes(tiny_config("qwen3"))
    for given_ in ACCEPTED:
        written = scheme_of(given_).config(shapes)
        assert FP8.items() <= written.items()
        assert set(given_.get("modules_to_not_convert", ())) | {"lm_head", "model.embed_tokens"} == set(
            written["modules_to_not_convert"]
        )


def test_the_form_of_released_checkpoints_by_channel_is_accepted_and_written_back() -> None:
    shapes = expected_shapes(tiny_config("qwen3"))
    group = CHANNEL_CONFIG["config_groups"]["group_0"]
    weights = group["weights"] | {"actorder": None, "block_structure": None, "group_size": None, "observer": "minmax"}
    released = CHANNEL_CONFIG | {
        "config_groups": {"group_0": group | {"output_activations": None, "weights": weights}},
        "ignore": ["lm_head", "model.layers.0.self_attn.q_proj"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.46,
    }
    scheme = scheme_of(released)
    assert (scheme.channels, scheme.kept) == (True, {"lm_head", "model.layers.0.self_attn.q_proj"})
    written = scheme.config(shapes)
    assert set(written.pop("ignore")) == {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_proj"}
    assert CHANNEL_CONFIG.items() <= written.items()


@pytest.mark.parametrize("config", REFUSED, ids=repr)
def test_any_other_format_is_refused_with_the_accepted_one_and_what_came(config: Any) -> None:
    with pytest.raises(UnsupportedModel, match=r"quantization_config: expected .* got "):
        scheme_of(config)


def test_vllm_reads_the_written_config_and_leaves_the_same_modules_unconverted() -> None:
    written = Scheme().config(expected_shapes(tiny_config("qwen3_moe")))
    read = Fp8Config.from_config(dict(written))
    assert (read.is_checkpoint_fp8_serialized, read.weight_block_size, read.activation_scheme) == (True, [128, 128], "dynamic")
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    skipped = {name: is_layer_skipped(f"model.layers.3.{name}", read.ignored_layers, fused) for name in MODULES}
    assert skipped == MODULES


MODULES = {"self_attn.qkv_proj": False, "self_attn.o_proj": False, "mlp.experts": False, "mlp.gate": True}


def test_every_matrix_in_fp8_is_expected_with_its_scales() -> None:
    config, scheme = tiny_config("qwen3"), Scheme()
    shapes = expected_shapes(config)
    found = [TensorSpec(name, "F8_E4M3" if scheme.converts(name, shape) else "BF16", shape) for name, shape in shapes.items()]
    expected = expected_tensors(config | {"quantization_config": scheme.config(shapes)}, found)
    assert shapes.items() <= expected.items()
    assert expected["model.layers.0.mlp.down_proj.weight_scale_inv"] == (1, 2)
    assert len(expected) - len(shapes) == sum(scheme.converts(*each) for each in shapes.items())
    with pytest.raises(UnsupportedModel, match="quantization_config: expected"):
        expected_tensors(config | {"quantization_config": {"quant_method": "awq"}}, found)


def test_the_page_has_the_families_as_the_code_has_them() -> None:
    assert PAGE.read_text() == page(), "run `python -m tools.formats_table`"


def test_a_module_that_the_caller_names_stays_unconverted() -> None:
    scheme = scheme_of(FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]})
    assert not scheme.converts("model.layers.0.self_attn.q_proj.weight", (128, 128))
    assert scheme.converts("model.layers.0.self_attn.k_proj.weight", (128, 128))


@pytest.mark.parametrize("family", [a.model_type for a in ARCHITECTURES])
def test_every_familys_matrices_are_projections_or_known_to_stay_unconverted(family: str) -> None:
    config = tiny_config(family_of(family))
    shapes, scheme = expected_shapes(config), Scheme()
    if family == "gpt_oss" or "vision_config" in config:
        with pytest.raises(UnsupportedModel, match=r"stacked experts|has a tower"):
            check_family(config, shapes.items())
        return
    check_family(config, shapes.items())
    converted = {name.split(".")[-2] for name, shape in shapes.items() if scheme.converts(name, shape)}
    suffixes = ("_proj", "w1", "w2", "w3", "_proj_with_mqa", "in_proj_qkvz", "in_proj_qkv", "in_proj_z")
    assert all(name.endswith(suffixes) for name in converted), converted
