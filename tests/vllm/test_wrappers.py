"""Modules under wrappers of adapters, in models that need no engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import adapter_tensors
from resharder.client.inference.recording.recorder import Local, Recording
from resharder.client.inference.recording.wrappers import named_modules, without_wrappers, wrappers
from resharder.client.inference.worker.routing import gather_evidence
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.storage.digest import digest_torch


class Wrapper(torch.nn.Module):
    """As `BaseLayerWithLoRA` in vLLM's lora/layers/base.py."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_a_stacked = (torch.ones(3),)
        self.register_buffer("enabled", torch.zeros(2))


class Method:
    """A quantisation method that is no module, as that of FP8 experts, with a tensor of its own."""

    def __init__(self) -> None:
        self.scales = torch.ones(5)


class ModularMethod(torch.nn.Module):
    """As `FusedMoEModularMethod`, which stands in for the method of experts that have adapters."""

    def __init__(self, old_quant_method: Any) -> None:
        super().__init__()
        self.old_quant_method = old_quant_method


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.quant_method: Any = Method()
        self.lora_base_layer_prefix = ""


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(2, 2)
        self.experts = torch.nn.Sequential(Experts(), self.gate)  # the gate has two paths, as in MoE runners


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])


def wrap(model: Model) -> None:
    """Wrap the layers as vLLM does: one wrapper for both paths of a gate, and one around all experts."""
    for layer in model.layers:
        wrapper = Wrapper(layer.gate)
        layer.gate, layer.experts[1] = wrapper, wrapper
        experts = layer.experts[0]
        experts.lora_base_layer_prefix = "base_layer."
        method = experts.quant_method
        del experts.quant_method
        experts.quant_method = ModularMethod(method)
        layer.experts = Wrapper(layer.experts)
    model.lora_manager = {"adapters": torch.ones(7)}


@pytest.fixture
def model() -> Model:
    made = Model()
    wrap(made)
    return made


def test_the_base_has_the_names_that_it_had_before_it_was_wrapped() -> None:
    model = Model()
    modules = [list(named_modules(model, remove_duplicate=duplicates)) for duplicates in (True, False)]
    assert modules == [list(model.named_modules(remove_duplicate=duplicates)) for duplicates in (True, False)]
    paths = [(f.path, f.module, id(f.tensor)) for f in inventory.reachable(model)]
    assert "layers.0.experts.0.quant_method.scales" in [path for path, *_ in paths]
    wrap(model)
    assert [list(named_modules(model, remove_duplicate=duplicates)) for duplicates in (True, False)] == modules
    assert [(f.path, f.module, id(f.tensor)) for f in inventory.reachable(model)] == paths


def seen(model: Model) -> list[object]:
    """What a loader sees of a model."""
    experts = model.layers[0].experts
    inner = experts.base_layer[0] if isinstance(experts, Wrapper) else experts[0]
    modules = [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)]
    return [*modules, type(inner.quant_method), inner.lora_base_layer_prefix]


def test_without_wrappers_a_loader_sees_the_plain_model_and_they_are_back_after_its_error(model: Model) -> None:
    before, found = list(model.named_modules(remove_duplicate=False)), list[object]()

    def load() -> None:
        with without_wrappers(model):
            found.extend(seen(model))
            raise ValueError("a loader's")

    with pytest.raises(ValueError, match="a loader's"):
        load()
    assert found == seen(Model())
    assert list(model.named_modules(remove_duplicate=False)) == before
    assert seen(model)[-2:] == [ModularMethod, "base_layer."]


def test_the_tensors_of_adapters_are_those_of_the_wrappers_alone(model: Model) -> None:
    assert len(wrappers(model)) == 6
    assert sorted(tensor.numel() for tensor in adapter_tensors(model)) == [2, 2, 2, 2, 3, 3, 3, 3]
    assert adapter_tensors(Model()) == []


def test_what_loading_made_of_the_weights_of_wrapped_experts_is_derived_from_them() -> None:
    model = Model().requires_grad_(False)
    inventory.before_loading(model)
    for layer in model.layers:
        layer.experts[0].quant_method.scales = torch.full((5,), 2.0)
    inventory.after_loading(model)
    spec, path = TensorSpec("w", "F32", (4,)), "layers.1.experts.0"
    piece, local = Piece("w", full_box((4,)), f"{path}.weight", 0, (1,)), Local((4,), (1,), torch.float32, (path,))
    other = Local((4,), (1,), torch.float32, ("layers.0.experts.0",))
    locals_ = {f"{path}.weight": local, "layers.0.experts.0.weight": other}
    reads = {"w": frozenset(locals_)}
    recording = Recording(Layout({"w": spec}, (piece, piece._replace(local="layers.0.experts.0.weight"))), locals_, reads, {})
    digest = digest_torch(torch.ones(4), full_box((4,)), (4,))
    source: Any = SimpleNamespace(specs={"w": spec}, expected={("w", full_box((4,))): digest})
    gates = frozenset({"layers.0.gate", "layers.1.gate"})
    plain = gather_evidence(model, recording, source, gates)
    assert plain.derived == {path: {path}, "layers.0.experts.0": {"layers.0.experts.0"}}
    wrap(model)
    assert gather_evidence(model, recording, source, gates) == plain


def test_a_method_that_was_replaced_without_adapters_stays_replaced() -> None:
    model = Model()
    for layer in model.layers:
        method = layer.experts[0].quant_method
        del layer.experts[0].quant_method
        layer.experts[0].quant_method = ModularMethod(method)
    before = list(model.named_modules())
    assert list(named_modules(model)) == before
    with without_wrappers(model):
        assert list(model.named_modules()) == before
