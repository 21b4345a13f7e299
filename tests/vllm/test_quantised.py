"""Versions for quantised modules: refused unless they fill them, copied straight only where memory proves the place."""

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Local, Recording, record
from resharder.client.inference.worker.errors import InstallError
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
    ("changes", "unfit"),
    [
        ({}, {}),
        ({"up.scale": None}, {"fused.scale": "1 of its 2 elements have values"}),
        ({"up.scale": None, "down.scale": None}, {"fused.scale": "0 of its 2 elements have values"}),
        ({"up.weight": None}, {"fused.weight": "12 of its 24 elements have values"}),
        (
            {"up.weight": ("BF16", (3, 4))},
            {"fused.weight": "up.weight is torch.bfloat16, stored as torch.float8_e4m3fn"},
        ),
        ({"gate.weight": ("F8_E4M3", (2, 4))}, {"gate.weight": "gate.weight is torch.float8_e4m3fn, stored as torch.float32"}),
        ({"gate.weight": ("F32", (2, 4))}, {}),
    ],
)
def test_parameters_of_quantised_modules_that_a_checkpoint_does_not_fill_exactly_are_written_down(
    changes: dict[str, tuple[str, tuple[int, ...]] | None], unfit: dict[str, str]
) -> None:
    given = {name: spec for name, spec in (FP8 | changes).items() if spec is not None}
    specs = {name: TensorSpec(name, *spec) for name, spec in given.items()}
    recording = record(Quantised(), specs, lambda parameter: None)
    assert recording.quantised == {"fused"}
    assert recording.unfit == unfit
    assert recording.without(frozenset(["fused", "gate"])).unfit == {}


def test_a_version_without_a_scale_is_refused_by_its_name() -> None:
    specs = {name: TensorSpec(name, *spec) for name, spec in FP8.items() if name != "up.scale"}
    part = ModelPart(MODEL, SimpleNamespace(quantization="fp8"))
    with pytest.raises(InstallError, match=r"models/m/versions/1 .*: fused\.scale: 1 of its 2 elements"):
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


@pytest.mark.parametrize(("uniform", "turned"), [(False, False), (False, True), (True, False), (True, True)])
def test_scales_of_one_value_prove_no_place_so_they_are_loaded(uniform: bool, turned: bool) -> None:
    source, model = Source(uniform=uniform), Turned()
    inventory.before_loading(model)
    recording = record(model, source.specs, lambda parameter: None)
    model.load_weights(source.tensors.items())
    if turned:
        model.scale.data.copy_(model.scale.flip(1))
    inventory.after_loading(model)
    expected = {
        (piece.tensor, piece.box): digest(
            np.ascontiguousarray(source.arrays[piece.tensor][box_index(piece.box)]), piece.box, source.specs[piece.tensor].shape
        )
        for piece in recording.layout.pieces
    }
    evidence = gather_evidence(model, recording, SimpleNamespace(**vars(source), expected=expected))
    assert bool(decide(recording, evidence).loaded) == (uniform or turned)


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
