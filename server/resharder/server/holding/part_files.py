"""Files of one epoch on a node, and which boxes of them ranks write on one node for another.

A file of which ranks on a node's host write some boxes, and whose home is another node, has the layout of the whole file, and
pages for the bytes from the first to the last one of each box alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, contiguous_strides, is_inside
from resharder.converters.storage.files import FileLayout, parse_header
from resharder.converters.wire.boxes import box_from_proto, boxes_to_proto
from resharder.server.infra.filesystem import unused_elsewhere, write_header, write_zeros
from resharder.v1 import node_pb2

AHEAD = 2
"""Sets of a reservation for which a node keeps memory free, beside the versions that it holds."""


PAGE_BYTES = 4096
"""Unit of the pages of a file."""


class GatheredBoxes(NamedTuple):
    """Boxes of tensors of the file `path` that ranks write on the host of `node`, which is not the file's home."""

    path: str
    node: str
    boxes: tuple[tuple[str, Box], ...]


@dataclass(frozen=True)
class FileProof:
    """Digest of each tensor of a file, in its order, and xxh3_64 of each part of at most 16 MiB."""

    digests: tuple[int, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class PartFile:
    """A file of a node on which ranks write `boxes`, given as (tensor's name, box); its home is another node."""

    layout: FileLayout
    boxes: tuple[tuple[str, Box], ...]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of each run of pages that have bytes of the header or of a box, in order."""
        return _pages([(0, len(self.layout.header)), *self._extents()])

    @property
    def size(self) -> int:
        """Bytes of these pages."""
        return sum(end - start for start, end in self.spans)

    def _extents(self) -> Iterable[tuple[int, int]]:
        for name, box in self.boxes:
            spec, offset = self.layout.by_name[name]
            start, end = box_extent(spec, box)
            yield offset + start, offset + end


@dataclass(frozen=True)
class FilesOnNode:
    """Files of one epoch on a node.

    Attributes:
        files: Those of which it is the home.
        parts: Those of which ranks there write boxes that other nodes gather.
        gathered: Boxes of `files` that it gathers from other nodes.
        frozen: Paths of those of `files` that versions may share.
    """

    files: tuple[FileLayout, ...] = ()
    parts: tuple[PartFile, ...] = ()
    gathered: tuple[GatheredBoxes, ...] = ()
    frozen: frozenset[str] = frozenset()

    @cached_property
    def whole(self) -> "FilesOnNode":
        """The files of which ranks on the node's host write all boxes, and no others."""
        late = {each.path for each in self.gathered}
        return FilesOnNode(tuple(file for file in self.files if file.path not in late), frozen=self.frozen)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files) + sum(part.size for part in self.parts)


def write_parts(folder: Path, parts: Iterable[PartFile]) -> None:
    """Lay out the parts of a set. Raises MediumRefused."""
    for part in parts:
        write_zeros(folder / part.layout.path, part.layout.header, part.layout.size, part.spans)


def lay_out_again(path: Path, file: FileLayout) -> None:
    """Lay out a file of a set that has been used.

    A file that lacks pages, as one that ranks did not write, is created anew, and so is one that another version has too. Where
    that version has just ended, a worker may still read the file under its other name: it is created anew too.

    Raises OSError.
    """
    found = path.stat()
    own = found.st_nlink == 1 and unused_elsewhere(path)
    if own and found.st_size == file.size and found.st_blocks * 512 >= file.size:
        write_header(path, file.header)
    else:
        path.unlink()
        write_zeros(path, file.header, file.size)


def keep_only(folder: Path, files: Iterable[FileLayout]) -> None:
    """Unlink all other files of a set: parts, whose boxes are in files of other nodes, and files that the version has elsewhere.

    Raises OSError.
    """
    kept = {file.path for file in files}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()


def files_to_proto(found: FilesOnNode) -> node_pb2.ReservedFiles:
    """Convert the files of a node."""
    written = [GatheredBoxes(part.layout.path, "", part.boxes) for part in found.parts]
    return node_pb2.ReservedFiles(
        files=map(_file, found.files),
        parts=[_file(part.layout) for part in found.parts],
        gathered=map(boxes_of_file_to_proto, (*written, *found.gathered)),
        frozen=sorted(found.frozen),
    )


def files_from_proto(found: node_pb2.ReservedFiles) -> FilesOnNode:
    """Return the files of a message. Raises ValueError for names, headers or boxes that are none."""
    files, parts = [*map(_layout, found.files)], [*map(_layout, found.parts)]
    try:
        boxes = [*map(boxes_of_file, found.gathered)]
        specs = {file.path: file.by_name for file in (*files, *parts)}
        for each in boxes:
            for name, box in each.boxes:
                if not is_inside(box, specs[each.path][name].spec.shape):
                    raise LayoutError(f"{each.path}, {name}: a box lies outside of the tensor")
    except (LayoutError, KeyError, IndexError) as error:
        raise ValueError(f"expected boxes of tensors in the files: {error!r}") from error
    written = {each.path: each.boxes for each in boxes if not each.node}
    return FilesOnNode(
        tuple(files),
        tuple(PartFile(file, written.get(file.path, ())) for file in parts),
        tuple(each for each in boxes if each.node),
        frozenset(found.frozen) & {file.path for file in files},
    )


def _file(file: FileLayout) -> node_pb2.ReservedFile:
    return node_pb2.ReservedFile(path=file.path, header=file.header, size_bytes=file.size)


def _layout(file: node_pb2.ReservedFile) -> FileLayout:
    return parse_header(Path(file.path).name, file.header, file.size_bytes)


def boxes_of_file_to_proto(found: GatheredBoxes) -> node_pb2.GatheredBoxes:
    """Convert boxes of one file."""
    names = list(dict.fromkeys(name for name, _ in found.boxes))
    number = {name: i for i, name in enumerate(names)}
    boxes = boxes_to_proto((number[name], box, False) for name, box in found.boxes)
    return node_pb2.GatheredBoxes(path=found.path, node=f"nodes/{found.node}" if found.node else "", tensors=names, boxes=boxes)


def boxes_of_file(found: node_pb2.GatheredBoxes) -> GatheredBoxes:
    """Return the boxes of a message. Raises LayoutError, IndexError."""
    boxes = tuple((found.tensors[each.tensor], box_from_proto(each.box)) for each in found.boxes)
    return GatheredBoxes(found.path, found.node.removeprefix("nodes/"), boxes)


def box_extent(spec: TensorSpec, box: Box) -> tuple[int, int]:
    """Return the first byte of a box in its tensor, and the end of its last one."""
    strides = contiguous_strides(spec.shape)
    first = sum(r.start * stride for r, stride in zip(box, strides, strict=True))
    last = sum(r.last * stride for r, stride in zip(box, strides, strict=True))
    return first * ITEM_SIZES[spec.dtype], (last + 1) * ITEM_SIZES[spec.dtype]


def _pages(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list[tuple[int, int]]()
    for start, end in sorted(extents):
        start, end = start // PAGE_BYTES * PAGE_BYTES, -(-end // PAGE_BYTES) * PAGE_BYTES
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found
