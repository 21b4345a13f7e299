"""Files of UPLOADING versions on nodes, into which ranks on the nodes' hosts write.

A file's home is a node if ranks on the node's host send all tensors of the file. The home of a tensor of which ranks of several
hosts send parts gathers them after the last seal: each rank writes into a file on its own host. Which home a file may have is
fixed with the layout of an epoch; whether it has that home in one version, when the version begins.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from resharder.converters.geometry.layout import Box
from resharder.converters.geometry.piece_arrays import Ints
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.server.infra.checksums import part_checksums
from resharder.server.ingest.boxes import PackedBoxes
from resharder.server.state.version import DAEMON
from resharder.server.store.manifest import VerifiedVersion
from resharder.server.store.partial import MissingPieces

Readable = Mapping[str, bytes]
"""Nonce files that a rank has read, and their contents."""


class NodeHome(NamedTuple):
    """A node's files of one UPLOADING version.

    Attributes:
        node: Id of the node.
        folder: Folder of the files on the node's host.
        files: Paths of those of which it is the home. None where ranks write boxes alone that other nodes gather.
        gathers: Whether ranks write boxes of tensors there of which ranks of other hosts send parts.
    """

    node: str
    folder: str
    files: tuple[str, ...]
    gathers: bool = False


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


class HomeLost(Exception):
    """A node that cannot verify or send the files that ranks have written. The message has the reason."""


class ReplicasShort(Exception):
    """Too few nodes hold a version. The message has the reason."""


Replicate = Callable[[Sequence[VerifiedVersion], Callable[[], bool]], object]
"""Function that has nodes hold verified versions, and returns once they do. Raises ReplicasShort, also once the second argument
returns True: a version is aborted."""


class NodeNonces(NamedTuple):
    """Nonces of nodes.

    Attributes:
        files: Paths of the nonce files of live nodes that are not drained.
        settled: SHA-256 of the nonces of live nodes, and of nodes that are gone, as hexadecimal digits: no rank waits for them.
    """

    files: tuple[str, ...]
    settled: tuple[str, ...]


class HomeNodes(Protocol):
    """Nodes as homes of files. Thread-safe; no method calls ingest."""

    def nonces(self) -> NodeNonces:
        """Return where ranks find the nonces of nodes, and for which nodes no rank waits."""

    def host_of(self, readable: Readable) -> str | None:
        """Return the host of a rank that has read these nonce files: `DAEMON` or the id of a node; None if unknown."""

    def reserve(
        self, publisher: str, files: Sequence[FileLayout], homes: Mapping[str, str], gathered: Sequence[GatheredBoxes] = ()
    ) -> None:
        """Have nodes lay out the files of an epoch, in place of those of the model's earlier epochs.

        Args:
            publisher: Resource name of the publisher.
            files: All files of a version.
            homes: Id of the node of each file whose home is one, by path; none to end the publisher's reservation.
            gathered: Boxes that homes fetch from other nodes.
        """

    def take(self, publisher: str, version: str, ranks: Mapping[str, Sequence[Readable]]) -> tuple[NodeHome, ...]:
        """Take a set of files for a version on each node that has one. Blocks for a few seconds while nodes lay them out.

        Nodes gather boxes from each other in a version that has a set of all of these nodes, or none does.

        Args:
            publisher: Resource name of the publisher.
            version: Resource name of the UPLOADING version.
            ranks: For each node, what the ranks that would write there have read last.
        """

    def problem(self, version: str) -> str:
        """Return why a version cannot complete because it has lost a home; empty if it has not."""

    def closed(self, version: str, files: Collection[str]) -> None:
        """Have the version's homes verify some of their files, which all ranks have closed, while ranks still write others."""

    def verify(self, version: str) -> None:
        """Have the version's homes verify their files: all ranks have sealed."""

    def proofs(self, version: str, seconds: float) -> Mapping[str, FileProof]:
        """Wait for the proofs of all homes, and return them by file. Raises HomeLost, also after `seconds`."""

    def fetch(
        self, version: str, folder: Path, proofs: Mapping[str, FileProof], stopped: Callable[[], bool], *, whole: bool
    ) -> None:
        """Copy the files of all homes into the version's folder. A node that does not deliver them is no home for some time.

        Args:
            version: Resource name of the UPLOADING version.
            folder: Its folder.
            proofs: Proofs of the files.
            stopped: Returns whether the version is aborted.
            whole: Copy all; otherwise only the shortest part of each node, which shows that the daemon reaches it.

        Raises HomeLost, OSError.
        """


