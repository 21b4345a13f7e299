"""Cast of a rank's matrices to FP8, in blocks or by channel, on the device that has them.

    scale    = max(amax, 1e-4) / 448          amax: largest absolute value of the block, in float32
    weight   = float8_e4m3fn(clamp(float32(w) * (1 / scale), -448, 448))

This is vLLM's `per_block_cast_to_fp8` (vllm/utils/deep_gemm.py), which multiplies by the reciprocal: dividing by the scale
differs in one element of 3,000. All operations are IEEE float32 ones, so the result is the same on every device. A block of
zeros, and a block below 1e-4, has the scale 1e-4 / 448.

Extra memory is bounded: a part of one piece at a time is in float32.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Box, Layout, Piece, Range, TensorSpec, box_shape, full_box
from resharder.converters.models.blockwise import BlockwiseTensors
from resharder.converters.models.tensor_io import TORCH_DTYPES, LookedUp, read_piece
from resharder.converters.quantization.blocks import Region, Run, runs_of
from resharder.converters.quantization.layout import SCALES, WEIGHTS, Matrix, QuantisedLayout, quantised_layout, scale_blocks
from resharder.converters.quantization.scheme import FP8_MAX, Scheme
from resharder.converters.quantization.tiles import CastTiles, is_supported

Floats = npt.NDArray[np.float32]
SMALLEST = 1e-4
"""Smallest `amax` that a scale is made of."""
_PART = 1 << 22  # elements in float32 at a time


class QuantisedTensors:
    """A rank's matrices, cast anew for each version into the same tensors.

    `measure` and `cast` run on the current stream of the tensors' device. Between the two, the ranks exchange maxima.

    Attributes:
        plan: The rank's layout.
        tensors: Local tensors of `plan.layout`: the rank's own, live, and the cast weights and scales.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> None:
        """Allocate the cast weights and scales.

        Args:
            layout: The rank's layout.
            tensors: The rank's own tensors, read anew for each version. With parameters in FP8 blocks, `BlockwiseTensors`.
            scheme: Format to cast to.

        Raises:
            UnsupportedModel: Matrices that cannot be cast, or lie on several devices.
        """
        own = (tensors.blockwise, tensors.parts) if isinstance(tensors, BlockwiseTensors) else ({}, {})
        self.plan: QuantisedLayout = quantised_layout(layout, scheme, *own)
        self._own = tensors
        devices = {tensors[part.source.local].device for matrix in self.plan.matrices for part in matrix.pieces}
        if len(devices) > 1:
            raise UnsupportedModel(
                f"the matrices of a rank are on several devices, {sorted(map(str, devices))}: to cast them, put them on one"
            )
        self._device = devices.pop() if devices else torch.device("cpu")
        self._weights = torch.empty(self.plan.weights, dtype=torch.float8_e4m3fn, device=self._device)
        self._scales = torch.empty(self.plan.scales, dtype=torch.float32, device=self._device)
        self._maxima = torch.zeros(self.plan.maxima, dtype=torch.float32, device=self._device)
        self._scale_blocks = torch.from_numpy(scale_blocks(self.plan)).to(self._device)
        self._tiles = CastTiles(self.plan, tensors, self._device) if is_supported(self.plan, self._device) else None
        made = {WEIGHTS: self._weights, SCALES: self._scales}
        names = dict.fromkeys(piece.local for piece in self.plan.layout.pieces)
        self.tensors = LookedUp(names, lambda name: made[name] if name in made else tensors[name])

    def measure(self) -> Floats:
        """Measure all blocks and return the maxima that the rank contributes, in order.

        Raises:
            UnsupportedModel: A matrix with an infinity or NaN.
        """
        self._allocate()
        self._maxima.zero_()
        if self._tiles is not None:
            self._tiles.measure(self._maxima)
        else:
            for matrix in self.plan.matrices:
                maxima = _region(self._maxima, matrix)
                for part in matrix.pieces:
                    add_maxima(maxima, matrix.region, read_piece(self._own, part.source), part.source.box)
        if not bool(torch.isfinite(self._maxima).all()):
            bad = next(m.spec.name for m in self.plan.matrices if not bool(torch.isfinite(_region(self._maxima, m)).all()))
            raise UnsupportedModel(f"{bad} has an infinity or NaN, which cannot be cast to FP8")
        return self._at(self.plan.contributed.at)

    def _at(self, positions: npt.NDArray[np.int64]) -> Floats:
        found: Floats = self._maxima[torch.from_numpy(positions).to(self._device)].cpu().numpy()
        return found

    def cast(self, received: Floats) -> None:
        """Cast all matrices, with these maxima of the shared blocks that the rank receives, in order."""
        positions = torch.from_numpy(self.plan.received.at).to(self._device)
        self._maxima[positions] = torch.from_numpy(np.asarray(received, np.float32)).to(self._device)
        scales, factors = scales_of(self._maxima)
        self._put_scales(scales)
        if self._tiles is not None:
            self._tiles.cast(factors, self._weights)
            return
        for matrix in self.plan.matrices:
            factor = _region(factors, matrix)
            for part in matrix.pieces:
                shape = box_shape(part.source.box)
                target = self._weights[part.at : part.at + shape[0] * shape[1]].view(shape)
                cast_box(target, read_piece(self._own, part.source), part.source.box, factor, matrix.region)

    def _put_scales(self, scales: torch.Tensor) -> None:
        """Write the scales that the rank delivers, of all blocks that it touches, in the order of the maxima."""
        torch.index_select(scales, 0, self._scale_blocks, out=self._scales)

    def free(self) -> None:
        """Free the GPU memory of the cast weights and scales. `measure` allocates it again, at another address."""
        for tensor in (self._weights, self._scales):
            if tensor.is_cuda:  # torch resizes no host memory that numpy has seen
                tensor.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        for tensor in (self._weights, self._scales):
            if tensor.untyped_storage().nbytes() != (size := tensor.numel() * tensor.element_size()):
                tensor.untyped_storage().resize_(size)


