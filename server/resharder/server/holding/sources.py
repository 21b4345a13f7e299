"""The choice of a node: which piece it requests next, and from which peer.

A pure function of what the node holds and needs, what its peers offer, and what it has observed of them. Pieces that few peers
have come first, in a random order among equals, so that nodes gather different pieces and can pass them on to each other. A
piece that one node alone holds is requested by the nodes that the daemon has granted it to, and other pieces are requested from
sources only while the other peers that have them fail. A peer that fails is left alone for a time that doubles each time.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.wire.pieces import Bitmap, unpack


@dataclass(frozen=True)
class PeerOffer:
    """Pieces of a peer, as the daemon reported them last.

    Attributes:
        peer: Id of the node.
        held: Pieces that it holds.
        load: Requests that it was answering.
        is_source: Whether the version's ranks write into it.
    """

    peer: str
    held: Bitmap
    load: int = 0
    is_source: bool = False


@dataclass(frozen=True)
class PeerRecord:
    """A node's own observations of a peer.

    Attributes:
        rate: Bytes a second of its answers, a moving average; 0 before the first one.
        failures: Failed requests since the last answer.
        retry_at: Time of a monotonic clock before which nothing is requested.
    """

    rate: float = 0.0
    failures: int = 0
    retry_at: float = 0.0


@dataclass(frozen=True)
class PieceRequest:
    """Request in flight.

    Attributes:
        piece: Number of the piece.
        peer: Id of the peer.
        started: Time of the request.
        size: Bytes of the piece.
    """

    piece: int
    peer: str
    started: float
    size: int


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on the requests of a node.

    Attributes:
        requests: Requests in flight.
        per_peer: Requests in flight to one peer.
        per_source: The same for a source.
        stalled: Seconds without a byte after which a request is given up.
        slow: Factor on the median time of a piece after which a request may be repeated at another peer.
        cool_down: Seconds for which a peer is left alone after its first failure; twice as many after each further one.
        longest: Upper bound on these seconds.
    """

    requests: int = 8
    per_peer: int = 2
    per_source: int = 1
    stalled: float = 5.0
    slow: float = 3.0
    cool_down: float = 1.0
    longest: float = 60.0


LIMITS = RequestLimits()
UPLOADS = 8
"""Requests of other nodes that a node answers at a time; it refuses others as busy."""
_FAN = 4.0  # nodes that request a rare piece at once from each node that has it, the others take it from these
_WEIGHT = 0.3  # of the newest observation in the average rate


class PieceChoice(NamedTuple):
    """Piece to request next, and the peer to request it from."""

    piece: int
    peer: str


def after_answer(record: PeerRecord, size: int, seconds: float) -> PeerRecord:
    """Return the record of a peer after a complete, checked piece."""
    rate = size / max(seconds, 1e-6)
    return PeerRecord(rate if record.rate == 0 else record.rate + _WEIGHT * (rate - record.rate))


def after_failure(record: PeerRecord, now: float, limits: RequestLimits = LIMITS) -> PeerRecord:
    """Return the record of a peer after a failed request or a damaged piece."""
    pause = min(limits.longest, limits.cool_down * 2 ** min(record.failures, 16))
    return replace(record, failures=record.failures + 1, retry_at=now + pause)


def after_busy(record: PeerRecord, size: int, now: float, chance: np.random.Generator) -> PeerRecord:
    """Return the record of a peer that answers as many requests as it may: asked again in about the time of half a piece.

    Args:
        record: The record so far.
        size: Bytes of the piece.
        now: Seconds of a monotonic clock.
        chance: Generator that spreads the nodes' next requests.
    """
    usual = min(1.0, size / record.rate) if record.rate else 0.1
    return replace(record, retry_at=now + usual * (0.5 + chance.random()))


def choose(
    held: Bitmap,
    wanted: Bitmap,
    offers: Sequence[PeerOffer],
    scarce: Bitmap,
    granted: Collection[int],
    records: Mapping[str, PeerRecord],
    requests: Collection[PieceRequest],
    now: float,
    chance: np.random.Generator,
    limits: RequestLimits = LIMITS,
) -> list[PieceChoice]:
    """Return the next requests of a node, as many as the limits allow.

    Args:
        held: Pieces that the node holds.
        wanted: Pieces that it needs; may be fewer than all.
        offers: Pieces of its peers.
        scarce: Pieces that one node alone holds: not requested unless granted.
        granted: Pieces that the daemon has granted to the node.
        records: The node's observations, by peer; a peer without any has none.
        requests: Requests in flight.
        now: Seconds of a monotonic clock, the one of `records` and `requests`.
        chance: Generator for the order among equals.
        limits: Bounds.
    """
    free = limits.requests - len(requests)
    if free <= 0:
        return []
    usable, failing = [], Bitmap(held.count)
    for offer in offers:
        record = records.get(offer.peer, _NEW)
        if record.retry_at <= now:
            usable.append(offer)
        elif record.failures:
            failing = failing | offer.held
    if not usable:
        return []
    swarm = _Choosing(held, wanted, usable, failing, scarce, granted, records, requests, chance, limits)
    chosen = []
    for choice in swarm.fresh():
        chosen.append(choice)
        if len(chosen) == free:
            return chosen
    chosen.extend(swarm.repeated(requests, now, free - len(chosen)))
    return chosen


