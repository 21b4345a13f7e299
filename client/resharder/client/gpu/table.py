"""Packing and unpacking of all tiles of a round at once, by a kernel on a GPU and by numpy on a CPU."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from resharder.client.gpu.schedule import Moves
from resharder.converters.geometry.piece_arrays import Ints

Tensors = Mapping[str, torch.Tensor]
"""Local tensors by name."""
PROGRAMS = 64
"""Programs of a kernel beside NCCL's: fewer than the 132 multiprocessors of an H200, because NCCL's need whole ones."""
Bytes = npt.NDArray[np.uint8]
_WIDEST = 16  # bytes of the widest word, for moves that are aligned to it


def addresses_of(names: Sequence[str], tensors: Tensors, used: Sequence[int]) -> Ints:
    """Return (names, 2): first and end address of each local tensor whose index is in `used`.
    Raises KeyError if one is missing.
    """
    found = np.zeros((len(names), 2), np.int64)
    for i in used:
        tensor = tensors[names[i]]
        elements = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        found[i] = tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()
    return found


def check_fit(moves: Moves, sources: Sequence[str], source: Ints, targets: Sequence[str], target: Ints) -> None:
    """Raise ValueError if a move leaves its local tensor. `source` and `target` are results of `addresses_of`."""
    for names, known, local, at, stride in (
        (sources, source, moves.source, moves.source_at, moves.source_stride),
        (targets, target, moves.target, moves.target_at, moves.target_stride),
    ):
        ends = at + (moves.rows - 1) * stride + moves.width
        inside = local >= 0
        sizes = (known[:, 1] - known[:, 0])[np.where(inside, local, 0)] if len(known) else 0
        wrong = np.flatnonzero(inside & ((ends > sizes) | (at < 0) | (stride < 0)))
        for i in wrong[:1]:
            begin, end = known[local[i]].tolist()
            raise ValueError(f"{names[local[i]]}: expected {ends[i]} bytes of memory, got {end - begin}")


class Table:
    """Moves with addresses, by round and by the width of their words. The address of the slot is given with each call."""

    def __init__(self, moves: Moves, sources: Ints, targets: Ints, device: torch.device, programs: int = PROGRAMS) -> None:
        source, target = _addresses(moves.source, moves.source_at, sources), _addresses(moves.target, moves.target_at, targets)
        several = moves.rows > 1
        strides = np.where(several, moves.source_stride | moves.target_stride, 0)
        word = np.gcd(source | target | moves.width | strides, _WIDEST)
        columns = (moves.rows, moves.width // word, moves.source_stride // word, moves.target_stride // word)
        order = np.lexsort((-word, moves.round))
        self._rows = np.column_stack([source, target, *columns])[order]
        self._device, self._programs = device, programs
        self._parts: dict[int, list[tuple[int, int, int]]] = {}  # round -> (word, first, end)
        keys = np.column_stack([moves.round, word])[order]
        begins = np.flatnonzero((np.diff(keys, axis=0, prepend=-1) != 0).any(axis=1))
        ends = np.append(begins[1:], len(keys))[: len(begins)]
        for first, end in zip(begins.tolist(), ends.tolist(), strict=True):
            self._parts.setdefault(int(keys[first, 0]), []).append((int(keys[first, 1]), first, end))
        self._on_device = torch.from_numpy(self._rows).to(device) if device.type == "cuda" else None

    def compile(self, source_base: int = 0, target_base: int = 0) -> None:
        """Compile the kernels that `run` needs with such bases, which takes a second. Moves nothing."""
        for word in {word for parts in self._parts.values() for word, _, _ in parts}:
            if self._on_device is not None:
                from resharder.client.gpu import move_kernel

                move_kernel.move(self._on_device[:0], word, source_base, target_base, self._programs)

    def run(self, number: int, source_base: int = 0, target_base: int = 0) -> None:
        """Move the tiles of round `number`; on a GPU, on the current stream.

        The bases are addresses of the slot, multiples of 256; 0 for the side without a slot.
        """
        for word, first, end in self._parts.get(number, ()):
            if self._on_device is not None:
                from resharder.client.gpu import move_kernel

                move_kernel.move(self._on_device[first:end], word, source_base, target_base, self._programs)
            else:
                for source, target in _on_host(self._rows[first:end], word, source_base, target_base):
                    np.copyto(target, source)


def _addresses(local: Ints, at: Ints, begins: Ints) -> Ints:
    """Return the addresses of moves.

    `begins` has the address of each local tensor and, as its last entry, that of the buffer of computed elements (-2). Offsets
    in the slot (-1), whose address is not known yet, are returned as they are.
    """
    found: Ints = np.where(local == -1, 0, begins[np.where(local == -2, len(begins) - 1, local)]) + at
    return found


class _ByteRows:
    def __init__(self, address: int, rows: int, width: int, stride: int) -> None:
        self.__array_interface__ = {
            "shape": (rows, width),
            "strides": (stride, 1),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _on_host(rows: Ints, word: int, source_base: int, target_base: int) -> Iterator[tuple[Bytes, Bytes]]:
    for source, target, count, width, source_stride, target_stride in rows.tolist():
        yield (
            np.asarray(_ByteRows(source + source_base, count, width * word, source_stride * word)),
            np.asarray(_ByteRows(target + target_base, count, width * word, target_stride * word)),
        )
