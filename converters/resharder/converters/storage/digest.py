"""Additive digests: equal for any tiling of a tensor, different when an element is changed, moved or swapped.

The digest of a box is the sum over its elements of `fold(bits) * a[row] * b[column]` modulo 2**64, where `row` and `column` are
the element's place in the whole tensor seen as a matrix `(prod(shape[:-1]), shape[-1])`, `bits` is the whole element as an
unsigned integer, and `fold(x) = x ^ (x >> 32)`, which changes only elements of 64 bits. `a` and `b` are hashes of their index,
both odd, `a` of 64 bits and `b` of 21.

- A change of one element of any width is always detected: `fold` is one to one, and so is the product with an odd number
  modulo 2**64.
- In other changes, at most one value of a given element leaves the digest unchanged. A change that fills an element of n bits
  at random remains undetected with a probability of at most 2**-n.
- Two swapped elements that differ remain undetected with a probability below 2**-19: within a row if their `b` are equal,
  between rows if their `a * b` are equal in the low bits. The exception are elements of 64 bits that differ in the same bits of
  both halves and in none of the low 12 bits: their swaps remain undetected more often.

The digest detects misplacement; it does not stop an adversary. `fold` is there for swaps: without it, a difference in the high
bits alone, as between 1.0 and -1.0, vanishes in the product with `b[i] - b[j]`. Any sum that is linear in a 64-bit element's
parts and detects every change of it has this flaw in one of the parts (Hajós' theorem).

On the host a kernel compiled by numba reads at memory speed and can copy in the same pass. Without numba, numpy computes the
same sum at a third of the speed or less. There is one kernel for each width of elements, compiled at its first use or by
`compile_for`. `digest_torch` computes the same sum for tensors on a GPU.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided
from resharder.converters.geometry.layout import Box, Range

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
MASK = (1 << 64) - 1
_ROW_SEED, COLUMN_SEED = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
_BLOCK = 1 << 19  # elements; as uint16, half of a core's second-level cache
_DEVICE_BLOCK = 1 << 24  # elements, which take eight bytes each on the device


def hashes(index: Array, seed: int) -> Array:
    """Return splitmix64 of indices, uint64."""
    x = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_weights(rows: Array) -> Array:
    """Return the weights `a` of these row numbers, uint64."""
    return hashes(rows, _ROW_SEED) | np.uint64(1)


def column_weights(columns: int) -> Array:
    """Return the weights `b` of the first `columns` columns, uint32."""
    return _column_weights(Range(0, columns))


@lru_cache(maxsize=256)
def _column_weights(columns: Range) -> Array:
    index = np.arange(columns.count, dtype=np.uint64) * np.uint64(columns.step) + np.uint64(columns.start)
    weights = (hashes(index, COLUMN_SEED) & np.uint64((1 << 21) - 1) | np.uint64(1)).astype(np.uint32)
    weights.flags.writeable = False
    return weights


def _rows(box: Box, shape: tuple[int, ...]) -> Array:
    """Return the row numbers of the box's rows, in C order."""
    index = np.zeros(1, dtype=np.uint64)
    for r, n in zip(box[:-1], shape[:-1], strict=True):
        along = np.arange(r.count, dtype=np.uint64) * np.uint64(r.step) + np.uint64(r.start)
        index = (index[:, None] * np.uint64(n) + along[None, :]).reshape(-1)
    return index


def digest(array: Array, box: Box, shape: tuple[int, ...]) -> int:
    """Return the digest of a box, an unsigned 64-bit integer.

    Args:
        array: Elements of the box as unsigned integers, in host memory, with any strides.
        box: Place of the elements in the tensor.
        shape: Shape of the whole tensor.
    """
    return _run(None, array, box, shape)


def digest_run(run: Array, first: int, shape: tuple[int, ...]) -> int:
    """Return the digest of consecutive elements of a contiguous tensor.

    Args:
        run: The elements as unsigned integers, with one dimension.
        first: Number of the first one, in C order.
        shape: Shape of the whole tensor.
    """
    if not len(run):
        return 0
    columns = shape[-1] if shape else 1
    weights, total, at = column_weights(columns), 0, 0
    while at < len(run):
        row, column = divmod(first + at, columns)
        rows = 0 if column else (len(run) - at) // columns
        part = run[at : at + (rows * columns or columns - column)]
        block = part.reshape(rows or 1, -1)
        total += digest_rows(None, block, row, 1, weights[column : column + block.shape[1]])
        at += len(part)
    return total & MASK


