"""Versions for quantised modules: refused unless they fill them, copied straight only where memory proves the place."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Local, Recording, record
from resharder.client.inference.worker.model_part import MODEL, ModelPart
from resharder.client.inference.worker.routing import Evidence, decide, gather_evidence
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, box_index, full_box
from resharder.converters.models.tensor_io import TORCH_DTYPES
from resharder.converters.storage.digest import digest


class Quantised(torch.nn.Module):
    """A module of FP8 blocks, fused of two HF tensors, and a router."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Module()
        self.fused.weight = torch.nn.Parameter(torch.zeros(6, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.fused.scale = torch.nn.Parameter(torch.zeros(2, 1), requires_grad=False)
        self.fused.register_buffer("table", torch.arange(3))
        self.gate = torch.nn.Linear(4, 2, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            half, _, kind = name.partition(".")
            if half == "gate":
                self.gate.weight.data.copy_(tensor)
            else:
                rows = 3 if kind == "weight" else 1
                getattr(self.fused, kind).data.narrow(0, rows * (half == "up"), rows).copy_(tensor)


FP8 = {
    "down.weight": ("F8_E4M3", (3, 4)),
    "up.weight": ("F8_E4M3", (3, 4)),
    "down.scale": ("F32", (1, 1)),
    "up.scale": ("F32", (1, 1)),
    "gate.weight": ("BF16", (2, 4)),
}


@pytest.mark.parametrize(
    ("changes", "unwritten", "unfit"),
    [
        ({}, {}, {}),
        ({"up.scale": None}, {"fused.scale": "1 of its 2 elements, from down.scale"}, {}),
        ({"up.scale": None, "down.scale": None}, {"fused.scale": "0 of its 2 elements"}, {}),
        ({"up.weight": None}, {"fused.weight": "12 of its 24 elements, from down.weight"}, {}),
        (
            {"up.weight": ("BF16", (3, 4))},
            {},
            {"fused.weight": "up.weight is torch.bfloat16, stored as torch.float8_e4m3fn"},
        ),
        (
            {"gate.weight": ("F8_E4M3", (2, 4))},
            {},
            {"gate.weight": "gate.weight is torch.float8_e4m3fn, stored as torch.float32"},
        ),
        ({"gate.weight": ("F32", (2, 4))}, {}, {}),
    ],
)
def test_parameters_that_a_checkpoint_does_not_fill_exactly_are_written_down(
    changes: dict[str, tuple[str, tuple[int, ...]] | None], unwritten: dict[str, str], unfit: dict[str, str]
) -> None:
    given = {name: spec for name, spec in (FP8 | changes).items() if spec is not None}
    specs = {name: TensorSpec(name, *spec) for name, spec in given.items()}
    recording = record(Quantised(), specs, lambda parameter: None)
    assert recording.quantised == {"fused"}
    assert (recording.unwritten, recording.unfit) == (unwritten, unfit)
    rest = recording.without(frozenset(["fused", "gate"]))
    assert (rest.unwritten, rest.unfit) == ({}, {})


def test_a_version_without_a_scale_is_refused_by_its_name() -> None:
    specs = {name: TensorSpec(name, *spec) for name, spec in FP8.items() if name != "up.scale"}
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"))
    with pytest.raises(InstallError, match=r"models/m/versions/1 lacks .*fused\.scale \(1 of its 2 elements, from down\.scale\)"):
        part.record(record(Quantised(), specs, lambda parameter: None), SimpleNamespace(name="models/m/versions/1"))


def test_a_version_in_another_format_is_refused_by_the_names_of_its_tensors() -> None:
    specs = {name: TensorSpec(name, *spec) for name, spec in (FP8 | {"up.weight": ("BF16", (3, 4))}).items()}
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"))
    with pytest.raises(InstallError, match=r"1 parameters do not fit: fused\.weight: up\.weight is torch\.bfloat16"):
        part.record(record(Quantised(), specs, lambda parameter: None), SimpleNamespace(name="models/m/versions/1"))


class Source:
    """A version of random weights, with scales of one value or of several."""

    def __init__(self, *, uniform: bool) -> None:
        self.specs = {name: TensorSpec(name, *spec) for name, spec in (FP8 | {"down.scale": ("F32", (1, 2))}).items()}
        self.tensors = {
            name: torch.randn(spec.shape).to(TORCH_DTYPES[spec.dtype]) if "scale" not in name else torch.full(spec.shape, 2.0)
            for name, spec in self.specs.items()
        }
        if not uniform:
            self.tensors["down.scale"] = torch.tensor([[2.0, 3.0]])
        self.arrays = {name: inventory.bits(tensor).numpy() for name, tensor in self.tensors.items()}


class Turned(torch.nn.Module):
    """A module whose kernel reads the scales in reverse order; post-processing turns them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1, 2), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            half, _, kind = name.partition(".")
            if half == "down":
                getattr(self, kind).data.copy_(tensor)


def loaded(model: Turned, source: Source) -> Recording:
    """Record a model, and load a version into it."""
    inventory.before_loading(model)
    recording = record(model, source.specs, lambda parameter: None)
    model.load_weights(source.tensors.items())
    return recording


def stored(source: Source, recording: Recording) -> SimpleNamespace:
    expected = {
        (piece.tensor, piece.box): digest(
            np.ascontiguousarray(source.arrays[piece.tensor][box_index(piece.box)]), piece.box, source.specs[piece.tensor].shape
        )
        for piece in recording.layout.pieces
    }
    return SimpleNamespace(**vars(source), expected=expected)


def decided(model: Turned, source: Source, recording: Recording) -> bool:
    """Whether `load_weights` takes a version once the first one, `source`, is there."""
    inventory.after_loading(model)
    return bool(decide(recording, gather_evidence(model, recording, stored(source, recording))).loaded)


@pytest.mark.parametrize(("uniform", "turned"), [(False, False), (False, True), (True, False), (True, True)])
def test_scales_of_one_value_prove_no_place_so_they_are_loaded(uniform: bool, turned: bool) -> None:
    source, model = Source(uniform=uniform), Turned()
    recording = loaded(model, source)
    if turned:
        model.scale.data.copy_(model.scale.flip(1))
    assert decided(model, source, recording) == (uniform or turned)


@pytest.mark.parametrize("turned", [False, True])
def test_a_later_version_with_several_scales_proves_the_place_that_one_value_did_not(turned: bool) -> None:
    first, second, model = Source(uniform=True), Source(uniform=False), Turned()
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"), recording=loaded(model, first))
    inventory.after_loading(model)
    routes = []
    for source in (first, first, second, first):
        model.load_weights(source.tensors.items())
        if turned:
            model.scale.data.copy_(model.scale.flip(1))
        part.decide_route(model, stored(source, part.known))
        routes.append(bool(part.loaded))
    assert routes == [True, True, turned, turned]


@pytest.mark.parametrize("uniform", [False, True])
def test_an_engine_that_cannot_reload_quantised_weights_ends_where_post_processing_changes_them(uniform: bool) -> None:
    """Scales of one value leave it open until a version proves it: until then they are loaded again, as they were."""
    source, model = Source(uniform=uniform), Turned()
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"), "restart it", recording=loaded(model, source))
    inventory.after_loading(model)
    part.decide_route(model, stored(source, part.known))
    assert bool(part.loaded) == uniform
    changed = Source(uniform=False)
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"), "restart it", recording=loaded(model, changed))
    inventory.after_loading(model)
    model.scale.data.copy_(model.scale.flip(1))
    for _ in range(2):  # each install
        with pytest.raises(
            InstallError, match=r"1 modules do not hold their quantised weights as versions have them.* restart it"
        ):
            part.decide_route(model, stored(changed, part.known))


def test_an_engine_that_cannot_reload_quantised_weights_ends_where_tensors_derive_from_them() -> None:
    source, model = Source(uniform=False), Turned()
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"), "restart it", recording=loaded(model, source))
    model.packed = model.weight.data.clone()
    inventory.after_loading(model)
    with pytest.raises(InstallError, match="or hold tensors that derive from these"):
        part.decide_route(model, stored(source, part.known))


@pytest.mark.parametrize(
    ("stands", "is_loaded"),
    [
        (lambda weight, scale: (weight.t(), scale.t()), False),
        (lambda weight, scale: (weight[None], scale.flatten()), False),
        (lambda weight, scale: (weight.t().contiguous(), scale), True),
        (lambda weight, scale: (weight, scale.double()), True),
    ],
    ids=["transposed", "reshaped", "transposed copy", "other dtype"],
)
def test_a_kernels_view_of_the_memory_that_was_loaded_is_filled_by_boxes_and_a_copy_is_not(
    stands: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], is_loaded: bool
) -> None:
    source, model = Source(uniform=False), Turned()
    recording = loaded(model, source)
    model.weight, model.scale = (
        torch.nn.Parameter(tensor, requires_grad=False) for tensor in stands(model.weight.data, model.scale.data)
    )
    assert decided(model, source, recording) == is_loaded


def test_a_parameter_that_no_tensor_fills_leaves_no_module_to_process() -> None:
    """Such as the scales of a KV cache, which vLLM deletes: an install of boxes alone has no time for an inventory."""
    recording = Recording(
        Layout({"w": TensorSpec("w", "U8", (2, 4))}, (Piece("w", full_box((2, 4)), "linear.weight", 0, (4, 1)),)),
        {
            "linear.weight": Local((2, 4), (4, 1), torch.uint8, ("linear",)),
            "attention.k_scale": Local((1,), (1,), torch.float32, ("attention",)),
        },
        {"w": frozenset({"linear.weight"})},
        {},
    )
    route = decide(recording, Evidence(frozenset({"attention.k_scale"}), {}))
    assert (route.loaded, route.modules, len(route.boxed)) == (frozenset(), frozenset(), 1)