def _region(flat: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    rows, columns = matrix.region.shape
    return flat[matrix.maxima_at : matrix.maxima_at + rows * columns].view(rows, columns)


def scales_of(maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of blocks with these maxima, float32, and the factors by which their elements are multiplied."""
    # A tensor as divisor: on GPUs, torch multiplies by the reciprocal of a number, which rounds differently.
    scales = maxima.clamp(min=SMALLEST) / torch.full_like(maxima, FP8_MAX)
    return scales, torch.ones_like(scales) / scales


class _Part(NamedTuple):
    """Rows `at … at + blocks * length` of a box, `length` in each of `blocks` blocks from number `block` of a region on."""

    block: int
    at: int
    blocks: int
    length: int


def _row_parts(rows: Range, columns: int, region: Region) -> Iterator[_Part]:
    low = region.first[0]
    for run in runs_of(rows, region.block[0]):
        step = max(1, _PART // max(1, run.length * columns))
        for i in range(0, run.blocks, step):
            yield _Part(run.block - low + i, run.at + i * run.length, min(step, run.blocks - i), run.length)


def add_maxima(maxima: torch.Tensor, region: Region, values: torch.Tensor, box: Box) -> None:
    """Raise the maxima of a region's blocks, in place, to the largest absolute values of a box's elements."""
    columns = runs_of(box[1], region.block[1])
    for part in _row_parts(box[0], box[1].count, region):
        rows = values[part.at : part.at + part.blocks * part.length]
        block_rows = _split(rows, 0, part.blocks, part.length).abs().amax(1)
        for run in columns:
            found = _columns_of(block_rows, run).amax(2).float()
            first = run.block - region.first[1]
            there = maxima[part.block : part.block + part.blocks, first : first + run.blocks]
            torch.maximum(there, found, out=there)


def _split(tensor: torch.Tensor, dimension: int, blocks: int, length: int) -> torch.Tensor:
    """Return a view in which a dimension of `blocks * length` elements is two."""
    shape = tensor.shape
    return tensor.view(*shape[:dimension], blocks, length, *shape[dimension + 1 :])


def _columns_of(rows: torch.Tensor, run: Run) -> torch.Tensor:
    return _split(rows[:, run.at : run.at + run.blocks * run.length], 1, run.blocks, run.length)


def cast_box(target: torch.Tensor, values: torch.Tensor, box: Box, factors: torch.Tensor, region: Region) -> None:
    """Cast the elements of a box into `target`, with the factors of a region's blocks."""
    indices = torch.arange(box[1].count, device=factors.device) * box[1].step + box[1].start
    columns = torch.div(indices, region.block[1], rounding_mode="floor") - region.first[1]
    for part in _row_parts(box[0], box[1].count, region):
        rows = slice(part.at, part.at + part.blocks * part.length)
        factor = factors[part.block : part.block + part.blocks].index_select(1, columns)[:, None, :]
        scaled = _split(values[rows], 0, part.blocks, part.length) * factor
        _split(target[rows], 0, part.blocks, part.length).copy_(scaled.clamp_(-FP8_MAX, FP8_MAX))


def quantise_whole(name: str, tensor: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cast of a whole matrix, and its scales.

    Args:
        name: Name of the tensor, which `scheme` converts.
        tensor: Matrix in BF16, F16 or F32.
        scheme: Format to cast to.
    """
    dtype = next(key for key, value in TORCH_DTYPES.items() if value == tensor.dtype)
    spec, box = TensorSpec(name, dtype, tuple(tensor.shape)), full_box(tuple(tensor.shape))
    layout = Layout({name: spec}, (Piece(name, box, name, 0, tensor.stride()),))
    made = QuantisedTensors(layout, {name: tensor}, scheme)
    made.measure()
    made.cast(np.zeros(0, np.float32))
    weights, scales = (read_piece(made.tensors, piece) for piece in made.plan.layout.pieces)
    return weights, scales
