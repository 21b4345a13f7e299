"""Copies of an adapter's tensors into a slot, and out of it again for the proof, in a few kernels for any number of tensors.

Between the tensors and the slot is an image of the slot: its rectangles one after another, each row by row. It is made from the
version, written into the slot, read back, and compared.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from resharder.client.gpu.schedule import Moves
from resharder.client.gpu.table import Table
from resharder.client.gpu.tiles import shape_of, tiles_of
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording.adapter_layout import AdapterLayout
from resharder.converters.geometry.copy_table import Copies
from resharder.converters.geometry.piece_arrays import Ints

Tensors = Mapping[str, torch.Tensor]
_ALIGN = 16  # bytes; the widest word of the kernel
_GIVEN = -1  # number of the memory whose address is given with each copy


class TensorPlace(NamedTuple):
    """Where a tensor of a version is, and how the engine keeps it."""

    memory: int
    """Number of the memory among those given to `SlotCopy.image`."""
    offset: int
    """Offset in it, in elements."""
    scale: float
    """Factor by which the engine multiplies the tensor."""


class _Side(NamedTuple):
    """One side of copies: the number of each one's memory, its offset in that, and the strides of rows and columns, in bytes."""

    memory: Ints
    at: Ints
    strides: Ints  # (copies, 2)


