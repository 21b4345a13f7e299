"""Digests add up over any tiling, and see what goes wrong."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resharder.converters import digest as digests
from resharder.converters.digest import MASK, copy_and_digest, digest, digest_torch
from resharder.converters.layout import Range, box_index, full_box

from tests.support.shardings import sharding

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]


def random_bits(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


@given(st.data())
def test_the_digest_of_a_tensor_is_the_sum_over_any_tiling_of_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    x = random_bits(shape, data.draw(st.sampled_from(DTYPES)))
    boxes = [box for mine in data.draw(sharding(shape)) for box in mine]
    assert sum(digest(x[box_index(box)], box, shape) for box in boxes) & MASK == digest(x, full_box(shape), shape)


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
    assert digest_torch(signed, box, shape) == expected


def reference(x: np.ndarray, box, shape: tuple[int, ...]) -> int:
    """The definition, one element at a time."""
    total, lanes = 0, max(1, x.itemsize // 2)
    for at in np.ndindex(x.shape):
        place = [r.start + i * r.step for r, i in zip(box, at, strict=True)]
        row = int(np.ravel_multi_index(place[:-1], shape[:-1])) if len(shape) > 1 else 0
        a = int(digests.row_weights(np.array([row]))[0])
        for lane in range(lanes):
            bits = int(x[at]) >> (16 * lane) & 0xFFFF
            b = int(digests._column_weights(Range(place[-1] * lanes + lane, 1), 1)[0])
            total += bits * a * b
    return total & MASK


def test_without_numba_the_digest_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_bits((37, 70_001), np.uint16)
    x[0] = 0xFFFF
    expected = digest(x, full_box(x.shape), x.shape)
    monkeypatch.setattr(digests, "_kernels", lambda width: (digests._sum_float64, digests._copy_float64))
    target = np.zeros_like(x)
    assert digest(x, full_box(x.shape), x.shape) == expected
    assert copy_and_digest(target, x, full_box(x.shape), x.shape) == expected
    assert np.array_equal(target, x)


def test_threads_that_digest_for_the_first_time_together_compile_once() -> None:
    together, x = Barrier(8), random_bits((3, 5), np.uint16)

    def first(thread: int) -> int:
        together.wait(60)
        return digest(x, full_box(x.shape), x.shape)

    expected = digest(x, full_box(x.shape), x.shape)
    digests._compiled.cache_clear()
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(first, range(8))) == {expected}
    assert digests._compiled.cache_info().misses == 1


def test_a_scalar_has_a_digest() -> None:
    assert digest(np.array(7, np.uint16), (), ()) == digest(np.array([7], np.uint16), (Range(0, 1),), (1,)) != 0


@given(st.integers(0, 29), st.integers(0, 39), st.integers(0, 15))
def test_one_flipped_bit_changes_the_digest(row: int, column: int, bit: int) -> None:
    x = random_bits((30, 40), np.uint16)
    before = digest(x, full_box(x.shape), x.shape)
    x[row, column] ^= 1 << bit
    assert digest(x, full_box(x.shape), x.shape) != before


def test_swapped_rows_columns_elements_and_a_shift_change_the_digest() -> None:
    x = random_bits((30, 40), np.uint16)
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