_NEW = PeerRecord()


class _Choosing:
    """State of one call of `choose`: what is missing, who has it, and the requests in flight with those chosen so far."""

    def __init__(
        self,
        held: Bitmap,
        wanted: Bitmap,
        offers: Sequence[PeerOffer],
        failing: Bitmap,
        scarce: Bitmap,
        granted: Collection[int],
        records: Mapping[str, PeerRecord],
        requests: Collection[PieceRequest],
        chance: np.random.Generator,
        limits: RequestLimits,
    ) -> None:
        self._offers, self._chance, self._limits = offers, chance, limits
        self._mine = Counter(request.peer for request in requests)
        self._has = unpack(np.stack([offer.held.bits for offer in offers]), held.count)  # a row for each offer
        self._failing = failing.flags()  # pieces of peers that are left alone
        self._are_sources = np.array([offer.is_source for offer in offers])
        self._scarce, self._granted = scarce.flags(), granted
        self._missing = (wanted - held).flags()
        for request in requests:
            self._missing[request.piece] = False
        self._rate = [records.get(offer.peer, _NEW).rate for offer in offers]
        known = sorted(rate for rate in self._rate if rate > 0)
        self._usual = known[len(known) // 2] if known else 1.0

    def fresh(self) -> Iterator[PieceChoice]:
        """Yield pieces that are not in flight: granted ones, then the ones that few peers have."""
        for piece in self._granted:
            if self._missing[piece] and (choice := self._from(piece, self._sources(piece))):
                yield choice
        rarity: npt.NDArray[np.int64] = self._has.sum(axis=0)
        turn = self._chance.random(len(rarity)) * len(self._has) < _FAN * rarity
        candidates = np.flatnonzero(self._missing & ~self._scarce & turn)
        order = np.argsort(rarity[candidates] + self._chance.random(len(candidates)))
        for piece in candidates[order].tolist():
            if choice := self._from(piece, self._sources(piece)):
                yield choice
            elif all(self._is_busy(row) for row in range(len(self._offers))):
                return

    def _sources(self, piece: int) -> "npt.NDArray[np.int64]":
        """Return the rows that a piece may be requested from."""
        has = self._has[:, piece]
        relays = np.flatnonzero(has & ~self._are_sources)
        return np.flatnonzero(has) if not len(relays) and (piece in self._granted or self._failing[piece]) else relays

    def repeated(self, requests: Collection[PieceRequest], now: float, most: int) -> list[PieceChoice]:
        """Return repetitions of slow requests at other peers, once no other piece is missing."""
        found: list[PieceChoice] = []
        if self._missing.any():
            return found
        sources = Counter(request.piece for request in requests)
        for request in sorted(requests, key=lambda r: r.started):
            late = now - request.started > self._limits.slow * request.size / self._usual
            if len(found) < most and late and sources[request.piece] == 1:
                rows = [row for row in self._sources(request.piece).tolist() if self._offers[row].peer != request.peer]
                if choice := self._from(request.piece, rows):
                    found.append(choice)
        return found

    def _is_busy(self, row: int) -> bool:
        offer = self._offers[row]
        limit = self._limits.per_source if offer.is_source else self._limits.per_peer
        return self._mine[offer.peer] >= limit

    def _from(self, piece: int, rows: Iterable[int]) -> PieceChoice | None:
        """Choose the row that answers soonest by its load and rate, and note the request."""
        best, least = -1, float("inf")
        for row in rows:
            if not self._is_busy(row):
                offer = self._offers[row]
                load = max(offer.load, self._mine[offer.peer]) + 1 + self._chance.random() / 2
                if (cost := load * self._usual / (self._rate[row] or self._usual)) < least:
                    best, least = row, cost
        if best < 0:
            return None
        peer = self._offers[best].peer
        self._mine[peer] += 1
        self._missing[piece] = False
        return PieceChoice(piece, peer)