class SlotCopy:
    """Copies for adapters of one layout, planned once.

    Args:
        layout: Where the tensors' elements lie in a slot.
        places: Place of each tensor, by name.
        marks: Value of each mark: single elements of a slot beside its buffers, such as whether it has experts.
        dtype: Dtype of the buffers.
        device: Device of the slots and the versions' tensors.
    """

    def __init__(
        self, layout: AdapterLayout, places: Mapping[str, TensorPlace], marks: Tensors, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device, item = dtype, device, dtype.itemsize
        rectangles, rests = sorted(layout.rectangles, key=lambda each: places[each.tensor].scale), layout.rests()
        self._buffers = [each.buffer for each in rectangles] + list(marks) + [each.buffer for each in rests]
        self._corners = [(*each.matrix, 0, 0) for each in rectangles] + [(0, 0)] * len(marks) + [each.corner for each in rests]
        sizes = [(each.rows, each.columns, item) for each in rectangles]
        sizes += [(1, 1, mark.element_size()) for mark in marks.values()] + [(each.rows, each.columns, item) for each in rests]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 3)
        self._at = np.cumsum([0, *(-(-self._sizes.prod(axis=1) // _ALIGN) * _ALIGN).tolist()])
        scaled, filled = len(rectangles), len(rectangles) + len(marks)
        self._filled = int(self._at[filled])  # bytes of an image; then zeros, of which each part of the rest is a copy
        self._zeros = int(self._sizes[filled:].prod(axis=1).max(initial=0))
        self._scales = [
            (scale, int(self._at[each[0]]) // item, int(self._at[each[-1] + 1]) // item)
            for scale, found in groupby(range(scaled), lambda i: places[rectangles[i].tensor].scale)
            if scale != 1 and (each := list(found))
        ]
        self._marks = torch.zeros(self._filled - int(self._at[scaled]), dtype=torch.uint8)
        for mark, at in zip(marks.values(), (self._at[scaled:filled] - self._at[scaled]).tolist(), strict=True):
            self._marks[at : at + mark.element_size()] = mark.detach().cpu().view(-1).view(torch.uint8)
        self._marks = self._marks.to(device)

        memory = np.array([places[each.tensor].memory for each in rectangles], np.int64)
        source = np.array([places[each.tensor].offset + each.offset for each in rectangles], np.int64) * item
        steps = np.array([each.steps for each in rectangles], np.int64).reshape(-1, 2) * item
        given = np.full(scaled, _GIVEN)
        made = _moves(self._sizes[:scaled], _Side(given, source, steps), self._packed(self._at[:scaled]))
        nowhere = np.zeros(1, np.int64)
        self._gather = Table(made.moves._replace(round=memory[made.copy]), nowhere, nowhere, device)
        self._slots: dict[int, tuple[list[int], Table, Table]] = {}

    def image(self, memories: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the image of a version: uint8, on the device, after the current stream's pending work.

        Args:
            memories: Contiguous memories with the version's tensors, in the slots' dtype, on the device.
        """
        image = torch.zeros(self._filled + self._zeros, dtype=torch.uint8, device=self._device)
        for number, memory in enumerate(memories):
            self._gather.run(number, memory.data_ptr(), image.data_ptr())
        image[self._filled - len(self._marks) : self._filled] = self._marks
        for scale, first, end in self._scales:
            image[: end * self._dtype.itemsize].view(self._dtype)[first:end].mul_(scale)
        return image

    def write(self, slot: int, memory: Tensors, image: torch.Tensor) -> None:
        """Write an image into a slot, and zeros where it has nothing.

        Args:
            slot: Number of the slot.
            memory: Buffers and marks of the slot, by name.
            image: Result of `image`.

        Raises:
            InstallError: The slot has other buffers than the layout.
        """
        self._tables(slot, memory)[0].run(0, source_base=image.data_ptr())

    def differences(self, slot: int, memory: Tensors, image: torch.Tensor) -> list[str]:
        """Return the buffers and marks of a slot that do not contain an image, and zeros elsewhere, bit for bit.

        Args and errors are those of `write`.
        """
        found = torch.zeros(int(self._at[-1]), dtype=torch.uint8, device=self._device)
        self._tables(slot, memory)[1].run(0, target_base=found.data_ptr())
        wrong = torch.cat([found[: self._filled] != image[: self._filled], found[self._filled :] != 0])
        if not wrong.any():
            return []
        places = torch.nonzero(wrong).view(-1).cpu().numpy()
        return sorted({self._buffers[i] for i in np.unique(np.searchsorted(self._at, places, side="right") - 1).tolist()})

    def _packed(self, at: Ints) -> _Side:
        """Return the side of the first parts in an image, which has them row by row."""
        columns, item = self._sizes[: len(at), 1], self._sizes[: len(at), 2]
        return _Side(np.full(len(at), _GIVEN), at, np.column_stack([columns * item, item]))

    def _tables(self, slot: int, memory: Tensors) -> tuple[Table, Table]:
        """Return the copies of an image into a slot, and of the slot into what is compared with the image."""
        addresses = [tensor.data_ptr() for tensor in memory.values()]
        known = self._slots.get(slot)
        if known is not None and known[0] == addresses:
            return known[1:]
        if missing := set(self._buffers) - memory.keys():
            raise InstallError(f"the engine's slots for adapters have changed: {sorted(missing)[0]} is gone; restart the server")
        if odd := [name for name in self._buffers if memory[name].stride(-1) != 1]:
            raise InstallError(f"cannot write adapters into this engine: the columns of {odd[0]} are not contiguous")
        number = {name: i for i, name in enumerate(memory)}
        at, strides = [], []
        for name, corner in zip(self._buffers, self._corners, strict=True):
            stride = memory[name].stride()
            at.append(sum(i * step for i, step in zip(corner, stride, strict=True)))
            strides.append(stride[-2:])
        item = self._sizes[:, 2]
        slots = np.array([number[name] for name in self._buffers], np.int64)
        there = _Side(slots, np.array(at, np.int64) * item, np.array(strides, np.int64).reshape(-1, 2) * item[:, None])
        begins = np.array([*addresses, 0], np.int64)
        image = self._packed(np.minimum(self._at[:-1], self._filled))
        tables = (
            Table(_moves(self._sizes, image, there).moves, begins, begins, self._device),
            Table(_moves(self._sizes, there, self._packed(self._at[:-1])).moves, begins, begins, self._device),
        )
        self._slots[slot] = addresses, *tables
        return tables


class _Made(NamedTuple):
    moves: Moves
    copy: Ints
    """Number of the copy of each move."""


def _moves(sizes: Ints, source: _Side, target: _Side) -> _Made:
    """Return the moves of copies.

    Args:
        sizes: (copies, 3): rows, columns, and bytes of an element.
        source: Where they are read.
        target: Where they are written.
    """
    nothing = np.zeros(len(sizes), np.int64)
    copies = Copies(
        (),
        (),
        nothing,
        nothing,
        source.memory,
        target.memory,
        source.at,
        target.at,
        sizes[:, :2],
        source.strides,
        target.strides,
        sizes[:, 2],
        np.zeros(len(sizes)),
        np.zeros(len(sizes), np.bool_),
    )
    tiles = tiles_of(shape_of(copies), source.at, target.at)
    moves = Moves(
        np.zeros(len(tiles.box), np.int64),
        source.memory[tiles.box],
        tiles.source,
        tiles.source_stride,
        target.memory[tiles.box],
        tiles.target,
        tiles.target_stride,
        tiles.rows,
        tiles.width,
    )
    return _Made(moves, tiles.box)
