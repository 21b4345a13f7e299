"""Kernels of the digest, one at a time: compiled, as plain Python, and of numpy; and the memory that they read in place."""

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from resharder.converters.geometry.layout import Range, box_index, full_box
from resharder.converters.storage import digest as digests
from resharder.converters.storage.digest import (
    MASK,
    column_weights,
    copy_and_digest,
    digest,
    digest_matrices,
    digest_rows,
    digest_torch,
)
from resharder.converters.storage.digest_1 import digest_1
from resharder.converters.storage.digest_loops import copy_rows, sum_matrices, sum_rows

from tests.support.digest_reference import DTYPES, compilations, fold, of_rows, random_bits, reference, splitmix64
from tests.support.shardings import sharding

pytestmark = pytest.mark.slow

KERNELS: dict[str, Callable[[int], digests._Kernels]] = {
    "interpreted": lambda width: digests._Kernels(sum_rows.py_func, copy_rows, sum_matrices),
    "compiled": lambda width: digests._kernels(width),
    "numpy": lambda width: digests._NUMPY,
}


@pytest.fixture
def anew() -> Iterator[None]:
    """Compile kernels anew in a test, and again after it."""
    digests._compiled.cache_clear()
    yield
    digests._compiled.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KERNELS)
def test_every_kernel_follows_the_definition_and_leaves_what_is_between_rows(kind: str, dtype: type) -> None:
    x, b = random_bits((11, 7), dtype), column_weights(4)
    sum_only, copying, _ = KERNELS[kind](np.dtype(dtype).itemsize)
    x.flags.writeable = False  # as a version's files are mapped
    for first, step in ((0, 1), (3, 2), ((1 << 60) + 1, 7)):
        expected = of_rows(x, first, step, b)
        target = random_bits((11, 9), dtype, seed=1)
        before = target.copy()
        with np.errstate(over="ignore"):
            assert int(sum_only(x, np.uint64(first), np.uint64(step), b)) == expected
            assert int(copying(target, x, np.uint64(first), np.uint64(step), b)) == expected
        assert np.array_equal(target[:, :4], x[:, :4])
        assert np.array_equal(target[:, 4:], before[:, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KERNELS)
def test_matrices_in_one_memory_have_the_digests_of_each(kind: str, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KERNELS[kind](np.dtype(dtype).itemsize)
    monkeypatch.setattr(digests, "_kernels", lambda width: kernels)
    memory = random_bits((100,), dtype)
    memory.flags.writeable = False
    places = np.array(
        [(0, 5, 7, 0), (40, 1, 9, 3), (49, 3, 1, (1 << 40) + 1), (60, 0, 4, 0), (60, 4, 10, 2), (0, 1, 100, 0), (2, 11, 8, 5)]
    )
    expected = [
        of_rows(memory[at : at + rows * columns].reshape(rows, columns), first, 1, column_weights(columns))
        for at, rows, columns, first in places.tolist()
    ]
    with np.errstate(over="ignore"):
        assert digest_matrices(memory, places).tolist() == expected
        assert digest_matrices(memory, places[:0]).tolist() == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_sums_blocks_of_rows_and_columns_exactly(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_BLOCK", 8 * 3 * 5)
    x, b = random_bits((10, 5), dtype), column_weights(5)
    assert digests._sum_numpy(x, 2, 3, b) == of_rows(x, 2, 3, b)
    most, heaviest = int(np.iinfo(dtype).max), (1 << 21) - 1
    columns = np.arange(1 << 17)
    wide = (most - columns % 3).astype(dtype)[None] if most < 1 << 63 else np.full((1, 1 << 17), most, dtype)
    heavy = (heaviest - 2 * (columns % 5)).astype(np.uint32)
    a = splitmix64(6, 0x9E3779B97F4A7C15) | 1
    expected = a * sum(fold(value) * weight for value, weight in zip(wide[0].tolist(), heavy.tolist(), strict=True)) & MASK
    assert digests._sum_numpy(wide, 6, 1, heavy) == expected


def test_without_room_for_blocks_numpy_sums_one_row_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, b = random_bits((3, 9), np.uint32), column_weights(9)
    monkeypatch.setattr(digests, "_BLOCK", 8)
    assert digests._sum_numpy(x, 0, 1, b) == of_rows(x, 0, 1, b)


def test_weights_are_those_of_the_definition() -> None:
    rows = np.array([0, 1, 7, 2**40])
    assert digests.row_weights(rows).tolist() == [splitmix64(int(row), 0x9E3779B97F4A7C15) | 1 for row in rows]
    assert column_weights(300).tolist() == [splitmix64(i, 0xD1B54A32D192ED03) % 2**21 | 1 for i in range(300)]
    with pytest.raises(ValueError, match="read-only"):
        column_weights(3)[0] = 1  # they are shared


def matrices() -> dict[str, tuple[np.ndarray, bool]]:
    """Matrices of four rows of six elements, and whether kernels read them in place."""
    long_rows = random_bits((4, 9), np.uint16)[:, :6]
    odd = np.frombuffer(bytearray(random_bits((51,), np.uint8).tobytes()), np.uint8)[1:49].view(np.uint16).reshape(4, 6)
    uneven = as_strided(random_bits((4, 16), np.uint8)[:, :12].view(np.uint8), (4, 12), (13, 1)).view(np.uint16)
    one = random_bits((6,), np.uint16)
    return {
        "contiguous": (random_bits((4, 6), np.uint16), True),
        "longer rows": (long_rows, True),
        "expanded": (np.broadcast_to(one, (4, 6)), False),
        "overlapping": (as_strided(random_bits((30,), np.uint16), (4, 6), (4, 2)), False),
        "overlapping a little": (as_strided(random_bits((30,), np.uint16), (4, 6), (10, 2)), False),
        "backwards": (random_bits((4, 6), np.uint16)[::-1], False),
        "not aligned": (odd, False),
        "not whole elements apart": (uneven, False),
    }


@pytest.mark.parametrize("kind", matrices())
def test_rows_are_read_in_place_where_a_kernel_can(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, in_place = matrices()[kind]
    read: list[Any] = []
    used: list[Callable[..., int]] = []
    own = threading.get_ident()
    monkeypatch.setattr(
        digests,
        "_kernels",
        lambda width: digests._NUMPY._replace(sum=recorded(digests._sum_numpy), copy=recorded(digests._copy_numpy)),
    )

    def recorded(kernel: Callable[..., int]) -> Callable[..., int]:
        def run(*arguments: Any) -> int:
            if threading.get_ident() == own:  # threads that an earlier test has left may digest too
                used.append(kernel)
                read.append(arguments[-4])
            return kernel(*arguments)

        return run

    b, target = column_weights(6), np.zeros((4, 6), np.uint16)
    assert digest_rows(None, source, 3, 2, b) == digest_rows(target, source, 3, 2, b) == of_rows(source, 3, 2, b)
    assert np.array_equal(target, source)
    assert [np.shares_memory(rows, source) for rows in read] == [in_place, in_place]
    assert used == [digests._sum_numpy, digests._copy_numpy], "a copy takes one pass"


@pytest.mark.parametrize("kind", [name for name in matrices() if name not in ("expanded", "overlapping a little")])
def test_a_copy_arrives_in_every_kind_of_memory(kind: str) -> None:
    target, _ = matrices()[kind]
    if kind == "overlapping":
        target = as_strided(np.zeros(30, np.uint16), (2, 6), (14, 2))
    source = random_bits(target.shape, np.uint16, seed=5)
    copied = source.copy()
    assert digest_rows(target, source, 0, 1, column_weights(6)) == of_rows(copied, 0, 1, column_weights(6))
    assert np.array_equal(target, copied)


@given(st.data())
def test_transposed_boxes_are_digested_block_by_block(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    box = data.draw(st.sampled_from([box for mine in data.draw(sharding(shape)) for box in mine]))
    x = np.asfortranarray(random_bits(shape, np.uint16))[box_index(box)]
    spread = np.repeat(x, 2, axis=-1)[..., ::2]
    target = np.zeros((*x.shape, 2), np.uint16)[..., 0]
    before, digests._BLOCK = digests._BLOCK, data.draw(st.sampled_from([1, 3, 10, 1000]))
    try:
        assert digest(x, box, shape) == digest(spread, box, shape) == copy_and_digest(target, spread, box, shape)
    finally:
        digests._BLOCK = before
    assert digest(spread, box, shape) == reference(x, box, shape)
    assert np.array_equal(target, x)


def test_a_contiguous_box_is_copied_to_where_its_elements_are_apart() -> None:
    source = random_bits((5, 7), np.uint16)
    target = np.zeros((5, 7, 2), np.uint16)
    assert copy_and_digest(target[..., 0], source, full_box((5, 7)), (5, 7)) == digest(source, full_box((5, 7)), (5, 7))
    assert np.array_equal(target[..., 0], source)
    assert not target[..., 1].any()


def test_a_contiguous_box_is_copied_and_digested_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = random_bits((5, 7), np.uint16), np.zeros((5, 7), np.uint16)
    copies: list[int] = []
    monkeypatch.setattr(np, "copyto", lambda *_: pytest.fail("a pass of its own"))
    monkeypatch.setattr(digests, "_kernels", lambda width: digests._NUMPY._replace(copy=lambda *given: copies.append(1) or 0))
    copy_and_digest(target, source, full_box((5, 7)), (5, 7))
    assert copies == [1]


@pytest.mark.parametrize(
    ("shape", "rows"), [((7, 3), [3, 3, 1]), ((2, 30), [1, 1]), ((25, 1), [10, 10, 5]), ((3, 2, 2), [2, 1]), ((25,), [25])]
)
def test_blocks_have_as_many_rows_as_fit(shape: tuple[int, ...], rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_BLOCK", 10)
    x = random_bits(shape, np.uint16)
    box = (Range(4, shape[0], 3), *(Range(1, n) for n in shape[1:]))
    found = list(digests._blocks(x, box))
    assert [len(block) for block, _ in found] == rows
    assert np.array_equal(np.concatenate([block for block, _ in found]), x)
    assert [part[0].start for _, part in found] == [4 + 3 * sum(rows[:i]) for i in range(len(rows))]
    assert all(part[0].count == len(block) and part[0].step == 3 and part[1:] == box[1:] for block, part in found)


def test_weights_of_rows_and_columns_are_exact_beyond_the_integers_of_floats() -> None:
    far = Range((1 << 60) + 1, 3, 7)
    places = [far.start + i * far.step for i in range(far.count)]
    assert digests._column_weights(far).tolist() == [splitmix64(place, 0xD1B54A32D192ED03) % 2**21 | 1 for place in places]
    assert digests._rows((far, Range(0, 4)), (1 << 61, 4)).tolist() == places
    assert digests._rows((Range(1, 2), far, Range(0, 4)), (3, 1 << 60, 4)).tolist() == [
        (row << 60) + place for row in (1, 2) for place in places
    ]
    assert digests._rows((Range(0, 4),), (4,)).tolist() == [0]


def test_an_empty_box_has_the_digest_0() -> None:
    for shape in ((0,), (0, 4), (3, 0), (2, 0, 4)):
        assert digest(np.zeros(shape, np.uint16), full_box(shape), shape) == 0
        assert copy_and_digest(np.zeros(shape, np.uint16), np.zeros(shape, np.uint16), full_box(shape), shape) == 0


def test_a_scalar_is_copied_and_digested() -> None:
    target = np.array(0, np.uint32)
    assert copy_and_digest(target, np.array(9, np.uint32), (), ()) == reference(np.array([9]), (Range(0, 1),), (1,))
    assert target == 9
    assert digest_torch(torch.tensor(9, dtype=torch.int32), (), ()) == reference(np.array([9]), (Range(0, 1),), (1,))


@pytest.mark.parametrize("shape", [(5, 1 << 22), (5, 2, 1 << 21), ((1 << 24) + 3,)])
def test_a_device_digests_large_tensors_in_blocks(shape: tuple[int, ...]) -> None:
    x = random_bits(shape, np.uint8)
    assert digest_torch(torch.from_numpy(x), full_box(shape), shape) == digest(x, full_box(shape), shape)


@pytest.mark.parametrize("shape", [(5, 3, 2, 2), (7, 2), (7,), ()])
def test_blocks_of_a_device_take_their_rows_weights(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_DEVICE_BLOCK", 4)
    x = random_bits(shape, np.uint16)
    assert digest_torch(torch.from_numpy(x.view(np.int16)), full_box(shape), shape) == digest(x, full_box(shape), shape)


@pytest.mark.usefixtures("anew")
def test_compiled_code_is_kept_on_disk_and_lets_other_threads_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    digests.compile_for([1])
    assert [sum(kernel.stats.cache_misses.values()) for kernel in digests._kernels(1)] == [1, 1, 1]
    digests._compiled.cache_clear()
    assert [sum(kernel.stats.cache_hits.values()) for kernel in digests._kernels(1)] == [1, 1, 1]
    assert [kernel.targetoptions["nogil"] for kernel in digests._kernels(1)] == [True, True, True]


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_kernels_are_compiled_in_memory_without_a_folder_for_them(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, refused = numba.njit, []

    def refuse(signature: object, **options: bool) -> object:
        if options.pop("cache", False):
            refused.append(signature)
            raise error("no locator available")
        return compile_(signature, **options)

    monkeypatch.setattr(numba, "njit", refuse)
    kernels = digests._kernels(2)
    assert len(refused) == 1
    assert [kernel.targetoptions["nogil"] for kernel in kernels] == [True, True, True]
    x, b, target = random_bits((3, 5), np.uint16), column_weights(5), np.zeros((3, 5), np.uint16)
    assert kernels[0](x, 0, 1, b) == kernels[1](target, x, 0, 1, b) == of_rows(x, 0, 1, b)


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("without", ["numba", "compiler"])
def test_numpy_takes_over_without_a_compiler(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without == "numba":
        monkeypatch.setitem(sys.modules, "numba", None)
    else:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    assert digests._kernels(4) == digests._NUMPY


def test_each_width_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compilations(monkeypatch)
    digests.compile_for([2, 8, 2])
    assert compiled[2] == compiled[8] == 1
    digests.compile_for([8, 2])
    digests._kernels(1), digests._kernels(4), digests._kernels(2)
    assert compiled == {1: 1, 2: 1, 4: 1, 8: 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 7), (2, 3, 4), (0, 4), (4, 0)])
def test_the_digest_of_revision_1_is_that_of_columns_of_16_bits(dtype: type, shape: tuple[int, ...]) -> None:
    x = random_bits(shape, dtype)
    rows = x.reshape(-1, shape[-1] if shape else 1) if x.size else np.zeros((0, 1), dtype)
    units = rows.view(np.uint16) if rows.itemsize > 1 else rows
    weights = [splitmix64(j, 0xD1B54A32D192ED03) % (2**20 - 1) + 1 for j in range(units.shape[1])]
    expected = sum(
        value * (splitmix64(i, 0x9E3779B97F4A7C15) | 1) * weights[j]
        for i, row in enumerate(units.tolist())
        for j, value in enumerate(row)
    )
    assert digest_1(x) == expected & MASK
