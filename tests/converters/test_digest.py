"""Digests add up over any tiling, and see what goes wrong."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharder.converters.geometry.layout import Range, box_index, full_box
from resharder.converters.storage import digest as digests
from resharder.converters.storage.digest import MASK, copy_and_digest, digest, digest_run, digest_torch

from tests.support.digest_reference import DTYPES, compilations, fold, random_bits, reference, splitmix64
from tests.support.shardings import sharding


@given(st.data())
def test_the_digest_of_a_tensor_is_the_sum_over_any_tiling_of_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    x = random_bits(shape, data.draw(st.sampled_from(DTYPES)))
    boxes = [box for mine in data.draw(sharding(shape)) for box in mine]
    assert sum(digest(x[box_index(box)], box, shape) for box in boxes) & MASK == digest(x, full_box(shape), shape)


@given(st.data())
def test_the_digest_of_a_tensor_is_the_sum_over_runs_of_its_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=4)))
    x = random_bits(shape, data.draw(st.sampled_from(DTYPES)))
    cuts = sorted({0, x.size, *data.draw(st.lists(st.integers(0, x.size), max_size=4))})
    found = sum(digest_run(x.reshape(-1)[begin:end], begin, shape) for begin, end in pairwise(cuts))
    assert found & MASK == digest(x, full_box(shape), shape)


@settings(deadline=None)
@given(st.data())
def test_every_implementation_gives_the_same_number(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    box = data.draw(st.sampled_from([box for mine in data.draw(sharding(shape)) for box in mine]))
    x = random_bits(shape, dtype)[box_index(box)]
    expected = reference(x, box, shape)
    copied, transposed = np.zeros_like(x), np.zeros(x.shape[::-1], dtype).T
    assert digest(x, box, shape) == expected
    assert copy_and_digest(copied, x, box, shape) == expected
    assert copy_and_digest(transposed, x, box, shape) == expected
    assert np.array_equal(copied, x)
    assert np.array_equal(transposed, x)
    signed = torch.from_numpy(np.ascontiguousarray(x).view(f"i{x.itemsize}") if x.itemsize > 1 else np.ascontiguousarray(x))
    held = signed.clone()
    assert digest_torch(signed, box, shape) == expected
    assert torch.equal(signed, held)


COLUMNS = 4096


def of_one_element(bits: int, dtype: type, column: int) -> int:
    """The digest of a tensor that is zero but for one element."""
    return digest(np.array([bits], dtype), (Range(column, 1),), (COLUMNS,))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_no_change_of_one_element_cancels_in_any_column(dtype: type) -> None:
    """Up to 32 bits a change adds `low * change of the low half + high * change of the high one`; the two cancel in a column that
    has a vector (change, change) with all of it below the halves' 2**n in the lattice of those that add up to 0."""
    half = 4 * np.dtype(dtype).itemsize
    cancelled = []
    for column in range(COLUMNS):
        low, high = (of_one_element(1 << shift, dtype, column) for shift in (0, half))
        if any(max(map(abs, vector)) < 1 << half for vector in shortest(low, high)):
            cancelled.append(column)
    assert cancelled == []


