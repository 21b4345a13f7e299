"""The daemon's copy of what ranks have written on nodes, before its version is READY: all of it, or one part of each node.

Pieces come as any others do (`swarm.py`), into the files of the UPLOADING version.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, PieceNumbering, PieceSpan
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.part_files import FileProof
from resharder.server.holding.sources import LIMITS, PeerOffer
from resharder.server.holding.swarm import PieceOffers, Swarm
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import FetchFailed, HttpTransfer, PieceSource, ReceivedBytes
from resharder.server.infra.filesystem import touching

_PATIENCE = 10.0  # seconds without a piece
_STEP_SECONDS = 0.1  # until a peer that was busy is asked again


@dataclass(frozen=True)
class HomeSource:
    """A node's files of an UPLOADING version, and its data port, `host:port`."""

    address: str
    files: tuple[FileLayout, ...]


class HomeCopy(HeldFiles):
    """Files of an UPLOADING version, as pieces are fetched into them.

    Args:
        version: Resource name.
        tag: `ETag` by which the nodes name the version's bytes.
        folder: Folder of the version.
        files: The files.
        proofs: Their proofs, by path.
        whole: Whether all pieces are wanted; otherwise, `want` adds some of at most `PIECE_BYTES`.
    """

    def __init__(
        self, version: str, tag: str, folder: Path, files: Sequence[FileLayout], proofs: Mapping[str, FileProof], *, whole: bool
    ) -> None:
        sizes = {file.path: file.size for file in files}
        numbering = PieceNumbering(sizes.items(), None if whole else PIECE_BYTES)
        wanted = Bitmap.full(numbering.count) if whole else None
        super().__init__(version, tag, folder, sizes, numbering, wanted=wanted)
        self._proofs = proofs
        self.failure: OSError | None = None
        """Why a piece could not be written; None if all were."""

    def pieces_of(self, files: Sequence[FileLayout]) -> Bitmap:
        """Return the pieces of some files."""
        touched = self.numbering.touched
        return Bitmap.of(self.numbering.count, (piece for file in files for piece in touched(file.path, 0, file.size)))

    def checksum(self, part: PieceSpan) -> int:
        """Return the checksum of a part, as its node has reported it."""
        return self._proofs[part.file].checksums[part.start // PIECE_BYTES]

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece. Raises OSError, which `failure` retains."""
        try:
            with touching(self.folder / part.file, "writing", len(content)):
                failpoint("gather.write")
            super().write(part, content)
        except OSError as error:
            self.failure = error
            raise


class _ProvenChecksums:
    """Checksums of the proofs of one copy, for `HttpTransfer`."""

    def __init__(self, copy: HomeCopy) -> None:
        self._copy = copy

    def of(self, version: HeldFiles, part: PieceSpan) -> int:
        return self._copy.checksum(part)


def fetch_from_homes(
    copy: HomeCopy,
    sources: Mapping[str, HomeSource],
    tls: NodeTls | None,
    gone: Callable[[], str],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Fetch the wanted pieces of a copy; of one without any, the shortest one of each node.

    Args:
        copy: The copy.
        sources: The nodes, by id.
        tls: Certificates with which the daemon calls nodes; None without.
        gone: Returns why no further request is of use; empty while one is.
        clock: Seconds of a monotonic clock.

    Raises:
        FetchFailed: No piece arrives for some seconds, or `gone` returns a reason. No piece is written afterwards.
        OSError: A piece cannot be written.
    """
    pieces = {node: copy.pieces_of(source.files) for node, source in sources.items()}
    if not len(copy.wanted()):
        for held in pieces.values():
            of_one = (Bitmap.of(held.count, [piece]) for piece in held)
            copy.want(min(of_one, key=copy.numbering.size_of))
    changed = threading.Event()
    swarm = Swarm(HttpTransfer(_ProvenChecksums(copy), tls, LIMITS.stalled), ReceivedBytes(), changed.set)
    peers = tuple(PeerOffer(f"nodes/{node}", held) for node, held in pieces.items())
    addresses = {f"nodes/{node}": PieceSource(source.address, daemon=False) for node, source in sources.items()}
    offers = PieceOffers(peers, addresses, Bitmap(copy.numbering.count), ())
    try:
        missing, since = copy.missing(), clock()
        while len(missing):
            changed.clear()
            swarm.fill(copy, offers)
            changed.wait(_STEP_SECONDS)
            if copy.failure is not None:
                raise copy.failure
            if why := gone():
                raise FetchFailed(why)
            before, missing = missing, copy.missing()
            if len(missing) < len(before):
                since = clock()
            elif clock() - since > _PATIENCE:
                node, lacked = next((node, found) for node, held in pieces.items() if len(found := held & missing))
                file, start, end = copy.numbering.span(next(iter(lacked)))
                problems = {link.peer: link.problem for link in swarm.links.all()}
                problem = problems.get(f"nodes/{node}") or f"nothing has arrived for {_PATIENCE:g} s"
                raise FetchFailed(f"nodes/{node}: {file}, bytes {start} to {end}: {problem}", node)
    finally:
        swarm.close()
