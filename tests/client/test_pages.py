"""Which pages of mapped files a GPU's driver is told of, and that they may leave a process's tables."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu import pinned_pages
from resharder.client.gpu.pinned_pages import paced, spans_of
from resharder.converters.storage.files import Array
from resharder.converters.storage.pages import forget_pages, map_pages

PAGE, MIB = mmap.PAGESIZE, 1 << 20


@pytest.fixture
def mapped(tmp_path: Path) -> list[Array]:
    """Two files of 256 MiB."""
    found = []
    for name in ("a", "b"):
        with (tmp_path / name).open("w+b") as file:
            file.truncate(256 * MIB)
            found.append(np.frombuffer(mmap.mmap(file.fileno(), 256 * MIB), np.uint8))
    return found


def relative(spans: list[tuple[int, int]], to: Array) -> list[tuple[int, int]]:
    return [(begin - byte_bounds(to)[0], end - byte_bounds(to)[0]) for begin, end in spans]


def test_what_lies_near_in_one_map_is_one_span(mapped: list[Array]) -> None:
    whole = mapped[0]
    arrays = [whole[3 * PAGE + 5 : 4 * PAGE], whole[6 * PAGE : 6 * PAGE + 1], whole[20 * MIB : 20 * MIB + 8]]
    apart = [(3 * PAGE, 4 * PAGE), (6 * PAGE, 7 * PAGE), (20 * MIB, 20 * MIB + PAGE)]
    assert relative(spans_of(arrays), whole) == apart
    assert relative(spans_of(reversed(arrays), MIB), whole) == [(3 * PAGE, 7 * PAGE), apart[2]]
    assert relative(spans_of(arrays, 32 * MIB), whole) == [(3 * PAGE, 20 * MIB + PAGE)]


def test_spans_are_cut(mapped: list[Array]) -> None:
    found = relative(spans_of([mapped[0][:PAGE], mapped[0][200 * MIB :]], 256 * MIB), mapped[0])
    assert found == [(at * MIB, (at + 64) * MIB) for at in (0, 64, 128, 192)]


def test_what_lies_in_two_maps_is_joined_only_where_it_touches(mapped: list[Array]) -> None:
    low, high = sorted(mapped, key=lambda whole: byte_bounds(whole)[0])
    ends = [low[:PAGE], high[-PAGE:]]
    assert len(spans_of(ends, 1 << 40)) == 2
    own = [np.zeros(PAGE, np.uint8) for _ in range(4)]
    assert spans_of(own, 1 << 40) == spans_of(own)
    assert spans_of([low[:0]], 1 << 40) == []


@pytest.mark.parametrize("busy", [True, False])
def test_half_of_the_time_is_left_to_other_threads_only_while_they_are_busy(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()
    monkeypatch.setattr(pinned_pages, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append))
    with paced(lambda: busy):
        now[0] += 0.25
    assert slept == ([0.25] if busy else [])


def test_pages_that_are_forgotten_are_the_files_still(mapped: list[Array]) -> None:
    whole = mapped[0][: 8 * MIB]
    map_pages(byte_bounds(whole), write=True)
    whole[::PAGE] = np.arange(8 * MIB // PAGE, dtype=np.uint64).astype(np.uint8)
    before = whole[::PAGE].copy()
    forget_pages(byte_bounds(whole[5 : 4 * MIB + 7]))
    map_pages(byte_bounds(whole[17 : 3 * MIB]))
    assert np.array_equal(whole[::PAGE], before)
    whole[9] = 77
    forget_pages(byte_bounds(whole))
    assert whole[9] == 77