def shortest(low: int, high: int) -> list[tuple[int, int]]:
    """The shortest vectors (x, y) with x * low + y * high = 0 modulo 2**64, or (y, x): Gauss' reduction, and sums of what it ends
    with, among which is the one with the smallest largest entry."""
    low, high = sorted((low, high), key=lambda weight: weight & -weight)  # the first is the odd one, without twos of both
    twos = low & -low
    modulus = (1 << 64) // twos
    u, v = (modulus, 0), (-(high // twos) * pow(low // twos, -1, modulus) % modulus, 1)
    while True:
        if dot(u, u) < dot(v, v):
            u, v = v, u
        times = (2 * dot(u, v) + dot(v, v)) // (2 * dot(v, v))
        if times == 0:
            return [u, v, (u[0] + v[0], u[1] + v[1]), (u[0] - v[0], u[1] - v[1])]
        u = (u[0] - times * v[0], u[1] - times * v[1])


def dot(u: tuple[int, int], v: tuple[int, int]) -> int:
    return u[0] * v[0] + u[1] * v[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_column_an_element_can_be_computed_from_its_digest(dtype: type) -> None:
    """So no two elements have the same one, whatever their width."""
    most = int(np.iinfo(dtype).max)
    a = splitmix64(0, 0x9E3779B97F4A7C15) | 1
    for column, b in enumerate(digests.column_weights(COLUMNS).tolist()):
        back = pow(a * b, -1, 1 << 64)
        for bits in (most, most ^ most >> 1, splitmix64(column, 0) & most):
            assert fold(of_one_element(bits, dtype, column) * back & MASK) == bits


@pytest.mark.parametrize(("dtype", "one", "other"), [(np.float32, 0.1257, 0.0003), (np.float32, 1, -1), (np.float64, 1, -1)])
def test_swapped_neighbours_are_seen_in_every_column(dtype: type, one: float, other: float) -> None:
    x, y = (int(np.array(value, dtype).view(f"u{np.dtype(dtype).itemsize}")) for value in (one, other))
    unsigned = DTYPES[int(np.log2(np.dtype(dtype).itemsize))]
    of = [(of_one_element(x, unsigned, column), of_one_element(y, unsigned, column)) for column in range(COLUMNS)]
    for (x_left, y_left), (x_right, y_right) in pairwise(of):
        assert (x_left + y_right) & MASK != (y_left + x_right) & MASK


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_numba_the_digest_is_the_same(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_bits((37, 70_001), dtype)
    x[0] = np.iinfo(dtype).max
    expected = digest(x, full_box(x.shape), x.shape)
    monkeypatch.setattr(digests, "_kernels", lambda width: digests._NUMPY)
    target = np.zeros_like(x)
    assert digest(x, full_box(x.shape), x.shape) == expected
    assert copy_and_digest(target, x, full_box(x.shape), x.shape) == expected
    assert np.array_equal(target, x)


def test_threads_that_digest_for_the_first_time_together_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together, x = Barrier(8), random_bits((3, 5), np.uint16)

    def first(thread: int) -> int:
        together.wait(60)
        return digest(x, full_box(x.shape), x.shape)

    expected = digest(x, full_box(x.shape), x.shape)
    compiled = compilations(monkeypatch)
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(first, range(8))) == {expected}
    assert compiled[x.itemsize] == 1


def test_a_scalar_has_a_digest() -> None:
    assert digest(np.array(7, np.uint16), (), ()) == digest(np.array([7], np.uint16), (Range(0, 1),), (1,)) != 0


@given(st.sampled_from(DTYPES), st.integers(0, 29), st.integers(0, 39), st.data())
def test_one_flipped_bit_changes_the_digest(dtype: type, row: int, column: int, data: st.DataObject) -> None:
    x = random_bits((30, 40), dtype)
    before = digest(x, full_box(x.shape), x.shape)
    x[row, column] ^= dtype(1 << data.draw(st.integers(0, 8 * x.itemsize - 1)))
    assert digest(x, full_box(x.shape), x.shape) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_rows_columns_elements_and_a_shift_change_the_digest(dtype: type) -> None:
    x = random_bits((30, 40), dtype)
    box, before = full_box(x.shape), digest(x, full_box(x.shape), x.shape)
    swapped = x.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert digest(swapped, box, x.shape) != before
    assert digest(np.ascontiguousarray(x[:, [1, 0, *range(2, 40)]]), box, x.shape) != before
    one = x.copy()
    one[3, 4], one[5, 6] = x[5, 6], x[3, 4]
    assert digest(one, box, x.shape) != before
    assert digest(np.roll(x, 1, axis=0), box, x.shape) != before


def test_copying_between_different_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a source of shape"):
        copy_and_digest(np.zeros((2, 3), np.uint16), np.zeros((3, 2), np.uint16), full_box((2, 3)), (2, 3))
