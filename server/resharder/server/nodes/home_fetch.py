"""The daemon's copy of what ranks have written on nodes, before its version is READY: all of it, or one part of each node.

Pieces come as any others do (`swarm.py`), into the files of the UPLOADING version.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.held_files import HeldFiles, pieces_of
from resharder.server.holding.sources import LIMITS, PeerOffer
from resharder.server.holding.swarm import PieceOffers, Swarm
from resharder.server.holding.tls import NodeTls
from resharder.server.holding.transfers import FetchFailed, HttpTransfer, PieceSource, ReceivedBytes

_PATIENCE = 10.0  # seconds without a piece
_STEP_SECONDS = 0.1  # until a peer that was busy is asked again


@dataclass(frozen=True)
class HomeSource:
    """A node's files of an UPLOADING version, and its data port, `host:port`."""

    address: str
    files: tuple[FileLayout, ...]


def fetch_from_homes(
    copy: HeldFiles,
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
    pieces = {node: pieces_of(copy.numbering, source.files) for node, source in sources.items()}
    if not len(copy.wanted()):
        for held in pieces.values():
            of_one = (Bitmap.of(held.count, [piece]) for piece in held)
            copy.want(min(of_one, key=copy.numbering.size_of))
    changed = threading.Event()
    swarm = Swarm(HttpTransfer(HeldFiles.checksum, tls, LIMITS.stalled), ReceivedBytes(), changed.set)
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
