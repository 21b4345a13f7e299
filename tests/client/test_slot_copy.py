"""Copies of adapters into slots: what arrives, what is compared, and what is noticed."""

from math import prod

import pytest
import torch
from resharder.client.inference.recording.adapter_layout import AdapterLayout, Rectangle, learn
from resharder.client.inference.worker.slot_copy import SlotCopy, TensorPlace

SHAPES = {"a": (2, 12), "b": (10, 2), "e": (3, 8)}
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


class Slots:
    """Slots of an engine: A as it is, B in halves, an expert's tensor transposed, and a mark."""

    def __init__(self, device: str) -> None:
        self.stacked = {
            "a": torch.full((2, 1, 4, 12), 7.0, dtype=torch.bfloat16, device=device),
            "b0": torch.full((2, 1, 5, 4), 7.0, dtype=torch.bfloat16, device=device),
            "b1": torch.full((2, 1, 5, 4), 7.0, dtype=torch.bfloat16, device=device),
            "e": torch.full((2, 3, 8, 4), 7.0, dtype=torch.bfloat16, device=device),
        }
        self.enabled = torch.zeros(3, dtype=torch.int32, device=device)

    def set(self, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        for stacked in self.stacked.values():
            stacked[slot] = 0
        self.stacked["a"][slot, 0, :2] = tensors["a"]
        self.stacked["b0"][slot, 0, :, :2] = tensors["b"][:5]
        self.stacked["b1"][slot, 0, :, :2] = tensors["b"][5:]
        self.stacked["e"][slot, 1, :, :3] = tensors["e"].T
        self.enabled[slot] = 1

    def read(self, slot: int) -> dict[str, torch.Tensor]:
        return {name: stacked[slot] for name, stacked in self.stacked.items()}

    def marks(self, slot: int) -> dict[str, torch.Tensor]:
        return {"enabled": self.enabled[slot : slot + 1].view(1, 1)}


def copy_of(slots: Slots, device: str) -> tuple[SlotCopy, AdapterLayout]:
    layout = learn(SHAPES, lambda tensors: slots.set(0, dict(tensors)), lambda: slots.read(0))
    places, at = {}, 0
    for name, shape in SHAPES.items():
        places[name] = TensorPlace(int(name == "e"), 0 if name == "e" else at, 2.5 if name == "b" else 1.0)
        at += prod(shape)
    return SlotCopy(layout, places, slots.marks(0), torch.bfloat16, torch.device(device)), layout


def version(seed: int, device: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=draw).bfloat16().to(device) for name, shape in SHAPES.items()}
    return tensors, [torch.cat([tensors["a"].view(-1), tensors["b"].view(-1)]), tensors["e"].view(-1).clone()]


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_what_the_engine_writes(device: str) -> None:
    slots, engine = Slots(device), Slots(device)
    copy, _ = copy_of(slots, device)
    tensors, memories = version(1, device)
    engine.set(1, tensors | {"b": tensors["b"] * 2.5})
    image = copy.image(memories)
    memory = slots.read(1) | slots.marks(1)
    assert copy.differences(1, memory, image) == ["a", "b0", "b1", "e", "enabled"]
    copy.write(1, memory, image)
    assert all(torch.equal(slots.stacked[name][1], engine.stacked[name][1]) for name in slots.stacked)
    assert slots.enabled.tolist() == [1, 1, 0]
    assert copy.differences(1, memory, image) == []
    assert copy.differences(1, engine.read(1) | engine.marks(1), image) == [], "of the engine's own writing, at other addresses"


@pytest.mark.parametrize("device", DEVICES)
def test_every_changed_element_is_noticed(device: str) -> None:
    slots = Slots(device)
    copy, _ = copy_of(slots, device)
    image = copy.image(version(2, device)[1])
    memory = slots.read(1) | slots.marks(1)
    copy.write(1, memory, image)
    for name, tensor in memory.items():
        bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        for place in range(tensor.numel()):
            index = torch.unravel_index(torch.tensor(place), tensor.shape)
            bits[index] ^= 1
            assert copy.differences(1, memory, image) == [name], (name, place)
            bits[index] ^= 1
    assert copy.differences(1, memory, image) == []


def test_the_rest_of_a_slot_is_what_no_rectangle_fills() -> None:
    _, layout = copy_of(Slots("cpu"), "cpu")
    for buffer, shape in layout.buffers.items():
        filled = torch.zeros(shape, dtype=torch.int64)
        for rectangle in layout.rectangles:
            if rectangle.buffer == buffer:
                filled[rectangle.matrix][: rectangle.rows, : rectangle.columns] += 1
        for rest in layout.rests():
            if rest.buffer == buffer:
                *matrix, row, column = rest.corner
                filled[tuple(matrix)][row : row + rest.rows, column : column + rest.columns] += 1
        assert torch.equal(filled, torch.ones(shape, dtype=torch.int64)), buffer


def test_an_adapter_of_which_the_worker_has_nothing() -> None:
    layout = AdapterLayout(tuple[Rectangle, ...](), {"a": (1, 4, 12)})
    slots = Slots("cpu")
    copy = SlotCopy(layout, {}, {}, torch.bfloat16, torch.device("cpu"))
    image = copy.image([])
    memory = {"a": slots.read(0)["a"]}
    assert copy.differences(0, memory, image) == ["a"]
    copy.write(0, memory, image)
    assert copy.differences(0, memory, image) == []
    assert not slots.stacked["a"][0].any()
    assert slots.stacked["a"][1].all()