class NoNodes:
    """`HomeNodes` of a daemon without nodes."""

    def nonces(self) -> NodeNonces:
        return NodeNonces((), ())

    def host_of(self, readable: Readable) -> str | None:
        return None

    def reserve(
        self, publisher: str, files: Sequence[FileLayout], homes: Mapping[str, str], gathered: Sequence[GatheredBoxes] = ()
    ) -> None:
        """Do nothing: without nodes there are no homes."""

    def take(self, publisher: str, version: str, ranks: Mapping[str, Sequence[Readable]]) -> tuple[NodeHome, ...]:
        return ()

    def problem(self, version: str) -> str:
        return ""

    def closed(self, version: str, files: Collection[str]) -> None:
        """Do nothing."""

    def verify(self, version: str) -> None:
        """Do nothing."""

    def proofs(self, version: str, seconds: float) -> Mapping[str, FileProof]:
        return {}

    def fetch(
        self, version: str, folder: Path, proofs: Mapping[str, FileProof], stopped: Callable[[], bool], *, whole: bool
    ) -> None:
        """Do nothing."""


def boxes_at_home(homes: Mapping[int, str], boxes: PackedBoxes) -> Ints:
    """Return the positions of boxes that a rank may write on its host's node. `homes`: a node by the tensor's number."""
    return np.flatnonzero(np.isin(boxes.tensors, list(homes))) if homes else np.zeros(0, np.int64)


def ranks_at_home(homes: Mapping[int, str], boxes: Mapping[int, PackedBoxes], hosts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that may write on the node of their host, by node."""
    found: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        if host != DAEMON and len(boxes_at_home(homes, boxes[rank])):
            found.setdefault(host, []).append(rank)
    return found


_LEAST_SECONDS, _BYTES_PER_SECOND = 60.0, 100 << 20  # for a node's proof


class HomeFiles:
    """The files of one UPLOADING version whose homes are nodes.

    Args:
        nodes: The nodes.
        version: Resource name of the version.
        homes: Its homes.
        files: All of its files.
    """

    def __init__(self, nodes: HomeNodes, version: str, homes: Iterable[NodeHome], files: Iterable[FileLayout]) -> None:
        self._nodes, self._version, self.homes = nodes, version, tuple(homes)
        paths = {path for home in self.homes for path in home.files}
        self.files = tuple(file for file in files if file.path in paths)
        self.paths = frozenset(paths)

    def of(self, host: str | None) -> NodeHome | None:
        """Return the home of ranks on a host; None if they send all boxes to the daemon."""
        return next((home for home in self.homes if home.node == host), None)

    def closed(self, files: Collection[str]) -> None:
        """Have the nodes verify some of their files, which all ranks have closed."""
        if files:
            self._nodes.closed(self._version, files)

    def verify(self) -> None:
        """Have the nodes verify their files: all ranks have sealed."""
        if self.files:
            self._nodes.verify(self._version)

    def digests(self) -> dict[str, int]:
        """Wait for the nodes, and return the digest that each reports of each tensor in its files. Raises HomeLost."""
        proofs, found = self._proofs(), dict[str, int]()
        for file in self.files:
            found |= zip(file.by_name, proofs[file.path].digests, strict=True)
        return found

    def fetch(self, folder: Path, stopped: Callable[[], bool], *, whole: bool) -> None:
        """Copy the files from the nodes into a folder that has their layout, by the checksums of the proofs.

        Unless `whole`, only the shortest part of each node, which shows that the daemon reaches it. Raises HomeLost, OSError.
        """
        if self.files:
            self._nodes.fetch(self._version, folder, self._proofs(), stopped, whole=whole)

    def missing(self, folder: Path, files: Sequence[FileLayout]) -> MissingPieces:
        """Return the pieces of these files, as pieces of a version with `files`, the others of which are in `folder`.

        Raises HomeLost, OSError.
        """
        proofs, numbering = self._proofs(), number_pieces(files)
        own = {file.path: part_checksums(folder / file.path, file.size) for file in files if file.path not in self.paths}
        checksums = [value for file in files for value in own.get(file.path) or proofs[file.path].checksums]
        held = Bitmap.of(
            numbering.count, (n for file in files if file.path in own for n in numbering.touched(file.path, 0, file.size))
        )
        return MissingPieces(held, tuple(checksums), frozenset(home.node for home in self.homes if home.files))

    def _proofs(self) -> Mapping[str, FileProof]:
        if not self.files:
            return {}
        size = sum(file.size for file in self.files)
        return self._nodes.proofs(self._version, max(_LEAST_SECONDS, size / _BYTES_PER_SECOND))
