"""Records of a node's peers, and the choice of its next requests among the pieces that the daemon has named.

A peer that fails is left alone for a time that doubles each time.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import numpy as np
from resharder.converters.wire.pieces import Bitmap


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
        repeated: Seconds after which a piece that is also named elsewhere is requested there as well.
        cool_down: Seconds for which a peer is left alone after its first failure; twice as many after each further one.
        longest: Upper bound on these seconds.
    """

    requests: int = 8
    per_peer: int = 2
    per_source: int = 1
    stalled: float = 5.0
    repeated: float = 0.5
    cool_down: float = 1.0
    longest: float = 60.0


LIMITS = RequestLimits()
UPLOADS = 8
"""Requests of other nodes that a node answers at a time; it refuses others as busy."""
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
    missing: Bitmap,
    named: Iterable[tuple[str, Bitmap, bool]],
    records: Mapping[str, PeerRecord],
    requests: Collection[PieceRequest],
    now: float,
    limits: RequestLimits = LIMITS,
) -> list[PieceChoice]:
    """Return the next requests of a node, as many as the limits allow.

    Args:
        missing: Pieces that the node needs and does not hold.
        named: Each peer that the daemon has named, the pieces of it, and whether ranks write into it.
        records: The node's observations, by peer; a peer without any has none.
        requests: Requests in flight.
        now: Seconds of a monotonic clock, the one of `records` and `requests`.
        limits: Bounds.
    """
    mine, since, chosen = Counter(request.peer for request in requests), dict[int, float](), list[PieceChoice]()
    for request in requests:
        since[request.piece] = max(request.started, since.get(request.piece, request.started))
    flying = {(request.piece, request.peer) for request in requests}
    for peer, pieces, is_source in named:
        if records.get(peer, _NEW).retry_at > now:
            continue
        for piece in pieces & missing:
            if len(requests) + len(chosen) >= limits.requests:
                return chosen
            if mine[peer] >= (limits.per_source if is_source else limits.per_peer):
                break
            if (piece, peer) not in flying and now - since.get(piece, -inf) > limits.repeated:
                chosen.append(PieceChoice(piece, peer))
                mine[peer] += 1
                since[piece] = now
    return chosen


_NEW = PeerRecord()
