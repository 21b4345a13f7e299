"""Files of which ranks on a host write some boxes: which pages they have, and what a node is told of them."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, full_box
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.holding.part_files import (
    PAGE_BYTES,
    FilesOnNode,
    GatheredBoxes,
    PartFile,
    files_from_proto,
    files_to_proto,
    lay_out_again,
    write_parts,
)
from resharder.server.infra.filesystem import write_zeros
from resharder.v1 import node_pb2

SPECS = [TensorSpec("matrix", "BF16", (300, 700)), TensorSpec("experts", "F32", (6, 40, 50)), TensorSpec("scale", "F32", ())]
(FILE,) = lay_out(SPECS)
OTHER = lay_out([TensorSpec("other", "BF16", (64, 64))])


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, Box]:
    spec = draw(st.sampled_from(SPECS))
    found = []
    for n in spec.shape:
        start = draw(st.integers(0, n - 1))
        step = draw(st.sampled_from([1, 1, 3]))
        count = draw(st.integers(1, (n - 1 - start) // step + 1))
        found.append(Range(start, count, step if count > 1 else 1))
    return spec.name, tuple(found)


@given(st.lists(boxes(), max_size=4))
def test_every_byte_of_the_header_and_of_a_box_has_a_page(some: list[tuple[str, Box]]) -> None:
    part = PartFile(FILE, tuple(some))
    assert all(start % PAGE_BYTES == end % PAGE_BYTES == 0 for start, end in part.spans)
    assert all(end < start for (_, end), (start, _) in zip(part.spans, part.spans[1:], strict=False)), "in order, and apart"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        write_parts(Path(folder), [part])
        path = Path(folder) / FILE.path
        taken = path.stat().st_blocks * 512
        assert path.stat().st_size == FILE.size
        assert taken >= part.size, "more with huge pages"
        assert path.read_bytes() == FILE.header + bytes(FILE.size - len(FILE.header))
        with MappedFiles(Path(folder), [FILE], writable=True) as maps:
            for name, box in some:
                maps.arrays[name].reshape(maps.specs[name].shape)[box_index(box)] = 1
        assert path.stat().st_blocks * 512 == taken, "so a full medium fails where files are laid out, and nowhere else"


def test_a_file_that_ranks_have_not_written_whole_is_laid_out_anew() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / FILE.path
        write_parts(Path(folder), [PartFile(FILE, (("experts", full_box((1, 40, 50))),))])
        lay_out_again(path, FILE)
        assert path.stat().st_blocks * 512 >= FILE.size
        inode = path.stat().st_ino
        with path.open("r+b") as file:
            file.write(b"?" * 16)
        lay_out_again(path, FILE)
        assert path.stat().st_ino == inode, "pages that a file has are used again"
        assert path.read_bytes()[: len(FILE.header)] == FILE.header


def test_a_file_that_another_version_has_or_that_is_still_read_is_laid_out_anew() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, other = Path(folder) / FILE.path, Path(folder) / "other"
        write_zeros(path, FILE.header, FILE.size)
        other.hardlink_to(path)
        lay_out_again(path, FILE)
        assert other.stat().st_nlink == path.stat().st_nlink == 1
        with path.open("rb") as reader, mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ):
            lay_out_again(path, FILE)
            assert os.fstat(reader.fileno()).st_nlink == 0, "nobody writes into what a worker has mapped"
        assert path.read_bytes() == FILE.header + bytes(FILE.size - len(FILE.header))


@given(st.lists(boxes(), min_size=1, max_size=3), st.lists(boxes(), min_size=1, max_size=3))
def test_a_node_is_told_of_its_files(written: list[tuple[str, Box]], gathered: list[tuple[str, Box]]) -> None:
    here = FilesOnNode(OTHER, (PartFile(FILE, tuple(written)),))
    there = FilesOnNode((FILE,), (), (GatheredBoxes(FILE.path, "b", tuple(gathered)),))
    for found in (here, there):
        message = node_pb2.ReservedFiles.FromString(files_to_proto(found).SerializeToString())
        assert files_from_proto(message) == found
    assert there.whole == FilesOnNode()
    assert here.whole == FilesOnNode(OTHER)


@pytest.mark.parametrize("change", ["tensor", "file", "box", "dimensions"])
def test_boxes_of_no_tensor_are_refused(change: str) -> None:
    message = files_to_proto(FilesOnNode((FILE,), (), (GatheredBoxes(FILE.path, "b", (("matrix", full_box((300, 700))),)),)))
    (each,) = message.gathered
    if change == "tensor":
        each.tensors[0] = "unknown"
    elif change == "file":
        each.path = "model-2.safetensors"
    elif change == "box":
        each.boxes[0].box.count[1] = 701
    else:
        each.boxes[0].box.count.append(1)
    with pytest.raises(ValueError, match="expected boxes of tensors in the files"):
        files_from_proto(message)
