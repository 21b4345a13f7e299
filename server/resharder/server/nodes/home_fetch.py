"""The daemon's copy of what ranks have written on nodes, before its version is READY: all of it, or one part of each node.

Pieces come as any others do (`swarm.py`), into the files of the UPLOADING version.
"""

import os
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
from resharder.server.holding.memory import PieceClaims
from resharder.server.holding.part_files import FileProof
from resharder.server.holding.sources import LIMITS, PeerOffer
from resharder.server.holding.swarm import PieceOffers, Swarm
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import FetchFailed, HttpTransfer, PieceSource, PieceTarget, ReceivedBytes
from resharder.server.infra.filesystem import touching, write_at

_PATIENCE = 10.0  # seconds without a piece
_STEP_SECONDS = 0.1  # until a peer that was busy is asked again


@dataclass(frozen=True)
class HomeSource:
    """A node's files of an UPLOADING version, and its data port, `host:port`."""

    address: str
    files: tuple[FileLayout, ...]


class HomeCopy:
    """Files of an UPLOADING version, as pieces are fetched into them: a `PieceTarget`.

    Args:
        version: Resource name.
        tag: `ETag` by which the nodes name the version's bytes.
        folder: Folder of the version.
        files: The files.
        proofs: Their proofs, by path.
        whole: Whether all pieces are wanted; otherwise, `want` adds some of at most `PIECE_BYTES`.
    """

    memory = None  # of no transfer engine

    def __init__(
        self, version: str, tag: str, folder: Path, files: Sequence[FileLayout], proofs: Mapping[str, FileProof], *, whole: bool
    ) -> None:
        self.name, self.fingerprint, self._folder, self._proofs = version, tag, folder, proofs
        self.sizes: Mapping[str, int] = {file.path: file.size for file in files}
        self.numbering = PieceNumbering(self.sizes.items(), None if whole else PIECE_BYTES)
        self.claims = PieceClaims()
        self.failure: OSError | None = None
        """Why a piece could not be written; None if all were."""
        self._lock, self._held = threading.Lock(), Bitmap(self.numbering.count)
        self._wanted = Bitmap.full(self.numbering.count) if whole else Bitmap(self.numbering.count)

    def pieces_of(self, files: Sequence[FileLayout]) -> Bitmap:
        """Return the pieces of some files."""
        touched = self.numbering.touched
        return Bitmap.of(self.numbering.count, (piece for file in files for piece in touched(file.path, 0, file.size)))

    def want(self, piece: int) -> None:
        """Add to the wanted pieces."""
        with self._lock:
            self._wanted.add(piece)

    def checksum(self, part: PieceSpan) -> int:
        """Return the checksum of a part, as its node has reported it."""
        return self._proofs[part.file].checksums[part.start // PIECE_BYTES]

    def wanted(self) -> Bitmap:
        with self._lock:
            return Bitmap(self._wanted.count, self._wanted.bits.copy())

    def held(self) -> Bitmap:
        """Return the pieces that have arrived."""
        with self._lock:
            return Bitmap(self._held.count, self._held.bits.copy())

    def missing(self) -> Bitmap:
        """Return the wanted pieces that have not arrived."""
        return self.wanted() - self.held()

    def write(self, part: PieceSpan, content: Array) -> None:
        """Write checked bytes of a piece. Raises OSError, which `failure` retains."""
        path = self._folder / part.file
        try:
            with touching(path, "writing", len(content)):
                failpoint("gather.write")
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    write_at(descriptor, content.data, part.start)
                finally:
                    os.close(descriptor)
        except OSError as error:
            self.failure = error
            raise

    def add(self, piece: int) -> None:
        """Count a piece as held."""
        with self._lock:
            self._held.add(piece)


class _ProvenChecksums:
    """Checksums of the proofs of one copy, for `HttpTransfer`."""

    def __init__(self, copy: HomeCopy) -> None:
        self._copy = copy

    def of(self, version: PieceTarget, part: PieceSpan) -> int:
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
            copy.want(min(held, key=lambda piece: copy.numbering.size_of(Bitmap.of(held.count, [piece]))))
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
