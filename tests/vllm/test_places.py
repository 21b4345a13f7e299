"""A reload of a small module: kernels' objects read the tensors from before, and what cannot be put back is known."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import memory_of, sealed_modules


@dataclass(frozen=True)
class Frozen:
    scale: Any


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Owner(torch.nn.Module):
    """A module that no module of the model owns."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)


def closure(scale: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: scale


KERNELS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (Frozen, lambda kernel: kernel.scale),
    "slots": (Slotted, lambda kernel: kernel.scale),
    "closure": (closure, lambda kernel: kernel()),
    "list in a dictionary": (lambda scale: {"scales": [scale]}, lambda kernel: kernel["scales"][0]),
    "tuple": (lambda scale: (scale, scale[:1]), lambda kernel: torch.cat([kernel[1], kernel[0][1:]])),
    "named tuple": (lambda scale: Pair(scale, scale), lambda kernel: kernel.second),
    "keyword of a partial": (lambda scale: partial(torch.mul, other=scale), lambda kernel: kernel.keywords["other"]),
    "module of its own": (lambda scale: [Owner(scale)], lambda kernel: kernel[0].scale),
    "module of the model": (Owner, lambda kernel: kernel.scale),
    "deep in objects": (
        lambda scale: Frozen([Slotted([Frozen([Slotted(scale)])])]),
        lambda k: k.scale[0].scale[0].scale[0].scale,
    ),
    "view": (lambda scale: Frozen(scale.view(2, 2)), lambda kernel: kernel.scale.view(4)),
}
IMMUTABLE: dict[str, Callable[[torch.Tensor], Any]] = {
    "argument of a partial": lambda scale: partial(torch.mul, scale),
    "set": lambda scale: frozenset([scale]),
}
DERIVED: dict[str, Callable[[torch.Tensor], Any]] = {"reciprocal": lambda scale: Frozen(1 / scale), "copy": lambda s: [s.clone()]}


class Layer(torch.nn.Module):
    """A layer whose reload creates a kernel around new tensors, as vLLM's layerwise reload does."""

    def __init__(self, kernel: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
        self.kind = kernel
        self.kernel: Any = None

    def load(self, scale: torch.Tensor) -> None:
        kept = self._parameters["scale"]
        self._parameters["scale"] = torch.nn.Parameter(scale.clone(), requires_grad=False)
        self.kernel = self.kind(self.scale)
        if kept is not None:
            kept.data.copy_(self.scale)
        self._parameters["scale"] = kept


def loaded(kernel: Callable[[torch.Tensor], Any]) -> tuple[torch.nn.Module, Layer]:
    """A model that vLLM loaded: its kernel has the parameter itself."""
    layer = Layer(kernel)
    model = torch.nn.Sequential(layer)
    inventory.before_loading(model)
    layer.scale.data.copy_(torch.arange(4.0))
    layer.kernel = kernel(layer.scale)
    inventory.after_loading(model)
    return model, layer


def reload(model: torch.nn.Module, layer: Layer) -> None:
    with inventory.observed_reload(model):
        layer.load(torch.full((4,), 2.0))


@pytest.mark.parametrize("kind", KERNELS)
def test_after_a_reload_a_kernel_reads_the_memory_of_the_parameter(kind: str) -> None:
    kernel, read = KERNELS[kind]
    model, layer = loaded(kernel)
    reload(model, layer)
    assert read(layer.kernel).tolist() == [2.0] * 4
    layer.scale.data.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))  # an install of boxes
    assert read(layer.kernel).tolist() == [5.0, 6.0, 7.0, 8.0]
    apart = [f.path for f in inventory.reachable(model) if memory_of(f.tensor) != memory_of(layer.scale)]
    assert apart == []


@pytest.mark.parametrize("kind", [*IMMUTABLE, *DERIVED])
def test_a_tensor_that_a_reload_leaves_apart_from_its_parameter_counts_as_made_by_loading(kind: str) -> None:
    model, layer = loaded((IMMUTABLE | DERIVED)[kind])
    reload(model, layer)
    made = inventory.NOTES[model].made
    assert set(made.values()) == {"0"}
    apart = {f.path for f in inventory.reachable(model) if memory_of(f.tensor) != memory_of(layer.scale)}
    assert made.keys() == apart != set()


def test_a_parameter_that_a_reload_gives_other_memory_has_its_own_again_with_the_new_values() -> None:
    """As `replace_parameter` of vLLM 0.33 does; a CUDA graph reads the memory from before."""
    model, layer = loaded(Frozen)
    graph = layer.scale.data
    with inventory.observed_reload(model):
        layer.scale.data = torch.full((4,), 2.0)
    assert graph.tolist() == [2.0] * 4
    assert layer.scale.data_ptr() == graph.data_ptr() == layer.kernel.scale.data_ptr()


def test_a_parameter_that_vllm_replaces_by_one_of_another_stride_keeps_the_memory_that_graphs_read() -> None:
    utils = pytest.importorskip("vllm.model_executor.utils")
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    values = torch.arange(16.0).view(4, 4).t()
    before = layer.weight
    graph = before.data
    with inventory.observed_reload(layer):
        utils.replace_parameter(layer, "weight", values)
    if layer.weight is before:  # since 0.33
        assert layer.weight.data_ptr() == graph.data_ptr()
        assert torch.equal(graph, values)
    assert torch.equal(layer.weight, values)


def test_a_reload_that_changes_the_shape_of_a_kernels_tensor_is_refused() -> None:
    shapes = iter([4, 4, 2])
    model, layer = loaded(lambda scale: Frozen(scale[: next(shapes)]))
    reload(model, layer)
    with pytest.raises(ValueError, match=r"0\.kernel\.scale was torch\.float32 \(4,\)"):
        reload(model, layer)


def test_objects_are_searched_once_on_the_shortest_way() -> None:
    model = torch.nn.Module()
    shared = Frozen(torch.ones(2))
    model.first, model.second = [[[[shared]]]], shared  # type: ignore[assignment]
    model.loop = [model]  # type: ignore[assignment]
    assert [found.path for found in inventory.reachable(model)] == ["second.scale"]


def test_a_module_with_an_object_of_c_plus_plus_is_known() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert sealed_modules(model) == frozenset()
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    model[1].kernel = [Frozen(torch.ops.quantized.linear_prepack(weight, None))]  # type: ignore[assignment]
    assert sealed_modules(model) == {"1"}
