"""Tables of tiles, for kernels that measure and cast all pieces of a rank at once.

A tile is the part of a block that one piece has; by channel, a part of a piece with several rows, each of which has a maximum of
its own. Columns of its row in a table:

    0 number of the local tensor      4 rows
    1 first element in it             5 number of maxima from one row to the next << 32 | columns
    2 stride of rows, in elements     6 first element among the cast weights
    3 stride of columns               7 number of its first maximum among the rank's << 32 | columns of the piece
"""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from resharder.converters.geometry.layout import Range
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.quantization.blocks import runs_of
from resharder.converters.quantization.layout import CastPiece, Matrix, QuantisedLayout
from resharder.converters.quantization.scheme import BLOCK, Block

_CHANNEL_TILE: Block = (32, 512)
_CAPABILITY = (8, 9)
"""First NVIDIA GPUs that convert to FP8."""


def is_supported(plan: QuantisedLayout, device: torch.device) -> bool:
    """Return whether the kernels can cast these matrices on a device."""
    plain = not any(part.source.plus for matrix in plan.matrices for part in matrix.pieces)
    return plain and device.type == "cuda" and torch.cuda.get_device_capability(device) >= _CAPABILITY


class CastTiles:
    """Tiles of all pieces of a rank's matrices, by the dtype of their elements."""

    def __init__(self, plan: QuantisedLayout, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Make the tables.

        Args:
            plan: The rank's layout.
            tensors: Its local tensors.
            device: Device that has them.
        """
        self._names = sorted({part.source.local for matrix in plan.matrices for part in matrix.pieces})
        self._tensors, self._device = tensors, device
        self._channels = any(matrix.region.block != BLOCK for matrix in plan.matrices)
        self._tile = _CHANNEL_TILE if self._channels else BLOCK
        numbers = {name: number for number, name in enumerate(self._names)}
        found: dict[tuple[torch.dtype, bool], list[Ints]] = defaultdict(list)
        for matrix in plan.matrices:
            for part in matrix.pieces:
                kind, local = tensors[part.source.local].dtype, numbers[part.source.local]
                rows = tiles_of(matrix, part, local)
                aligned = _is_aligned(rows, self._tile, torch.finfo(kind).bits // 8)
                for which in (True, False):
                    found[kind, which].append(rows[aligned == which])
        self._tables = {
            key: torch.from_numpy(np.concatenate(tables)).to(device) for key, tables in found.items() if sum(map(len, tables))
        }

    def _launches(self) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.dtype, bool]]]:
        """Return the addresses of the local tensors, which may have moved, and the tables with their dtype and alignment."""
        addresses = [self._tensors[name].data_ptr() for name in self._names]
        even = all(address % 16 == 0 for address in addresses)
        bases = torch.tensor(addresses, dtype=torch.int64).to(self._device)
        return bases, [(table, kind, aligned and even) for (kind, aligned), table in self._tables.items()]

    def _on_device(self) -> AbstractContextManager[Any]:
        """Return the context in which kernels are launched on the tensors' device, whichever GPU is the thread's current one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def measure(self, maxima: torch.Tensor) -> None:
        """Raise the maxima of blocks to the largest absolute values of their elements, on the current stream."""
        from resharder.converters.quantization.kernels import measure

        bases, launches = self._launches()
        with self._on_device():
            for table, kind, aligned in launches:
                measure(table, bases, maxima, kind, self._tile, aligned=aligned, channels=self._channels)

    def cast(self, factors: torch.Tensor, weights: torch.Tensor) -> None:
        """Cast all elements into `weights`, with the factors of their blocks, on the current stream."""
        from resharder.converters.quantization.kernels import cast

        bases, launches = self._launches()
        with self._on_device():
            for table, kind, aligned in launches:
                cast(table, bases, factors, weights, kind, self._tile, aligned=aligned, channels=self._channels)


def tiles_of(matrix: Matrix, part: CastPiece, local: int) -> Ints:
    """Return the tiles of a piece in the local tensor of number `local`: int64, (tiles, 8)."""
    piece, region, step = part.source, matrix.region, 0
    if region.block == BLOCK:
        rows, columns = (_parts(r, size) for r, size in zip(piece.box, region.block, strict=True))
    else:
        step, (rows, columns) = piece.box[0].step, (_cut(r, n) for r, n in zip(piece.box, _CHANNEL_TILE, strict=True))
        columns[0] = 0  # a channel is one block
    rows, columns, width = rows[:, :, None], columns[:, None, :], piece.box[1].count
    made = np.empty((rows.shape[1], columns.shape[2], 8), np.int64)
    made[..., 0] = local
    made[..., 1] = piece.offset + rows[1] * piece.strides[0] + columns[1] * piece.strides[1]
    made[..., 2], made[..., 3] = piece.strides
    made[..., 4], made[..., 5] = rows[2], step << 32 | columns[2]
    made[..., 6] = part.at + rows[1] * width + columns[1]
    block = (rows[0] - region.first[0]) * region.shape[1] + columns[0] - region.first[1]
    made[..., 7] = (matrix.maxima_at + block) << 32 | width
    return made.reshape(-1, 8)


def _parts(r: Range, size: int) -> Ints:
    """Return the block of each part of a range, its first element in the range, and its number of elements: (3, parts)."""
    found = [(run.block + i, run.at + i * run.length, run.length) for run in runs_of(r, size) for i in range(run.blocks)]
    return np.array(found, np.int64).T


def _cut(r: Range, size: int) -> Ints:
    """Return the first index of each part of at most `size` elements, its first element, and its number: (3, parts)."""
    at = np.arange(0, r.count, size)
    return np.stack([r.start + at * r.step, at, np.minimum(size, r.count - at)])


def _is_aligned(tiles: Ints, tile: Block, size: int) -> npt.NDArray[np.bool_]:
    """Return which tiles are whole, with contiguous rows that begin at multiples of 16 bytes."""
    sources, target, width = tiles[:, 1:3], tiles[:, 6], tiles[:, 7] & 0x7FFFFFFF
    even = (sources % max(8, 16 // size) == 0).all(1) & (target % 16 == 0) & (width % 16 == 0)
    aligned: npt.NDArray[np.bool_] = even & ((tiles[:, 4:6] & 0x7FFFFFFF) == tile).all(1) & (tiles[:, 3] == 1)
    return aligned
