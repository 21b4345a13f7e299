"""Where an engine puts the elements of an adapter's tensors, learnt from the engine itself.

Nobody writes down how an engine packs, cuts and pads adapters for its layers. `learn` has it load tensors of the adapter's names
and shapes whose elements are numbered, and reads in its slot which element arrived where. A number is written digit by digit, in
base 256, because BF16 has every integer up to 256. What arrives must be rectangles of evenly spaced elements, with zeros around
them; anything else is refused.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from resharder.client.inference.engine import InstallError

Shapes = Mapping[str, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]
_BASE = 256


class Rectangle(NamedTuple):
    """Evenly spaced elements of one tensor in the first rows and columns of a matrix of the slot, whose rest is zero."""

    buffer: str
    matrix: tuple[int, ...]
    """Position of the matrix: all dimensions of the slot's part of the buffer but the last two."""
    rows: int
    columns: int
    tensor: str
    offset: int
    """Offset in the tensor of the first element, in elements. The next row and the next column are `steps` further."""
    steps: tuple[int, int]


class Rest(NamedTuple):
    """A part of a matrix of the slot that no rectangle fills."""

    buffer: str
    corner: tuple[int, ...]
    """Position of its first element."""
    rows: int
    columns: int


@dataclass(frozen=True)
class AdapterLayout:
    """Where the tensors of adapters of one shape lie in a slot of this worker."""

    rectangles: tuple[Rectangle, ...]
    buffers: Mapping[str, tuple[int, ...]]
    """Shape of the slot's part of each buffer."""

    def rests(self) -> list["Rest"]:
        """Return the parts of a slot that no rectangle fills."""
        filled = {(each.buffer, each.matrix): (each.rows, each.columns) for each in self.rectangles}
        found = []
        for buffer, shape in self.buffers.items():
            for matrix in np.ndindex(shape[:-2]):
                rows, columns = filled.get((buffer, matrix), (0, 0))
                found.append(Rest(buffer, (*matrix, 0, columns), rows, shape[-1] - columns))
                found.append(Rest(buffer, (*matrix, rows, 0), shape[-2] - rows, shape[-1]))
        return [rest for rest in found if rest.rows and rest.columns]

    def elements(self) -> dict[str, int]:
        """Return how many elements of each tensor the slot holds; copies of one element count each."""
        found: dict[str, int] = {}
        for rectangle in self.rectangles:
            found[rectangle.tensor] = found.get(rectangle.tensor, 0) + rectangle.rows * rectangle.columns
        return found


def learn(shapes: Shapes, write: Callable[[Tensors], None], read: Callable[[], Tensors]) -> AdapterLayout:
    """Learn where adapters of these shapes lie in a slot.

    Args:
        shapes: Shape of each tensor, by name.
        write: Has the engine load float32 tensors into the slot, without scaling them.
        read: Returns the slot's part of each buffer, in the engine's dtype, on any device.

    Raises:
        InstallError: What arrives is not made of rectangles, so that it could not be proven.
    """
    starts = dict(zip(shapes, np.cumsum([1, *map(prod, shapes.values())]).tolist(), strict=False))
    end = 1 + sum(map(prod, shapes.values()))
    numbers: dict[str, npt.NDArray[np.int64]] = {}
    for place in range(max(1, (end - 1).bit_length() + 7 >> 3)):
        write({name: _digits(starts[name], shape, place) for name, shape in shapes.items()})
        for name, part in read().items():
            digits = part.detach().to("cpu", torch.int64).numpy()
            numbers[name] = numbers[name] + (digits << 8 * place) if place else digits
    names, first = list(starts), list(starts.values())
    rectangles = []
    for buffer, found in numbers.items():
        for index in np.ndindex(found.shape[:-2]):
            rectangle = _rectangle(buffer, index, found[index], names, first)
            if rectangle is None:
                continue
            ends = (rectangle.rows - 1) * rectangle.steps[0] + (rectangle.columns - 1) * rectangle.steps[1]
            if rectangle.offset + ends >= prod(shapes[rectangle.tensor]):
                raise _unknown(buffer, index)
            rectangles.append(rectangle)
    return AdapterLayout(tuple(rectangles), {name: found.shape for name, found in numbers.items()})


def _digits(start: int, shape: tuple[int, ...], place: int) -> torch.Tensor:
    numbers = torch.arange(start, start + prod(shape), dtype=torch.int64)
    return (numbers >> 8 * place).remainder_(_BASE).to(torch.float32).reshape(shape)


def _rectangle(
    buffer: str, index: tuple[int, ...], found: npt.NDArray[np.int64], names: list[str], first: list[int]
) -> Rectangle | None:
    rows, columns = int(np.count_nonzero(found[:, 0])), int(np.count_nonzero(found[0]))
    if not rows or not columns:
        if np.any(found):
            raise _unknown(buffer, index)
        return None
    start = int(found[0, 0])
    steps = int(found[1, 0]) - start if rows > 1 else 0, int(found[0, 1]) - start if columns > 1 else 0
    regular = start + steps[0] * np.arange(rows)[:, None] + steps[1] * np.arange(columns)
    filled = np.zeros_like(found)
    filled[:rows, :columns] = regular
    if min(steps) < 0 or not np.array_equal(found, filled):
        raise _unknown(buffer, index)
    name = bisect_right(first, start) - 1
    return Rectangle(buffer, index, rows, columns, names[name], start - first[name], steps)


def _unknown(buffer: str, index: tuple[int, ...]) -> InstallError:
    where = f"{buffer}{list(index)}" if index else buffer
    return InstallError(f"cannot prove adapters in this engine: it puts their elements into {where} in no order that is known")
