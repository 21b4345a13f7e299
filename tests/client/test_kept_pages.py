"""Files whose pages stay registered: who may write when, what the kernel's leases show, and when pages are released."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import numpy as np
import pytest
import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu import kept_pages, pinned_pages
from resharder.client.gpu.device_to_pages import straight
from resharder.client.gpu.kept_pages import KeptPages
from resharder.client.gpu.schedule import Moves
from resharder.client.transport import gpu_buffers
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.server.infra.filesystem import unused_elsewhere, unwritten_elsewhere

from tests.support.cuda_runtime import Runtime, installed

CPU = torch.device("cpu")
FILES = lay_out([TensorSpec("a", "U8", (5000,)), TensorSpec("b", "U8", (9000,))], 6000)
SPANS = [[(0, 4096)], [(0, 12288)]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as made:
        yield made_in(Path(made) / "1")


def made_in(folder: Path) -> Path:
    folder.mkdir()
    for file in FILES:
        (folder / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
    return folder


def write(at: int, value: int, size: int) -> None:
    torch.frombuffer((np.ctypeslib.ctypes.c_uint8 * size).from_address(at), dtype=torch.uint8).fill_(value)


def test_a_file_has_a_writer_for_the_kernel_until_it_is_closed_and_none_after_it(folder: Path) -> None:
    kept = KeptPages(CPU)
    opened = kept.open(folder, FILES, SPANS, register=True)
    assert opened is not None
    for file, pages in zip(FILES, opened, strict=True):
        path = folder / file.path
        assert not unwritten_elsewhere(path)
        write(pages.begin + file.tensors[0].offset, 7, 100)
        pages.close()
        assert unwritten_elsewhere(path)
        assert unused_elsewhere(path)
        content = path.read_bytes()[file.tensors[0].offset :]
        assert content == bytes([7] * 100 + [0] * (len(content) - 100))
    kept.close()


def test_the_files_of_a_later_version_are_known_wherever_they_are_now(folder: Path) -> None:
    kept = KeptPages(CPU)
    first = opened(kept, folder)
    moved = folder.rename(folder.with_name("2"))
    assert opened(kept, moved) == first
    other = opened(kept, made_in(folder))
    assert not {*first} & {*other}
    assert (opened(kept, moved), opened(kept, folder)) == (first, other)
    kept.close()


def opened(kept: KeptPages, folder: Path, files: tuple[FileLayout, ...] = FILES) -> list[int]:
    """Addresses of the files, which are open for a moment."""
    found = kept.open(folder, files, SPANS, register=True)
    assert found is not None
    for pages in found:
        pages.close()
    return [pages.begin for pages in found]


def test_a_deleted_file_is_released_at_the_next_version(folder: Path) -> None:
    kept, before = KeptPages(CPU), len(os.listdir("/proc/self/fd"))
    opened(kept, folder)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    for file in FILES:
        (folder / file.path).unlink()
    opened(kept, made_in(folder.with_name("2")))
    assert len(os.listdir("/proc/self/fd")) == before + 2
    kept.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["gone", "other size"])
def test_a_file_that_cannot_be_opened_leaves_none_open(fault: str, folder: Path) -> None:
    last, kept = folder / FILES[1].path, KeptPages(CPU)
    if fault == "gone":
        last.unlink()
    else:
        last.write_bytes(b"short")
    with pytest.raises(FileNotFoundError if fault == "gone" else ValueError, match=last.name):
        kept.open(folder, FILES, SPANS, register=True)
    assert unwritten_elsewhere(folder / FILES[0].path)
    kept.close()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    def check(begin: int, flags: int) -> None:
        assert flags == pinned_pages.WRITABLE
        write(begin, 1, 1)  # ends the process unless it is mapped for writing

    made = installed(monkeypatch)
    made.check = check
    monkeypatch.setattr(kept_pages, "pages_stay_in_place", lambda device: True)
    return made


def test_pages_are_registered_once_and_again_only_for_other_boxes(runtime: Runtime, folder: Path) -> None:
    kept = KeptPages(torch.device("cuda", 0))
    first = opened(kept, folder)
    assert runtime.registered == {first[0]: 4096, first[1]: 12288}
    assert all(unused_elsewhere(folder / file.path) for file in FILES)
    assert (opened(kept, folder), runtime.calls) == (first, 2)
    again = kept.open(folder, FILES[:1], [[(0, 8192)]], register=True)
    assert again is not None
    assert (runtime.registered[again[0].begin], runtime.calls, len(runtime.registered)) == (8192, 3, 2)
    again[0].close()
    kept.close()
    assert not runtime.registered


WARNED = (
    "this process may open too few files to keep those of the store registered (at most {}, a quarter of `ulimit -n`; raise it): "
    "versions are copied through buffers, at about half of the speed"
)


def test_more_files_than_the_process_may_well_open_are_not_registered(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, before = KeptPages(CPU, most=1), len(os.listdir("/proc/self/fd"))
    assert kept.prepare(folder, FILES, SPANS, lambda: False)
    assert kept.open(folder, FILES, SPANS, register=True) is None
    assert [record.message for record in caplog.records] == [WARNED.format(1)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_cannot_all_be_open_at_once_go_through_buffers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept, plain, before = KeptPages(CPU, most=100), os.open, len(os.listdir("/proc/self/fd"))
    assert kept.prepare(folder, FILES, SPANS, lambda: False)

    def full(path: Path, flags: int) -> int:
        if Path(path).name == FILES[1].path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return plain(path, flags)

    monkeypatch.setattr(kept_pages.os, "open", full)
    assert kept.open(folder, FILES, SPANS, register=False) is None
    assert [record.message for record in caplog.records] == [WARNED.format(100)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert unwritten_elsewhere(folder / FILES[0].path)


def test_files_are_registered_before_a_version_has_them_one_by_one_until_they_are_wanted(runtime: Runtime, folder: Path) -> None:
    kept = KeptPages(torch.device("cuda", 0))
    assert kept.open(folder, FILES, SPANS, register=False) is None
    assert not kept.prepare(folder, FILES, SPANS, lambda: runtime.calls == 1)
    assert (runtime.calls, kept.open(folder, FILES, SPANS, register=False)) == (1, None)
    assert all(unused_elsewhere(folder / file.path) for file in FILES)
    assert kept.prepare(folder, FILES, SPANS, lambda: False)
    assert all(unused_elsewhere(folder / file.path) for file in FILES)
    pages = kept.open(folder.rename(folder.with_name("2")), FILES, SPANS, register=False)
    assert pages is not None
    for each in pages:
        each.close()
    assert runtime.calls == 2
    kept.close()


def test_files_that_a_version_has_got_meanwhile_are_asked_for_again(folder: Path) -> None:
    gone, asked, done = folder.with_name("gone"), list[Path](), Event()

    def ask() -> Path | None:
        asked.append(folder)
        return [None, gone, folder][min(len(asked), 3) - 1]

    def register(there: Path, stop: object) -> bool:
        if not KeptPages(CPU).prepare(there, FILES, SPANS, lambda: False):
            return False
        done.set()
        return True

    preparation = gpu_buffers._Preparation(ask, register)
    assert preparation.wait(30)
    assert done.is_set()
    assert len(asked) == 3


def test_a_daemon_that_does_not_know_the_call_ends_the_preparation(folder: Path) -> None:
    def ask() -> Path | None:
        raise ResharderError("unknown method")

    preparation = gpu_buffers._Preparation(ask, lambda there, stop: False)
    assert preparation.wait(30)
    preparation.end()


def test_pages_that_cuda_refuses_are_not_asked_for_again(
    runtime: Runtime, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, runtime.refuses = KeptPages(torch.device("cuda", 0)), lambda begin, size: size == 12288
    assert kept.open(folder, FILES, SPANS, register=True) is None
    assert not runtime.registered
    assert all(unused_elsewhere(folder / file.path) for file in FILES)
    assert (kept.open(folder, FILES, SPANS, register=True), runtime.calls) == (None, 2)
    assert kept.prepare(folder, FILES, SPANS, lambda: False)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "CUDA cannot register the pages of the store's files: versions are copied through buffers, at about half of the speed"
    ]


def test_neighbours_are_one_run_and_rows_with_gaps_stay_tiles() -> None:
    """Tiles of 100 bytes: four that follow each other on both sides, one after a gap in the source, and rows with a gap."""
    tiles = [(0, at, 100, 0, at, 100, 1, 100) for at in (0, 100, 200, 300)]
    tiles += [(0, 500, 100, 0, 400, 100, 1, 100), (1, 0, 50, 0, 500, 80, 3, 50)]
    moves = Moves(*np.array([(0, *tile) for tile in tiles], np.int64).T)
    found = straight(moves, 1 << 20, np.array([0]))
    assert [*zip(found.source_at, found.rows, found.width, strict=True)] == [(0, 1, 400), (500, 1, 100), (0, 3, 50)]
    in_rounds = straight(moves, 200, np.array([0]))
    assert [*zip(in_rounds.round, in_rounds.width * in_rounds.rows, strict=True)] == [(0, 200), (1, 200), (2, 100), (3, 150)]