def digest_matrices(memory: Array, matrices: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the digests of matrices of whole rows, in one call that does not hold Python's lock, for any number of them.

    Args:
        memory: Their elements as unsigned integers, in host memory: contiguous, of one dimension.
        matrices: int64, (matrices, 4): offset of the first element in `memory`, rows, columns, and number of the first row in the
            tensor. Rows follow each other without a gap.
    """
    found = np.zeros(len(matrices), np.uint64)
    if len(matrices):
        weights = column_weights(int(matrices[:, 2].max(initial=0)))
        _kernels(memory.itemsize).matrices(memory.view(f"u{memory.itemsize}"), np.ascontiguousarray(matrices), weights, found)
    return found


def copy_and_digest(target: Array, source: Array, box: Box, shape: tuple[int, ...]) -> int:
    """Copy `source` to `target` and return the digest of the copied elements, in one pass. Raises
    ValueError if their shapes differ.
    """
    if target.shape != source.shape:
        raise ValueError(f"expected a source of shape {target.shape}, got {source.shape}")
    return _run(target, source, box, shape)


def _run(target: Array | None, source: Array, box: Box, shape: tuple[int, ...]) -> int:
    if not shape:
        source, box, shape = source.reshape(1), (Range(0, 1),), (1,)
        target = None if target is None else target.reshape(1)
    if source.size == 0:
        return 0
    b = _column_weights(box[-1])
    if source.strides[-1] == source.dtype.itemsize and (target is None or target.strides[-1] == target.dtype.itemsize):
        return _slab(target, source, box, shape, 0, b)
    if target is not None:
        np.copyto(target, source)
    return sum(_slab(None, block, part, shape, 0, b) for block, part in _blocks(source, box)) & MASK


def _slab(target: Array | None, source: Array, box: Box, shape: tuple[int, ...], before: int, b: Array) -> int:
    """Return the digest of a slab: the elements at a fixed index of the leading dimensions.
    `before` is that index in C order.
    """
    if source.ndim <= 2:
        rows = box[0] if source.ndim == 2 else Range(0, 1)
        first = before * shape[0] + rows.start  # with one dimension, `before` is 0
        return digest_rows(None if target is None else np.atleast_2d(target), np.atleast_2d(source), first, rows.step, b)
    total = 0
    for i in range(box[0].count):
        index = before * shape[0] + box[0].start + i * box[0].step
        total += _slab(None if target is None else target[i], source[i], box[1:], shape[1:], index, b)
    return total & MASK


def _blocks(source: Array, box: Box) -> Iterator[tuple[Array, Box]]:
    """Yield (contiguous copy, box) of small parts along the first dimension."""
    step = max(1, _BLOCK // prod(source.shape[1:])) if source.ndim > 1 else source.shape[0]
    for i in range(0, source.shape[0], step):
        block, first = np.ascontiguousarray(source[i : i + step]), box[0]
        yield block, (Range(first.start + i * first.step, block.shape[0], first.step), *box[1:])


def digest_rows(target: Array | None, source: Array, first: int, step: int, b: Array) -> int:
    """Return the digest of a matrix of unsigned integers, given the weights `b` of its columns.

    Row `i` of the matrix is row `first + i * step` of the tensor. A `target` receives a copy in the same pass.
    """
    kind = np.dtype(f"u{source.itemsize}")
    kernels = _kernels(source.itemsize)
    rows = _rows_of(source.view(kind))
    if rows is None:
        rows = source.copy().view(kind)
    into = None if target is None else _rows_of(target.view(kind))
    if into is not None:
        return int(kernels.copy(into, rows, first, step, b))
    if target is not None:
        np.copyto(target, source)
    return int(kernels.sum(rows, first, step, b))


def _rows_of(matrix: Array) -> Array | None:
    """Return the rows as the beginnings of longer rows that follow each other without a gap.

    Kernels then need one signature and no strides, with which they run at a quarter of the speed. A kernel ends a row where the
    weights end, and does not touch the elements between.

    None if there is no such matrix: rows that overlap (an expanded tensor), run backwards, or are not aligned.
    """
    step, width = matrix.strides[0], matrix.itemsize
    if not matrix.flags.aligned:
        return None
    if matrix.flags.c_contiguous:
        return matrix
    if step < matrix.shape[1] * width:
        return None
    return as_strided(matrix, (matrix.shape[0], step // width), (step, width), writeable=matrix.flags.writeable)


def compile_for(item_sizes: Iterable[int]) -> None:
    """Compile the kernels for these element sizes, in bytes, unless this process has compiled them.

    Takes half a second for each size, or no time if the compiled code is in numba's cache on disk.
    """
    for width in sorted(set(item_sizes)):
        _kernels(width)


class _Kernels(NamedTuple):
    """Compiled loops for elements of one width."""

    sum: Callable[..., int]
    copy: Callable[..., int]
    matrices: Callable[..., None]


_compiling = threading.Lock()  # numba fails if two threads compile the same loop


def _kernels(width: int) -> _Kernels:
    """Return the loops for elements of `width` bytes."""
    with _compiling:
        return _compiled(width)


@lru_cache(maxsize=4)
def _compiled(width: int) -> _Kernels:
    try:
        import numba
    except ImportError:
        return _NUMPY
    if numba.config.DISABLE_JIT:  # the loops would run in the interpreter
        return _NUMPY
    from resharder.converters.storage.digest_loops import copy_rows, sum_matrices, sum_rows

    types = numba.types
    element = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[width]
    source, target = types.Array(element, 2, "C", readonly=True), types.Array(element, 2, "C")
    weights, number = types.Array(types.uint32, 1, "C", readonly=True), types.uint64
    memory, places = types.Array(element, 1, "C", readonly=True), types.Array(types.int64, 2, "C", readonly=True)
    signatures = (
        number(source, number, number, weights),
        number(target, source, number, number, weights),
        types.void(memory, places, weights, types.Array(types.uint64, 1, "C")),
    )
    loops = (sum_rows.py_func, copy_rows, sum_matrices)
    try:
        kernels = [numba.njit(signature, nogil=True, cache=True)(loop) for signature, loop in zip(signatures, loops, strict=True)]
    except (RuntimeError, OSError):  # no writable folder for compiled code, as on a read-only file system, or the medium is full
        kernels = [numba.njit(signature, nogil=True)(loop) for signature, loop in zip(signatures, loops, strict=True)]
    return _Kernels(*kernels)


def _matrices_numpy(memory: Array, matrices: Array, b: Array, found: Array) -> None:
    for m, (at, rows, columns, first) in enumerate(matrices.tolist()):
        found[m] = _sum_numpy(memory[at : at + rows * columns].reshape(rows, columns), first, 1, b[:columns]) if columns else 0


def _sum_numpy(source: Array, first: int, step: int, b: Array) -> int:
    total, width = 0, 1 << 16
    a = row_weights(np.arange(source.shape[0], dtype=np.uint64) * np.uint64(step) + np.uint64(first))
    block = max(1, _BLOCK // 8 // b.shape[0])
    for i in range(0, source.shape[0], block):
        for j in range(0, b.shape[0], width):
            weights = b[j : j + width]
            rows = _sums_of_rows(source[i : i + block, j : j + len(weights)], weights)
            total += int((rows * a[i : i + block]).sum())
    return total & MASK


def _sums_of_rows(values: Array, b: Array) -> Array:
    """Return the weighted sum of each row. Elements of up to 16 bits are added as float64, which is faster
    than integers and exact: 2**16 * 2**21 * 2**16 columns <= 2**53.
    """
    if values.itemsize <= 2:
        return (values.astype(np.float64) @ b.astype(np.float64)).astype(np.uint64)
    values = values.astype(np.uint64, copy=False)
    found: Array = np.einsum("ij,j->i", values ^ (values >> np.uint64(32)), b.astype(np.uint64))
    return found


def _copy_numpy(target: Array, source: Array, first: int, step: int, b: Array) -> int:
    np.copyto(target[:, : b.shape[0]], source[:, : b.shape[0]])
    return _sum_numpy(target, first, step, b)


_NUMPY = _Kernels(_sum_numpy, _copy_numpy, _matrices_numpy)


def digest_torch(tensor: "torch.Tensor", box: Box, shape: tuple[int, ...]) -> int:
    """Return the digest as `digest` does, computed on the tensor's device. Waits for the device."""
    return int(digest_on_device(tensor, box, shape)) & MASK


def digest_on_device(tensor: "torch.Tensor", box: Box, shape: tuple[int, ...]) -> "torch.Tensor":
    """Return the digest as an int64 scalar on the tensor's device, enqueued without waiting for it.

    Integer arithmetic on a device also wraps modulo 2**64.
    """
    import torch

    if not shape:
        tensor, box, shape = tensor.reshape(1), (Range(0, 1),), (1,)
    if tensor.dim() == 1:
        tensor = tensor[None]
    size = tensor.element_size()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    a = torch.from_numpy(row_weights(_rows(box, shape)).view(np.int64)).to(tensor.device, non_blocking=True)
    b = torch.from_numpy(_column_weights(box[-1]).astype(np.int64)).to(tensor.device, non_blocking=True)
    total, width = torch.zeros((), dtype=torch.int64, device=tensor.device), tensor.shape[-1]
    rows = prod(tensor.shape[1:-1])
    step = max(1, _DEVICE_BLOCK // max(1, rows * width))
    for i in range(0, tensor.shape[0], step):
        block = tensor[i : i + step].contiguous().reshape(-1, width).view(bits).long()
        if size == 8:
            block = block ^ (block >> 32 & 0xFFFFFFFF)
        elif size > 1:
            block &= (1 << 8 * size) - 1
        total += ((block * b).sum(1) * a[i * rows : i * rows + block.shape[0]]).sum()
    return total
