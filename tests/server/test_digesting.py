"""Digests by shares: small boxes together, large ones in parts, by any number of threads."""

import os
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, parse_header
from resharder.server.store import digests
from resharder.server.store.digests import TensorBox, digest_boxes, digest_tensors
from safetensors.numpy import save_file

SPECS = {
    "experts": TensorSpec("experts", "F16", (6, 40, 24)),
    "head": TensorSpec("head", "F32", (90, 33)),
    "norm": TensorSpec("norm", "F16", (130,)),
    "scale": TensorSpec("scale", "F32", ()),
    "empty": TensorSpec("empty", "F16", (0, 4)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digesting")
    random = np.random.default_rng(0)
    kinds = {"F16": np.float16, "F32": np.float32}
    save_file({s.name: np.array(random.normal(size=s.shape), kinds[s.dtype]) for s in SPECS.values()}, path / "a.safetensors")
    return path


def mapped(folder: Path) -> MappedFiles:
    path = folder / "a.safetensors"
    start = path.read_bytes()
    return MappedFiles(folder, [parse_header(path.name, start[: 8 + int.from_bytes(start[:8], "little")], len(start))])


@st.composite
def boxes(draw: st.DrawFn) -> list[TensorBox]:
    found = []
    for name in draw(st.lists(st.sampled_from(sorted(SPECS)), max_size=12)):
        box: list[Range] = []
        for n in SPECS[name].shape:
            start = draw(st.integers(0, max(0, n - 1)))
            step = draw(st.integers(1, 3))
            most = -(-(n - start) // step) if n else 0
            count = draw(st.integers(1, most)) if most else 0
            box.append(Range(start, count, step if count > 1 else 1))
        found.append(TensorBox(SPECS[name], tuple(box)))
    return found


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    asked=boxes(),
    share=st.sampled_from([2, 100, 3000, 1 << 20]),
    read=st.sampled_from([2, 64, 1000, 1 << 20]),
    threads=st.sampled_from([1, 3]),
    small_pages=st.booleans(),
)
def test_shares_add_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[TensorBox], share: int, read: int, threads: int, small_pages: bool
) -> None:
    monkeypatch.setattr(digests, "_SHARE_BYTES", share)
    monkeypatch.setattr(digests, "_READ_BYTES", read)
    monkeypatch.setattr(digests, "_FORGET_BYTES", 1)
    with mapped(folder) as files:
        files.small_pages = small_pages
        found = digest_boxes(files, asked, threads)
        assert found == [alone(files, spec, box) for spec, box in asked]
        assert len(files.arrays) == len(SPECS)


def alone(files: MappedFiles, spec: TensorSpec, box: Box) -> int:
    array = files.arrays[spec.name]
    return digest(array[box_index(box)] if box else array, box, spec.shape)


@pytest.mark.parametrize("small_pages", [True, False])
def test_a_changed_byte_changes_its_tensor_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, small_pages: bool) -> None:
    monkeypatch.setattr(digests, "_SHARE_BYTES", 1000)
    with mapped(folder) as files:
        files.small_pages = small_pages
        before = digest_tensors(files, 2)
        assert before == {name: alone(files, spec, full_box(spec.shape)) for name, spec in files.specs.items()}
        path, begin = files.places["head"]
        with path.open("r+b") as file:
            file.seek(begin + (89 * 33 + 32) * 4)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        after = digest_tensors(files, 2)
    assert {name for name in before if before[name] != after[name]} == {"head"}


def test_a_file_that_was_cut_short_is_no_digest(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with mapped(tmp_path) as files:
        assert files.small_pages
        os.truncate(tmp_path / "a.safetensors", 200)
        with pytest.raises(OSError, match=r"the file ends [0-9]+ bytes after"):
            digest_tensors(files, 2)


def test_huge_pages_are_digested_where_they_are_mapped_and_small_ones_from_one_buffer_of_a_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    real = os.open

    def recorded(path: Path, *rest: Any, **named: Any) -> int:
        opened.extend([path] if path == folder / "a.safetensors" else [])
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", recorded)
    with mapped(folder) as files:
        opened.clear()
        files.small_pages = False
        digest_tensors(files, 1)
        assert opened == []
        before = open_in(folder)
        files.small_pages = True
        digest_tensors(files, 1)
        assert (opened, open_in(folder)) == ([folder / "a.safetensors"], before)


def open_in(folder: Path) -> list[str]:
    """Return the files of a folder that this process has open, once for each descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # a thread has closed it, as the list of descriptors itself is
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("bound", [-1, 0, 1])
@pytest.mark.parametrize("small_pages", [True, False])
def test_large_parts_on_small_pages_alone_are_unmapped_once_they_are_digested(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_pages: bool, bound: int
) -> None:
    box = TensorBox(SPECS["head"], (Range(0, 90), Range(3, 20)))  # in pieces, so that it is not read into a buffer
    forgotten: list[tuple[int, int]] = []
    monkeypatch.setattr(digests, "forget_pages", forgotten.append)
    monkeypatch.setattr(digests, "_FORGET_BYTES", 90 * 20 * 4 + bound)
    with mapped(folder) as files:
        files.small_pages = small_pages
        part = files.arrays["head"][:, 3:23]
        digest_boxes(files, [box], 1)
        assert forgotten == ([byte_bounds(part)] if small_pages and bound <= 0 else [])
        del part


def test_reads_of_a_thread_share_a_buffer_that_grows_and_go_on_where_the_system_stopped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: real(file, [buffers[0][:7]], at))
    monkeypatch.setattr(digests, "_READ_BYTES", 16)
    rows = [(Range(row, count), Range(0, 33)) for row, count in ((3, 1), (5, 1), (0, 90), (1, 89))]
    with mapped(folder) as files, closing(digests._Reads(files, [TensorBox(SPECS["head"], rows[0])])) as reads:
        buffers = []
        path, begin = files.places["head"]
        for box in rows:
            found = reads.read(path, begin + box[0].start * 33 * 4, box[0].count * 33 * 4)
            assert found.tobytes() == files.arrays["head"][box[0].start : box[0].start + box[0].count].tobytes()
            buffers.append(reads._own.buffer)
        assert buffers[0] is buffers[1]
        assert buffers[2] is buffers[3]
        assert [len(buffer) for buffer in buffers] == [33 * 4, 33 * 4, 90 * 33 * 4, 90 * 33 * 4]


@pytest.mark.parametrize("small_pages", [True, False])
def test_small_tensors_that_follow_each_other_take_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pages: bool
) -> None:
    random = np.random.default_rng(1)
    tensors = {f"layer.{i}": random.normal(size=(3 + i % 5, 16)).astype(np.float16) for i in range(100)}
    save_file(tensors, tmp_path / "a.safetensors")
    calls: list[int] = []
    real = digests.digest_matrices

    def counted(memory: Any, matrices: Any) -> Any:
        calls.append(len(matrices))
        return real(memory, matrices)

    monkeypatch.setattr(digests, "digest_matrices", counted)
    with mapped(tmp_path) as files:
        files.small_pages = small_pages
        found = digest_tensors(files, 2)
        assert found == {name: alone(files, spec, full_box(spec.shape)) for name, spec in files.specs.items()}
    assert calls == [100]
