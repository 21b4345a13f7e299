"""Sources of a trainer's weights: a folder with a Hugging Face checkpoint, or a version of the daemon.

A source is a folder's path, or `resharder://HOST:PORT/models/MODEL/versions/NUMBER` (or `…/versions/latest`).
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from resharder.client.errors import CorruptData, NotFound, ResharderError, UsageError
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.transport.shared_memory import shares_memory
from resharder.client.versions.manifest import Arrived, VersionManifest, expected_digests, get_manifest
from resharder.client.versions.port_reader import PortReader
from resharder.converters.checkpoint_files import folder_names
from resharder.converters.geometry.layout import Box, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import Array, digest
from resharder.converters.storage.files import FileLayout, MappedFiles, read_checkpoint_layout
from resharder.converters.wire.windows import BoxPart, cut_windows

if TYPE_CHECKING:
    import torch


SCHEME = "resharder://"
logger = logging.getLogger(__name__)
_VERSION = re.compile(SCHEME + r"(?P<endpoint>[^/]+:\d+)/models/(?P<model>[A-Za-z0-9._-]+)/versions/(?P<number>\d+|latest)")

Wanted = tuple[str, Box]


class WeightSource(Protocol):
    """Whole checkpoint from which boxes of HF tensors are read."""

    name: str
    specs: Mapping[str, TensorSpec]

    def parts(self, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        """Yield the boxes, whole or in parts; a part may be repeated. An array is valid until the next one."""
        ...

    def digests(self, wanted: Sequence[Wanted]) -> Mapping[Wanted, int]:
        """Return the digests of the boxes as the source has them."""
        ...


@contextmanager
def open_source(source: str | Path, *, shared: bool = True, base: str = "") -> Iterator[WeightSource]:
    """Open a source while the block runs.

    `latest` is the newest READY version. If torch.distributed has several ranks, rank 0 decides, by one broadcast.

    Args:
        source: Folder, or `resharder://` URL of a version.
        shared: Map a version's files if this process can read the daemon's store.
        base: For a folder, the base of the adapter in it; empty for a model of its own.

    Raises:
        UsageError: The folder or the URL is invalid.
        NotFound: There is no such version.
        DaemonUnreachable: The daemon cannot be reached.
    """
    with ExitStack() as stack:
        if not str(source).startswith(SCHEME):
            folder = Path(source)
            yield _FolderSource(str(folder), _mapped(stack, folder, base=base))
            return
        found = _VERSION.fullmatch(str(source))
        if found is None:
            raise UsageError(f"expected {SCHEME}HOST:PORT/models/MODEL/versions/NUMBER (or latest), got {source}")
        operator = stack.enter_context(Operator(found["endpoint"], connect_timeout=60))
        name = f"models/{found['model']}/versions/{_agreed(operator, found['model'], found['number'])}"
        channel = stack.enter_context(Channel(found["endpoint"]))
        manifest = get_manifest(channel, name)
        store = operator.daemon().store
        if shared and store is not None and manifest.folder and shares_memory(store):
            yield _SharedVersion(channel, manifest, _mapped(stack, Path(manifest.folder), manifest.files))
        else:
            yield _Version(channel, manifest)


class _FolderSource:
    """Mapped safetensors files. Only pages of requested boxes are read."""

    def __init__(self, name: str, files: MappedFiles) -> None:
        self.name, self._files = name, files
        self.specs: Mapping[str, TensorSpec] = files.specs

    def parts(self, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        for position, (name, box) in enumerate(wanted):
            array = self._files.arrays[name]
            yield Arrived(position, box, array[box_index(box)] if box else array)

    def digests(self, wanted: Sequence[Wanted]) -> Mapping[Wanted, int]:
        return {wanted[i]: digest(array, box, self.specs[wanted[i][0]].shape) for i, box, array in self.parts(wanted)}


class _Version:
    """Version of a daemon on another host, or one whose files this process cannot read."""

    def __init__(self, channel: Channel, manifest: VersionManifest) -> None:
        self.name = manifest.name
        self.specs: Mapping[str, TensorSpec] = manifest.specs
        self._channel, self._manifest = channel, manifest

    def parts(self, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        return read_boxes(self._channel, self._manifest, wanted)

    def digests(self, wanted: Sequence[Wanted]) -> Mapping[Wanted, int]:
        needs: dict[str, list[Box]] = {}
        for name, box in wanted:
            needs.setdefault(name, []).append(box)
        return expected_digests(self._channel, self._manifest, {name: tuple(boxes) for name, boxes in needs.items()})


class _SharedVersion(_Version):
    """Version whose files are mapped. The store retains them while they are mapped."""

    def __init__(self, channel: Channel, manifest: VersionManifest, files: MappedFiles) -> None:
        super().__init__(channel, manifest)
        self._files = _FolderSource(manifest.name, files)

    def parts(self, wanted: Sequence[Wanted]) -> Iterator[Arrived]:
        return self._files.parts(wanted)


def _mapped(stack: ExitStack, folder: Path, files: Sequence[FileLayout] = (), base: str = "") -> MappedFiles:
    if not folder.is_dir():
        raise UsageError(f"expected a folder with a checkpoint, or {SCHEME}…, got {folder}")
    try:
        mapped = MappedFiles(folder, files or read_checkpoint_layout(folder, folder_names(base).weights))
    except ValueError as error:
        raise UsageError(str(error)) from error
    # Not closed: frames of an error may still reference arrays. The maps end with the last reference.
    stack.callback(mapped.arrays.clear)
    return mapped


def _agreed(operator: Operator, model: str, number: str) -> int:
    """Return the number of the version that all ranks use."""
    if number != "latest":
        return int(number)
    import torch
    import torch.distributed as dist

    found, problem = 0, None
    try:
        found = operator.latest(model).number
    except ResharderError as error:
        problem = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend()) else torch.device("cpu")
        shared = torch.tensor([found], device=device)
        dist.broadcast(shared, src=0)
        found = int(shared)
    if not found:
        raise problem or NotFound(f"model {model!r} has no READY version that rank 0 could find")
    return found


def read_boxes(channel: Channel, manifest: VersionManifest, boxes: Sequence[tuple[str, Box]]) -> Iterator[Arrived]:
    """Yield boxes, given as (tensor's name, box), in parts and in order.

    Every chunk has a checksum, and the version is pinned until the last one. Raises as `PortReader.read` does.
    """
    windows = cut_windows([BoxPart(i, *box) for i, box in enumerate(boxes)], manifest.specs)
    for parts in PortReader(channel, manifest).windows(windows):
        yield from parts


def whole_tensors(source: WeightSource) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors of a source with their names, in host memory, only to be read. Each has the digest of the source.

    Raises:
        CorruptData: A digest differs.
        DaemonUnreachable: The daemon cannot be reached.
    """
    from resharder.converters.models.tensor_io import tensor_of_bits

    wanted = [(name, full_box(spec.shape)) for name, spec in source.specs.items()]
    expected = source.digests(wanted)
    for (name, box), array in zip(wanted, _arrays(source), strict=True):
        spec = source.specs[name]
        found = digest(array, box, spec.shape)
        if found != expected[name, box]:
            raise CorruptData(f"{source.name}: {name}: expected digest {expected[name, box]:016x}, got {found:016x}")
        yield name, tensor_of_bits(array, spec.dtype)


def _arrays(source: WeightSource) -> Iterator[Array]:
    """Yield the elements of all tensors; a tensor that arrives in parts is assembled first."""
    shapes = [spec.shape for spec in source.specs.values()]
    current, array = 0, None
    for position, box, bits in source.parts([(name, full_box(spec.shape)) for name, spec in source.specs.items()]):
        if position != current:
            assert array is not None
            yield array
            current, array = position, None
        if box == full_box(shapes[position]):
            array = bits
            continue
        if array is None:
            array = np.empty(shapes[position], bits.dtype)
        array[box_index(box)] = bits
    if array is not None:
        yield array
