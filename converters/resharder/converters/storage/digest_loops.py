"""Loops of digests for numba to compile: what `digest` says, element by element. Only imported where numba is installed.

Arrays are those of `_Kernels` in `digest`. Four rows at a time share the load of a column's weight, which is 1.6 times as fast
as one after another for elements of 1, 2 and 4 bytes. They are rows of the four quarters, since processors fetch ahead along few
streams of a page. A copy gains nothing by it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import numba
import numpy as np


@numba.njit
def _fold(element):
    bits = np.uint64(element)
    return bits ^ (bits >> np.uint64(32))


@numba.njit
def _row_weight(row):
    """Return the weight of a row as `row_weights` does."""
    x = (row + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


@numba.njit
def sum_rows(source, first, step, b):
    """Return the digest of a matrix, whose rows end where the weights `b` end."""
    total, quarter, columns = np.uint64(0), source.shape[0] // 4, b.shape[0]
    for i in range(quarter):
        at1, at2, at3 = i + quarter, i + 2 * quarter, i + 3 * quarter
        row0, row1, row2, row3 = np.uint64(0), np.uint64(0), np.uint64(0), np.uint64(0)
        for j in range(columns):
            weight = np.uint64(b[j])
            row0 += _fold(source[i, j]) * weight
            row1 += _fold(source[at1, j]) * weight
            row2 += _fold(source[at2, j]) * weight
            row3 += _fold(source[at3, j]) * weight
        total += row0 * _row_weight(first + np.uint64(i) * step) + row1 * _row_weight(first + np.uint64(at1) * step)
        total += row2 * _row_weight(first + np.uint64(at2) * step) + row3 * _row_weight(first + np.uint64(at3) * step)
    for i in range(4 * quarter, source.shape[0]):
        row = np.uint64(0)
        for j in range(columns):
            row += _fold(source[i, j]) * np.uint64(b[j])
        total += row * _row_weight(first + np.uint64(i) * step)
    return total


def copy_rows(target, source, first, step, b):
    """Return the digest as `sum_rows`, and copy the matrix."""
    total = np.uint64(0)
    for i in range(source.shape[0]):
        row = np.uint64(0)
        for j in range(b.shape[0]):
            target[i, j] = source[i, j]
            row += _fold(source[i, j]) * np.uint64(b[j])
        total += row * _row_weight(first + np.uint64(i) * step)
    return total


def sum_matrices(memory, matrices, b, found):
    """Set `found` to the digest of each matrix of `digest_matrices`."""
    for m in range(matrices.shape[0]):
        at, rows, columns, first = matrices[m, 0], matrices[m, 1], matrices[m, 2], np.uint64(matrices[m, 3])
        source = memory[at : at + rows * columns].reshape(rows, columns)
        found[m] = sum_rows(source, first, np.uint64(1), b[:columns])
