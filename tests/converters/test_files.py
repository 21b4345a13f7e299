"""Files laid out up front are what safetensors reads, and hostile headers are refused."""

import errno
import json
import os
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.converters.storage.digest import MASK, digest
from resharder.converters.storage.files import MappedFiles, folder_layout, index_json, lay_out, parse_header, read_layout
from resharder.converters.storage.pages import in_shared_memory
from resharder.converters.storage.writable_files import WritableFiles
from resharder.server.infra.filesystem import write_zeros
from safetensors import safe_open

from tests.support.supervised import shared_memory

SPECS = [TensorSpec("b", "BF16", (3, 5)), TensorSpec("a", "F32", (7,)), TensorSpec("c", "U8", (11,)), TensorSpec("s", "F32", ())]


def write(folder: Path, limit: int = 4 << 30):
    files = lay_out(SPECS, limit)
    for file in files:
        (folder / file.path).write_bytes(file.header + bytes(file.size - len(file.header)))
    return files


@pytest.mark.parametrize("limit", [4 << 30, 32])
def test_what_is_written_through_the_map_is_what_safetensors_reads(tmp_path: Path, limit: int) -> None:
    files = write(tmp_path, limit)
    with MappedFiles(tmp_path, files, writable=True) as mapped:
        mapped.arrays["b"][...] = np.arange(15).reshape(3, 5)
        mapped.arrays["a"][...] = np.arange(7, dtype=np.float32).view(np.uint32)
    found = {}
    for file in files:
        with safe_open(tmp_path / file.path, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert torch.equal(found["a"], torch.arange(7.0))
    assert torch.equal(found["b"].view(torch.int16), torch.arange(15, dtype=torch.int16).view(3, 5))
    assert {name: tuple(t.shape) for name, t in found.items()} == {s.name: s.shape for s in SPECS}
    assert set(json.loads(index_json(files))["weight_map"]) == set(found)


def test_a_layout_read_back_from_the_files_is_the_one_they_were_laid_out_with(tmp_path: Path) -> None:
    assert read_layout(tmp_path) == ()
    assert read_layout(tmp_path) != write(tmp_path, 32)
    assert read_layout(tmp_path) == lay_out(SPECS, 32)


def test_every_tensor_is_aligned_to_its_elements() -> None:
    for file in lay_out(SPECS):
        assert all(placed.offset % {"F32": 4, "BF16": 2, "U8": 1}[placed.spec.dtype] == 0 for placed in file.tensors)


def test_tensors_are_in_the_order_of_the_numbers_in_their_names() -> None:
    """Trainers give layers one after the other: a file is complete before the last layers are written."""
    long = f"y{'9' * 5000}"
    names = ["1", "x", "x.09", "x.9", "x.9.b", "x.10.a", "x.10.a2", "x.10.a10", "x.10.b", "y", long]
    specs = [TensorSpec(name, "BF16", (4,)) for name in sorted(names)]
    (file,) = lay_out(specs)
    assert [placed.spec.name for placed in file.tensors] == names
    assert lay_out(specs[::-1]) == (file,)


def test_a_file_of_another_size_is_refused(tmp_path: Path) -> None:
    files = write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"expected .* bytes, found 5"):
        MappedFiles(tmp_path, files)


def test_a_box_that_is_written_leaves_no_pages_mapped() -> None:
    """A single thread would unmap those of all threads at the end."""
    spec = TensorSpec("t", "U8", (64, 1 << 20))
    with tempfile.TemporaryDirectory(dir=shared_memory()) as name:
        folder, (file,) = Path(name), lay_out([spec])
        write_zeros(folder / file.path, file.header, file.size)
        content = np.arange(64 << 20, dtype=np.uint8).reshape(spec.shape)
        with WritableFiles(folder, [file]) as files:
            with MappedFiles(folder, [file]) as maps:
                if not maps.small_pages:
                    pytest.skip("huge pages remain mapped until the end")
            before = mapped_kib()
            found = sum(files.put(spec, (Range(row, 8), Range(0, 1 << 20)), content[row : row + 8]) for row in range(0, 64, 8))
            assert mapped_kib() - before < 1024
        with MappedFiles(folder, [file]) as maps:
            assert np.array_equal(maps.arrays["t"], content)
            assert digest(maps.arrays["t"], full_box(spec.shape), spec.shape) == found & MASK


def test_files_in_shared_memory_are_told_from_others() -> None:
    with tempfile.TemporaryFile(dir=shared_memory()) as there, open("/proc/self/status") as elsewhere:
        assert in_shared_memory(there.fileno())
        assert not in_shared_memory(elsewhere.fileno())
    with pytest.raises(OSError, match="fstatfs"):
        in_shared_memory(-1)


def mapped_kib() -> int:
    """The pages of shared memory that are mapped in this process."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssShmem:"))
    return int(line.split()[1])


def test_of_files_that_cannot_all_be_mapped_none_stays_mapped(tmp_path: Path) -> None:
    files = write(tmp_path, 32)
    (tmp_path / files[-1].path).unlink()
    with pytest.raises(FileNotFoundError) as caught:
        MappedFiles(tmp_path, files, writable=True)
    assert caught.value.__traceback__ is not None, "whose frames still have what they made"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_of_files_that_cannot_all_be_opened_for_writing_none_stays_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, opened, os_open = write(tmp_path, 32), list[str](), os.open

    def open_thrice(path: Path, flags: int, *mode: int) -> int:
        opened.append(Path(path).name)
        if len(opened) > 3:  # each file is opened for its map, and for writes by system calls
            raise OSError(errno.EMFILE, "too many open files")
        return os_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_thrice)
    with pytest.raises(OSError, match="too many open files") as caught:  # its frames stay, as in a handler of it
        WritableFiles(tmp_path, files)
    assert opened[3] == files[1].path
    assert caught.traceback
    monkeypatch.undo()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_folder_of_whole_tensors_is_a_layout() -> None:
    layout = folder_layout({s.name: s for s in SPECS})
    assert {p.tensor: p.strides for p in layout.pieces} == {"a": (1,), "b": (5, 1), "c": (1,), "s": ()}


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


ATTACKS = {
    "not json": struct.pack("<Q", 3) + b"{{{",
    "no object": header([1, 2]),
    "no dtype": header({"w": {"shape": [1], "data_offsets": [0, 2]}}),
    "unknown dtype": header({"w": {"dtype": "X", "shape": [1], "data_offsets": [0, 2]}}),
    "offsets beyond the file": header({"w": {"dtype": "U8", "shape": [10_000], "data_offsets": [0, 10_000]}}),
    "offsets before the file": header({"w": {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]}}),
    "size that is not the shape's": header({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2]}}),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_header_is_refused(attack: str) -> None:
    with pytest.raises(ValueError, match=r"w|header|model"):
        parse_header("model.safetensors", ATTACKS[attack], 1000)


def test_a_tensor_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        content = header({"w": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]}})
        (tmp_path / f"{name}.safetensors").write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=r"w is in two files, .*a\.safetensors and .*b\.safetensors"):
        read_layout(tmp_path)


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ValueError, match="length of its header"):
        read_layout(tmp_path)
