"""Pieces that a host asks for as deltas of another version that it holds, where the link to the peer is slower than decoding.

The rates of a host's own parts decide. The first part of a peer comes whole, and shows the link. If that is slower than this host
decodes, the next one is asked for as a delta, and from then on what brings more bytes of a version a second. What was slower is
tried again after a while. The daemon's checksum proves a decoded part as it proves any other; one that does not have it comes
whole.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import structlog
from resharder.converters.storage.delta import BadPiece, StoredPiece, decode
from resharder.converters.storage.digest import Array
from resharder.converters.wire.pieces import PieceSpan
from resharder.converters.wire.range_client import PartRequest, RangeConnection
from resharder.converters.wire.ranges import base_header, is_piece
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.piece_requests import LIMITS, RequestLimits
from resharder.v1 import resources_pb2

WHOLE_SECONDS, DELTA_SECONDS = 600.0, 10.0
"""Times for which the rates of whole parts and of deltas count: to measure the former again costs the bytes of a part."""
_FIRST_DECODING = 1e9  # bytes a second, until a part has been decoded here
_WEIGHT = 0.3  # of the newest observation in an average rate
_log = structlog.get_logger("resharder.node")


def nearest_base(held: Iterable[HeldFiles], version: HeldFiles, part: PieceSpan) -> HeldFiles | None:
    """Return the held version of the same model, nearest in number, with a part in a file of the same size; None for none."""
    model, _, number = version.name.rpartition("/")

    def has_part(other: HeldFiles) -> bool:
        if other.name == version.name or other.name.rpartition("/")[0] != model or not other.fingerprint:
            return False
        if other.sizes.get(part.file) != version.sizes[part.file]:
            return False
        pieces = other.held()
        return all(piece in pieces for piece in other.numbering.touched(*part))

    found = filter(has_part, held)
    return min(found, key=lambda other: abs(int(other.name.rpartition("/")[2]) - int(number)), default=None)


@dataclass(frozen=True)
class Rate:
    """Moving average in bytes of a version a second, and the time of the last observation on a monotonic clock; 0: none yet."""

    value: float = 0.0
    at: float = 0.0

    def counts(self, now: float, seconds: float) -> bool:
        """Return whether the last observation is at most some seconds old."""
        return self.value > 0 and now - self.at < seconds

    def with_part(self, size: int, took: float, now: float, seconds: float = WHOLE_SECONDS) -> "Rate":
        """Return the average with a part of `size` bytes that took some time; one that no longer counts is forgotten."""
        found = size / max(took, 1e-6)
        return Rate(self.value + _WEIGHT * (found - self.value) if self.counts(now, seconds) else found, now)


@dataclass(frozen=True)
class PeerDeltas:
    """Rates and failures of the parts that a host has received from a peer.

    Attributes:
        whole: Rate of parts that came whole.
        delta: Rate of parts for which the peer has tried a delta, with the time that encoding and decoding take.
        failures: Refused deltas since the last one that was decoded.
        retry_at: Time before which no delta is asked for.
        delta_bytes: Bytes of deltas.
        part_bytes: Bytes of the parts that they became.
        refused: Deltas that did not decode to their parts.
        problem: The reason for the last one of them.
    """

    whole: Rate = Rate()
    delta: Rate = Rate()
    failures: int = 0
    retry_at: float = 0.0
    delta_bytes: int = 0
    part_bytes: int = 0
    refused: int = 0
    problem: str = ""


def asks_delta(peer: PeerDeltas, decoding: float, now: float) -> bool:
    """Return whether the next part is asked of a peer as a delta.

    Args:
        peer: What was seen of it.
        decoding: Bytes of a version that this host decodes a second.
        now: Seconds of a monotonic clock.
    """
    if now < peer.retry_at or not peer.whole.counts(now, WHOLE_SECONDS):
        return False
    if peer.delta.counts(now, DELTA_SECONDS):
        return peer.delta.value > peer.whole.value
    return peer.whole.value < decoding


def after_refusal(peer: PeerDeltas, problem: str, now: float, limits: RequestLimits = LIMITS) -> PeerDeltas:
    """Return what is known of a peer after a delta that did not decode to the part: none is asked for a time, doubling."""
    pause = min(limits.longest, limits.cool_down * 2 ** min(peer.failures, 16))
    return replace(peer, failures=peer.failures + 1, retry_at=now + pause, refused=peer.refused + 1, problem=problem)


class Deltas:
    """Reads of parts, as deltas or whole. Thread-safe. `held`: returns the versions that this host holds."""

    def __init__(self, held: Callable[[], Iterable[HeldFiles]], clock: Callable[[], float] = time.monotonic) -> None:
        self._held, self._clock, self._lock = held, clock, threading.Lock()
        self._decoding = Rate(_FIRST_DECODING)
        self._peers: dict[str, PeerDeltas] = {}

    def of(self, peer: str) -> PeerDeltas:
        """Return what was seen of a peer."""
        with self._lock:
            return self._peers.get(peer, PeerDeltas())

    def shown(self, link: resources_pb2.NodeLink) -> resources_pb2.NodeLink:
        """Return a link with the deltas of its peer."""
        seen, found = self.of(link.peer), resources_pb2.NodeLink()
        found.CopyFrom(link)
        found.delta_bytes, found.delta_part_bytes = seen.delta_bytes, seen.part_bytes
        found.delta_failures, found.delta_problem = seen.refused, seen.problem
        found.whole_rate, found.delta_rate = seen.whole.value, seen.delta.value
        return found

    def read(self, connection: RangeConnection, request: PartRequest, version: HeldFiles, peer: str, target: Array) -> None:
        """Read a part of a version into `target`, checked. Raises as `RangeConnection.blocks` does."""
        part, began = PieceSpan(request.file, request.start, request.end), self._clock()
        with self._opened_base(version, request, part, peer) as base:
            if base is None:
                read_whole(connection, request, target)
                return self._note(peer, part, began, tried=False)
            delta, tried = connection.delta(request, base.header, target)
            if delta is None:
                return self._note(peer, part, began, tried=tried)
            try:
                self._decode(delta, base, part, request.checksum or 0, target)
            except (BadPiece, OSError) as error:
                self._refuse(peer, f"{version.name}, {part.file}, bytes {part.start} to {part.end}, as a delta: {error}")
                return read_whole(connection, request, target)
        self._note(peer, part, began, tried=True, delta=len(delta))

    @contextmanager
    def _opened_base(self, version: HeldFiles, request: PartRequest, part: PieceSpan, peer: str) -> Iterator["_OpenBase | None"]:
        """Yield the file of which a part is asked for as a delta, which keeps its version from being dropped; None for none."""
        base = None
        if request.checksum is not None and is_piece(part.start, part.end, request.size):
            with self._lock:
                asks = asks_delta(self._peers.get(peer, PeerDeltas()), self._decoding.value, self._clock())
            base = nearest_base(self._held(), version, part) if asks else None
        if base is None:
            yield None
            return
        try:
            descriptor = os.open(base.folder / part.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # dropped meanwhile
            yield None
            return
        try:
            yield _OpenBase(descriptor, base_header(int(base.name.rpartition("/")[2]), base.fingerprint))
        finally:
            os.close(descriptor)

    def _decode(self, delta: bytes, base: "_OpenBase", part: PieceSpan, checksum: int, target: Array) -> None:
        """Write a part to `target`. Raises BadPiece for other bytes, OSError."""
        size, began = part.end - part.start, self._clock()
        before = os.pread(base.descriptor, size, part.start)
        decode(StoredPiece("xor", len(delta), f"{checksum:016x}"), delta, before, size, target)
        with self._lock:
            now = self._clock()
            self._decoding = self._decoding.with_part(size, now - began, now)

    def _note(self, peer: str, part: PieceSpan, began: float, *, tried: bool, delta: int = 0) -> None:
        """Record a part that has arrived, for which the peer has `tried` a delta, and which came as one of some bytes."""
        size, now = part.end - part.start, self._clock()
        with self._lock:
            seen = self._peers.get(peer, PeerDeltas())
            if tried:
                seen = replace(seen, delta=seen.delta.with_part(size, now - began, now, DELTA_SECONDS))
            else:
                seen = replace(seen, whole=seen.whole.with_part(size, now - began, now))
            if delta:
                sizes = seen.delta_bytes + delta, seen.part_bytes + size
                seen = replace(seen, failures=0, delta_bytes=sizes[0], part_bytes=sizes[1])
            self._peers[peer] = seen

    def _refuse(self, peer: str, problem: str) -> None:
        with self._lock:
            self._peers[peer] = after_refusal(self._peers.get(peer, PeerDeltas()), problem, self._clock())
        _log.warning("delta_refused", peer=peer, reason=problem)


class _OpenBase(NamedTuple):
    """File of a base, and the header that names the version."""

    descriptor: int
    header: str


def read_whole(connection: RangeConnection, request: PartRequest, target: Array) -> None:
    """Read a part into `target`, checked. Raises as `RangeConnection.blocks` does."""
    for _ in connection.blocks(request, target):
        pass
