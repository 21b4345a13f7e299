"""safetensors files laid out before their bytes exist, and mapped as arrays of raw bits.

All names, dtypes and shapes of a version are known at registration. Headers are therefore written first, and every received
byte goes to its final place.
"""

import json
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, Piece, TensorSpec, contiguous_strides, full_box
from resharder.converters.json_input import is_count, is_file_name, parse_json
from resharder.converters.storage.pages import Span, forget_pages, small_pages

Array = npt.NDArray[Any]
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
INDEX_FILE = "model.safetensors.index.json"
_ALIGNMENT = 64
_DIGITS = re.compile("([0-9]+)")


class Placed(NamedTuple):
    """Tensor and the byte offset of its first element in its file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class FileLayout:
    """Header of a safetensors file and the place of each of its tensors, in order of offset."""

    path: str  # file name
    header: bytes  # all bytes before the first tensor
    size: int  # bytes of the whole file
    tensors: tuple[Placed, ...]

    @cached_property
    def by_name(self) -> dict[str, Placed]:
        """Place of each tensor by its name."""
        return {placed.spec.name: placed for placed in self.tensors}


def lay_out(
    specs: Iterable[TensorSpec],
    max_file_bytes: int | None = None,
    homes: Mapping[str, str] = MappingProxyType({}),
    only_file: str = "",
) -> tuple[FileLayout, ...]:
    """Return the files for some tensors, named as `save_pretrained` names them.

    Tensors of wide elements come first, so that all are aligned without holes; then by name, layer 9 before layer 10. Trainers
    give layers in this order, and files are digested once they are complete.

    Args:
        specs: Tensors in any order; the result depends on their set only.
        max_file_bytes: Bound on the tensors of a file. A larger tensor has a file of its own. By default a 32nd of all bytes,
            but 256 MiB to 4 GiB: the smaller the files, the more of a version is digested before its last file is written.
        homes: Home of a tensor by its name, by default the empty string. No file has tensors of two homes.
        only_file: Name of a file for all tensors, whatever their bytes and homes.
    """
    specs = list(specs)
    if max_file_bytes is None:
        max_file_bytes = min(max(sum(spec.size for spec in specs) // 32, 256 << 20), 4 << 30)
    groups: list[list[TensorSpec]] = [[]]
    room = max_file_bytes

    def home(spec: TensorSpec) -> str:
        return homes.get(spec.name, "")

    for spec in sorted(specs, key=lambda s: (home(s), -ITEM_SIZES[s.dtype], _parts(s.name), s.name)):
        if groups[-1] and not only_file and (spec.size > room or home(spec) != home(groups[-1][-1])):
            groups.append([])
            room = max_file_bytes
        groups[-1].append(spec)
        room -= spec.size
    names = (
        [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
        if len(groups) > 1
        else [only_file or "model.safetensors"]
    )
    return tuple(_lay_out_file(name, group) for name, group in zip(names, groups, strict=True))


def _parts(name: str) -> list[str | tuple[int, str]]:
    """Return the texts and numbers of a name, alternately. Numbers compare by their value."""
    parts = _DIGITS.split(name)
    return [(len(number := part.lstrip("0")), number) if place % 2 else part for place, part in enumerate(parts)]


def _lay_out_file(path: str, specs: list[TensorSpec]) -> FileLayout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.size]}
        offset += spec.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    placed, start = [], len(header)
    for spec in specs:
        placed.append(Placed(spec, start))
        start += spec.size
    return FileLayout(path, header, start, tuple(placed))


def index_json(files: Iterable[FileLayout]) -> bytes:
    """Return the content of `model.safetensors.index.json`."""
    weight_map = {placed.spec.name: file.path for file in files for placed in file.tensors}
    total = sum(placed.spec.size for file in files for placed in file.tensors)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2).encode()


def read_layout(folder: Path) -> tuple[FileLayout, ...]:
    """Return the layout of all safetensors files of a folder, from their headers.

    Raises ValueError for an invalid file, and for a tensor name that is in two files; OSError if the folder cannot be listed.
    """
    return _read_layouts(_safetensors(folder))


def read_checkpoint_layout(folder: Path, only_file: str = "") -> tuple[FileLayout, ...]:
    """Return the layout of the files that `from_pretrained` reads.

    These are `only_file` if it is named, else the files of the index, else `model.safetensors`, else all safetensors files.

    Raises ValueError for a missing or invalid file, and for a tensor name that is in two files.
    """
    index, single = folder / INDEX_FILE, folder / "model.safetensors"
    if only_file:
        paths = [folder / only_file]
    elif index.is_file():
        names = _indexed_files(index)
        paths = [folder / name for name in names]
    else:
        paths = [single] if single.is_file() else _safetensors(folder)
    missing = [path.name for path in paths if not path.is_file()]
    if missing or not paths:
        raise ValueError(f"{folder} has no safetensors file named {', '.join(missing[:4]) or '*.safetensors'}")
    return _read_layouts(paths)


def _safetensors(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. `Path.glob` would take one that cannot be listed for an empty one."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(".safetensors"))


def _indexed_files(index: Path) -> list[str]:
    """Return the names of the files that an index lists, sorted. Raises ValueError for another content."""
    try:
        names = set(parse_json(index.read_bytes())["weight_map"].values())
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{index}: its `weight_map` does not name the file of each tensor: {error!r}") from error
    if strange := [name for name in names if not is_file_name(name)]:
        raise ValueError(f"{index}: expected plain file names, found {str(strange[0])[:80]!r}")
    return sorted(names)


def _read_layouts(paths: Sequence[Path]) -> tuple[FileLayout, ...]:
    files = tuple(parse_header(path.name, _read_header(path), path.stat().st_size) for path in paths)
    try:
        check_one_file_each(files)
    except ValueError as error:
        raise ValueError(f"{paths[0].parent}: {error}") from error
    return files


def check_one_file_each(files: Iterable[FileLayout]) -> None:
    """Raise ValueError if a tensor is in two files."""
    file_of: dict[str, str] = {}
    for file in files:
        for name in file.by_name:
            if (first := file_of.setdefault(name, file.path)) != file.path:
                raise ValueError(f"{name} is in two files, {first} and {file.path}")


def _read_header(path: Path) -> bytes:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= path.stat().st_size - 8:
            raise ValueError(f"{path}: expected a safetensors file, found {length} as the length of its header")
        return prefix + file.read(length)


@lru_cache(maxsize=1024)
def parse_header(path: str, header: bytes, size: int) -> FileLayout:
    """Return the layout described by a safetensors header.

    Results are cached: the versions of a model have identical headers.

    Args:
        path: File name for the layout and for messages.
        header: All bytes before the first tensor, the 8-byte length included.
        size: Bytes of the whole file.

    Raises ValueError for an invalid header.
    """
    try:
        entries = parse_json(header[8:])
    except ValueError as error:
        raise ValueError(f"{path}: its safetensors header is invalid: {error!r}") from error
    try:
        placed = []
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            spec = TensorSpec(name, entry["dtype"], tuple(entry["shape"]))
            if not all(map(is_count, (*spec.shape, *entry["data_offsets"]))):
                raise ValueError(f"{path}: shape and offsets of {name} are not integers of 0 or more")
            start, end = entry["data_offsets"]
            if end - start != spec.size or not 0 <= start <= end <= size - len(header):
                raise ValueError(f"expected {spec.size} bytes of {name} in a file of {size}, got {start}:{end}")
            placed.append(Placed(spec, len(header) + start))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: its safetensors header is invalid: {error!r}") from error
    return FileLayout(path, header, size, tuple(sorted(placed, key=lambda p: p.offset)))


class MappedArrays(Mapping[str, Array]):
    """Tensors of mapped files as arrays of unsigned integers, each made when requested: a version may have many thousands."""

    def __init__(self, files: tuple[FileLayout, ...], content: list[Array]) -> None:
        self._files, self._content = files, content

    @property
    def contents(self) -> list[Array]:
        """Bytes of each file."""
        return list(self._content)

    def __getitem__(self, name: str) -> Array:
        for file, raw in zip(self._files, self._content, strict=True):
            if placed := file.by_name.get(name):
                spec, offset = placed
                return raw[offset : offset + spec.size].view(BITS[ITEM_SIZES[spec.dtype]]).reshape(spec.shape)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            yield from file.by_name

    def __len__(self) -> int:
        return sum(len(file.tensors) for file in self._files)

    def clear(self) -> None:
        """Release the content. The mapping is empty afterwards."""
        self._files, self._content = (), []


class MappedFiles:
    """Tensors of a folder of laid-out files, mapped as arrays of unsigned integers in the tensors' shapes.

    `close` clears `arrays`. Arrays taken from it must be released before. If a file cannot be mapped, none stays mapped: a daemon
    waits until nothing else has the files of a version open.
    """

    def __init__(self, folder: Path, files: Iterable[FileLayout], *, writable: bool = False) -> None:
        self._maps: list[tuple[mmap.mmap, Span]] = []
        self._folder, self._files = folder, tuple(files)
        self.small_pages = False  # whether any file has small pages
        self.arrays = MappedArrays((), [])
        self._content: dict[Path, Array] = {}
        content: list[Array] = []
        try:
            for file in self._files:
                content.append(self._map(file, writable=writable))
        except BaseException:
            content.clear()
            self.close()
            raise
        self.arrays = MappedArrays(self._files, content)
        self._content = {self._folder / file.path: raw for file, raw in zip(self._files, content, strict=True)}

    def _map(self, file: FileLayout, *, writable: bool) -> Array:
        path = self._folder / file.path
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            if size != file.size:
                raise ValueError(f"{path}: expected {file.size} bytes, found {size}")
            self.small_pages |= small_pages(descriptor)
            mapped = mmap.mmap(descriptor, file.size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        content = np.frombuffer(mapped, dtype=np.uint8)
        self._maps.append((mapped, byte_bounds(content)))
        return content

    @property
    def contents(self) -> list[Array]:
        """Bytes of each file, in the order of the files. Like `arrays`, they must be released before `close`."""
        return self.arrays.contents

    def content(self, path: Path) -> Array:
        """Return the bytes of the file at a path of `places`. Must be released before `close`, as `arrays`."""
        return self._content[path]

    @property
    def begins(self) -> list[int]:
        """Address of the first byte of each file, in the order of the files."""
        return [begin for _, (begin, _) in self._maps]

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Spec of each tensor by its name."""
        return {name: placed.spec for file in self._files for name, placed in file.by_name.items()}

    @cached_property
    def places(self) -> dict[str, tuple[Path, int]]:
        """File of each tensor, and offset in it, by the tensor's name."""
        paths = [(self._folder / file.path, file) for file in self._files]
        return {name: (path, placed.offset) for path, file in paths for name, placed in file.by_name.items()}

    def close(self) -> None:
        """Unmap the files. Raises BufferError if an array of them is still referenced."""
        self.arrays.clear()
        self._content.clear()
        while self._maps:
            mapped, span = self._maps.pop()
            forget_pages(span)
            mapped.close()

    def __enter__(self) -> "MappedFiles":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def folder_layout(specs: Mapping[str, TensorSpec]) -> Layout:
    """Return the layout of a folder with these tensors, each whole; its local tensors are the HF tensors."""
    pieces = []
    for spec in specs.values():
        pieces.append(Piece(spec.name, full_box(spec.shape), spec.name, 0, contiguous_strides(spec.shape)))
    return Layout(dict(specs), tuple(pieces))
