"""The fetching of versions: the pieces that the daemon has named, requests in flight, and the record of links."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import grpc
import numpy as np
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.deltas import Deltas
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.piece_requests import (
    LIMITS,
    PeerRecord,
    PieceChoice,
    PieceRequest,
    RequestLimits,
    after_answer,
    after_busy,
    after_failure,
    choose,
)
from resharder.server.holding.transfers import PieceBusy, PieceFailed, PieceSource, PieceTransfer, ReceivedBytes
from resharder.v1 import node_pb2, resources_pb2

MOST_LINKS = 64
"""Upper bound on the links that a node reports, of the last used peers."""
_MOST_SECONDS, _MOST_RATE = 1e9, 1e15


def bounded_link(link: resources_pb2.NodeLink) -> resources_pb2.NodeLink:
    """Return a reported link with its values cut to their bounds."""
    return resources_pb2.NodeLink(
        peer=link.peer[:100],
        received_bytes=max(0, link.received_bytes),
        seconds=min(max(0.0, link.seconds), _MOST_SECONDS),
        failures=max(0, link.failures),
        problem=link.problem[:500],
        delta_bytes=max(0, link.delta_bytes),
        delta_part_bytes=max(0, link.delta_part_bytes),
        whole_rate=min(max(0.0, link.whole_rate), _MOST_RATE),
        delta_rate=min(max(0.0, link.delta_rate), _MOST_RATE),
        delta_failures=max(0, link.delta_failures),
        delta_problem=link.delta_problem[:500],
    )


class LinkLog:
    """Record of the links to the last used peers, since the process began. Thread-safe.

    `shown`: returns a link with what else is known of its peer.
    """

    def __init__(self, shown: Callable[[resources_pb2.NodeLink], resources_pb2.NodeLink] = lambda link: link) -> None:
        self._shown = shown
        self._lock = threading.Lock()
        self._links: OrderedDict[str, resources_pb2.NodeLink] = OrderedDict()

    def received(self, peer: str, size: int, seconds: float) -> None:
        """Record a verified piece of `size` bytes."""
        self._add(peer, size, seconds, 0, "")

    def failed(self, peer: str, problem: str) -> None:
        """Record a failed request. A busy peer is none."""
        self._add(peer, 0, 0.0, 1, problem)

    def all(self) -> list[resources_pb2.NodeLink]:
        """Return the links, the last used one last."""
        with self._lock:
            links = list(self._links.values())
        return [self._shown(link) for link in links]

    def _add(self, peer: str, size: int, seconds: float, failures: int, problem: str) -> None:
        with self._lock:
            link = self._links.pop(peer, resources_pb2.NodeLink())
            self._links[peer] = resources_pb2.NodeLink(
                peer=peer,
                received_bytes=link.received_bytes + size,
                seconds=link.seconds + seconds,
                failures=link.failures + failures,
                problem=problem,
            )
            while len(self._links) > MOST_LINKS:
                self._links.popitem(last=False)


_log = structlog.get_logger("resharder.node")


class NamedSource(NamedTuple):
    """A peer that the daemon has named, the pieces to fetch from it, and where it is reached."""

    peer: str
    pieces: Bitmap
    source: PieceSource


def named_in(order: node_pb2.NodeOrder, pieces: int, daemon_address: str) -> list[NamedSource]:
    """Return the sources in an order.

    An earlier daemon sends all pieces of some peers, and in `scarce` those of which only `granted` ones may be fetched.

    Args:
        order: The order.
        pieces: Pieces of the version.
        daemon_address: Address of the daemon's data port.

    Raises:
        ValueError: Pieces of another version.
    """
    found, barred = list[NamedSource](), Bitmap.from_bytes(pieces, order.scarce) if order.scarce else Bitmap(pieces)
    barred = barred - Bitmap.of(pieces, order.granted)
    for peer in order.peers:
        source = PieceSource(peer.data_address or daemon_address, peer.source, peer.session, tuple(peer.addresses), peer.node)
        found.append(NamedSource(peer.node, Bitmap.from_bytes(pieces, peer.held) - barred, source))
    return found


class PieceFetcher:
    """Requests of a host for the pieces that the daemon has named, of one version at a time. Thread-safe.

    Args:
        transfer: Fetcher of pieces.
        changed: Called after each piece, whether it has arrived or failed.
        deltas: The transfer's deltas, which are reported with the links; None for none.
    """

    def __init__(
        self,
        transfer: PieceTransfer,
        received: ReceivedBytes,
        changed: Callable[[], object],
        limits: RequestLimits = LIMITS,
        clock: Callable[[], float] = time.monotonic,
        deltas: Deltas | None = None,
    ) -> None:
        self._transfer, self._received, self._changed = transfer, received, changed
        self._limits, self._clock = limits, clock
        self._pool = ThreadPoolExecutor(limits.requests, thread_name_prefix="piece")
        self._chance = np.random.default_rng()
        self._lock, self._ids = threading.Lock(), count()
        self.links = LinkLog(deltas.shown) if deltas is not None else LinkLog()
        self._records: dict[str, PeerRecord] = {}
        self._requests: dict[str, dict[int, PieceRequest]] = {}  # by version
        self._problems: dict[str, str] = {}

    def problem(self, version: str) -> str:
        """Return why the last request for a version failed; empty if it did not."""
        with self._lock:
            return self._problems.get(version, "")

    def fill(self, version: HeldFiles, named: Sequence[NamedSource]) -> int:
        """Start as many requests for pieces of a version as the limits allow, and return how many named pieces are missing."""
        missing, now = version.missing(), self._clock()
        sources = {each.peer: each.source for each in named}
        with self._lock:
            flying = [request for requests in self._requests.values() for request in requests.values()]
            mine = self._requests.get(version.name, {})
            free = self._limits.requests - len(flying) + len(mine)  # requests of other versions take their places
            given = [(each.peer, each.pieces, each.source.daemon) for each in named]
            chosen = choose(missing, given, self._records, list(mine.values()), now, self._limits) if free > len(mine) else []
            chosen = chosen[: free - len(mine)]
            started = [(next(self._ids), choice) for choice in chosen]
            for id, choice in started:
                span = version.numbering.span(choice.piece)
                request = PieceRequest(choice.piece, choice.peer, now, span.end - span.start)
                self._requests.setdefault(version.name, {})[id] = request
        for id, choice in started:
            self._pool.submit(self._fetch, id, version, choice, sources[choice.peer])
        return len(set().union(*(each.pieces & missing for each in named)))

    def _fetch(self, id: int, version: HeldFiles, choice: PieceChoice, source: PieceSource) -> None:
        began, failure, size, busy = self._clock(), "", 0, False
        try:
            failpoint("node.piece")
            size = self._transfer.fetch(version, choice.piece, source)
            if choice.piece not in version.held():
                failpoint("node.held")
                version.add(choice.piece)
                self._received.add(size, daemon=source.daemon)
        except PieceBusy:
            busy = True
        except (PieceFailed, OSError) as error:
            failure = str(error)
        except grpc.RpcError as error:
            failure = f"the daemon: {error.details() or error.code().name}"
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            _log.error("piece_failed", version=version.name, piece=choice.piece, exc_info=error)
        now = self._clock()
        with self._lock:
            record = self._records.get(choice.peer, PeerRecord())
            requests = self._requests.get(version.name, {})
            request = requests.pop(id)
            if busy:
                record = after_busy(record, request.size, now, self._chance)
            elif failure:
                record = after_failure(record, now, self._limits)
                self.links.failed(choice.peer, failure)
            else:
                record = after_answer(record, size, now - began)
                self.links.received(choice.peer, size, now - began)
            self._records[choice.peer] = record
            self._problems[version.name] = failure
            if not requests:
                self._requests.pop(version.name, None)
            idle = not self._requests and not len(version.missing())
        if idle:
            self._transfer.close_idle()  # a connection pins its version at the sender
        if failure:
            _log.warning("piece_refused", version=version.name, piece=choice.piece, peer=choice.peer, reason=failure)
        self._changed()

    def forget(self, version: str) -> None:
        """Forget the problem of a version that was dropped."""
        with self._lock:
            self._problems.pop(version, None)

    def close(self) -> None:
        """Start no further requests, and wait for those in flight."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._transfer.close_idle()
