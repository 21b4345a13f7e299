"""What the recorder writes down is what a model's loader does, and what it cannot write down it says."""

from collections.abc import Callable, Iterable
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from resharder.client.inference.recording.recorder import Recording, record
from resharder.client.inference.recording.view_boxes import boxes_of_view, covered_elements
from resharder.converters.geometry.layout import StridedView, TensorSpec, box_index

pytestmark = pytest.mark.compat("other")


@st.composite
def views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """(a contiguous tensor of distinct values, a view of it made by a few of the steps that loaders take, whether dimensions
    were joined: what is cut out of joined ones need not be a box)."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    whole = torch.arange(1, prod(shape) + 1, dtype=torch.int32).reshape(shape)
    view, joined = whole, False
    for _ in range(draw(st.integers(0, 4))):
        d = draw(st.integers(0, max(0, view.dim() - 1)))
        match draw(st.sampled_from(["narrow", "step", "transpose", "split", "select", "flatten"])):
            case "narrow" if view.dim():
                first = draw(st.integers(0, view.shape[d] - 1))
                view = view.narrow(d, first, draw(st.integers(1, view.shape[d] - first)))
            case "step" if view.dim():
                view = view[(slice(None),) * d + (slice(draw(st.integers(0, view.shape[d] - 1)), None, draw(st.integers(1, 3))),)]
            case "transpose" if view.dim() > 1:
                view = view.transpose(d, (d + 1) % view.dim())
            case "split" if view.dim() and view.shape[d] % 2 == 0:
                view = view.unflatten(d, (2, -1))
            case "select" if view.dim() > 1:
                view = view.select(d, draw(st.integers(0, view.shape[d] - 1)))
            case "flatten" if view.is_contiguous():
                view, joined = view.reshape(-1), joined or view.dim() > 1
    return whole, view, joined


@given(views(), st.booleans())
def test_boxes_copy_exactly_what_a_loaders_copy_would(drawn: tuple[torch.Tensor, torch.Tensor, bool], turned: bool) -> None:
    whole, view, joined = drawn
    target = torch.zeros(view.shape[::-1] if turned else view.shape, dtype=whole.dtype)
    place = target.permute(*reversed(range(view.dim()))) if turned else target
    source = StridedView(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))
    parts = boxes_of_view(tuple(whole.shape), source, 0, tuple(place.stride()))
    if parts is None:
        assert joined
        return
    flat = target.view(-1).numpy()
    for part in parts:
        box = whole.numpy()[box_index(part.box)]
        np.lib.stride_tricks.as_strided(flat[part.offset :], box.shape, tuple(4 * s for s in part.strides))[...] = box
    assert torch.equal(place, view)


class Model(torch.nn.Module):
    """Two fused halves and a norm; `load` is what the loader does with the tensor called `norm`."""

    def __init__(self, load: Callable[[torch.nn.Parameter, torch.Tensor], object]) -> None:
        super().__init__()
        self.fused = torch.nn.Linear(4, 6, bias=False)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.load(self.norm.weight, tensor)
            elif name != "unused":
                self.fused.weight.data.narrow(0, 3 * (name == "up"), 3).copy_(tensor.narrow(0, 3, 3))


def recorded(load: Callable[[torch.nn.Parameter, torch.Tensor], object]) -> Recording:
    specs = [TensorSpec("gate", "F32", (6, 4)), TensorSpec("up", "F32", (6, 4)), TensorSpec("norm", "F32", (4,))]
    specs.append(TensorSpec("unused", "F32", (2,)))
    return record(Model(load), {spec.name: spec for spec in specs}, lambda parameter: lambda p, tensor: p.data.copy_(tensor))


def test_slices_fused_parameters_and_dead_names_are_written_down() -> None:
    recording = recorded(lambda parameter, tensor: parameter.data.copy_(tensor))
    assert [(p.tensor, [tuple(r) for r in p.box], p.local, p.offset, p.strides) for p in recording.layout.pieces] == [
        ("gate", [(3, 3, 1), (0, 4, 1)], "fused.weight", 0, (4, 1)),
        ("up", [(3, 3, 1), (0, 4, 1)], "fused.weight", 12, (4, 1)),
        ("norm", [(0, 4, 1)], "norm.weight", 0, (1,)),
    ]
    assert recording.impure == {}
    assert "unused" not in recording.needs
    assert {name: len(boxes) for name, boxes in recording.needs.items()} == {"gate": 1, "up": 1, "norm": 1}


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (lambda p, t: p.data.copy_(t + 1), "computes with"),
        (lambda p, t: p.data.copy_(t.mul_(2)), "computes with"),
        (lambda p, t: p.data.copy_(t.half().float()), "computes with"),
        (lambda p, t: p.data.copy_(torch.cat([t[2:], t[:2]])), "computes with"),
        (lambda p, t: p.data.copy_(t[:1]), "broadcasts"),
        (lambda p, t: p.data.add_(t), "add_ on a parameter"),
    ],
)
def test_a_loader_that_does_more_than_copying_is_said_to(
    load: Callable[[torch.nn.Parameter, torch.Tensor], object], why: str
) -> None:
    recording = recorded(load)
    assert why in recording.impure["norm"]
    assert recording.reads["norm"] == {"norm.weight"}
    assert [tuple(r) for box in recording.needs["norm"] for r in box] == [(0, 4, 1)]
    assert {piece.tensor for piece in recording.layout.pieces} == {"gate", "up"}


def test_a_tensor_of_another_shape_is_refused_by_its_name_before_it_is_loaded() -> None:
    with pytest.raises(ValueError, match=r"norm: the loader copies \(3,\) into \(4,\) of norm\.weight, which does not fit"):
        recorded(lambda parameter, tensor: parameter.data.copy_(tensor[:3]))


def test_a_contiguous_copy_of_a_view_is_still_a_copy_until_it_is_written_to() -> None:
    def turned(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor[1::2].transpose(0, 1).contiguous().narrow(0, 1, 2).reshape(4))

    def zeroed(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        copy = tensor[1::2].transpose(0, 1).contiguous()
        copy[0] = 0
        parameter.data.copy_(copy.narrow(0, 1, 2).reshape(4))

    specs = {"norm": TensorSpec("norm", "F32", (4, 3))}
    recording = record(Model(turned), specs, lambda parameter: None)
    parts = [([tuple(r) for r in p.box], p.offset, p.strides) for p in recording.layout.pieces]
    assert parts == [([(1, 2, 2), (1, 2, 1)], 0, (1, 2))]
    assert "norm" in record(Model(zeroed), specs, lambda parameter: None).impure


def test_a_loader_that_looks_at_values_cannot_be_followed_and_everything_is_needed_whole() -> None:
    recording = recorded(lambda parameter, tensor: parameter.data.fill_(tensor.tolist()[0]))
    assert "norm" in recording.impure[""]
    assert [tuple(r) for box in recording.needs["gate"] for r in box] == [(0, 6, 1), (0, 4, 1)]


def test_recording_leaves_parameters_and_loaders_as_they_were() -> None:
    model = Model(lambda parameter, tensor: parameter.data.copy_(tensor))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    specs = {name: TensorSpec(name, "F32", shape) for name, shape in (("gate", (6, 4)), ("up", (6, 4)), ("norm", (4,)))}
    record(model, specs, lambda parameter: lambda p, tensor: p.data.copy_(tensor))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert not hasattr(parameter, "weight_loader")


def test_what_a_recording_needs_is_found_once_for_whoever_asks_of_thousands_of_tensors_one_by_one() -> None:
    recording = recorded(lambda parameter, tensor: parameter.data.copy_(tensor))
    assert recording.needs is recording.needs


@given(views(), views())
def test_elements_that_writes_cover_are_counted_once(
    first: tuple[torch.Tensor, torch.Tensor, bool], second: tuple[torch.Tensor, torch.Tensor, bool]
) -> None:
    taken = torch.zeros(2 * 512, dtype=torch.bool)
    places = [StridedView(tuple(v.shape), tuple(v.stride()), int(v.storage_offset())) for _, v, _ in (first, second, second)]
    for place in places:
        taken.as_strided(*place).fill_(True)
    assert covered_elements(places) == int(taken.sum())


class Padded(torch.nn.Module):
    """A vocabulary of 6 rows, of which a checkpoint has 4; a loader like vLLM's fills the rest with zeros, if it says so."""

    def __init__(self, *, zeros: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.register_buffer("table", torch.arange(3.0))
        self.zeros = zeros

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "embed":
                self.embed.weight[:4].data.copy_(tensor)
                if self.zeros:
                    self.embed.weight[4:].data.fill_(0)
            else:
                self.table[:2] = tensor


def test_what_the_loader_writes_itself_is_written_and_what_it_leaves_is_not() -> None:
    specs = {"embed": TensorSpec("embed", "F32", (4, 4)), "table": TensorSpec("table", "F32", (2,))}
    only = {"embed": specs["embed"]}
    assert record(Padded(zeros=True), only, lambda parameter: None).unwritten == {}, "a buffer that nothing fills is a constant"
    assert record(Padded(zeros=False), only, lambda parameter: None).unwritten == {
        "embed.weight": "16 of its 24 elements, from embed"
    }
    assert record(Padded(zeros=True), specs, lambda parameter: None).unwritten == {"table": "2 of its 3 elements, from table"}


def test_a_parameter_that_vllm_has_padded_is_written_by_as_many_elements_as_it_states() -> None:
    model = Padded(zeros=False)
    model.embed.weight.weight_loader_numel = 16
    specs = {"embed": TensorSpec("embed", "F32", (4, 4))}
    assert record(model, specs, lambda parameter: None).unwritten == {}


def test_tensors_that_the_loader_computes_with_count_for_the_part_that_they_fill() -> None:
    model = Model(lambda parameter, tensor: parameter.data.narrow(0, 1, 3).copy_(tensor.half().float()[1:]))
    specs = {name: TensorSpec(name, "F32", shape) for name, shape in (("gate", (6, 4)), ("up", (6, 4)), ("norm", (4,)))}
    recording = record(model, specs, lambda parameter: None)
    assert "norm" in recording.impure
    assert recording.unwritten == {"norm.weight": "3 of its 4 elements, from norm"}
