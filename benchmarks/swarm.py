"""Simulated network of hosts that pass a version on: the daemon's tracker and the nodes' requests are the real code.

A discrete-event simulation in its own time. A link carries each of its transfers at an equal share of its rate; a transfer has
the smaller share of its two ends, which is less than a fair network gives. A dead host sends nothing and closes no connection.
"""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.piece_requests import (
    LIMITS,
    UPLOADS,
    PeerRecord,
    PieceRequest,
    RequestLimits,
    after_answer,
    after_busy,
    after_failure,
    choose,
)
from resharder.server.node.agent import EARLY, FEW
from resharder.server.nodes.pieces import PieceTable
from resharder.server.nodes.tracker import SHORTEST, Tracker, TrackerAnswer

VERSION = "models/policy/versions/1"
ORIGIN = "origin"


@dataclass(frozen=True)
class Network:
    """Hosts beside the origin, and what is sent to them.

    Attributes:
        hosts: Number of hosts.
        pieces: Pieces of the version.
        piece_bytes: Bytes of each.
        rate: Bytes a second of each link, in each direction.
        latency: Seconds from host to host.
        lease: Seconds after which the daemon takes a silent host for gone.
        deaths: When each of the first hosts dies, as a share of one transfer.
        late: Hosts that join after half of one transfer.
        seed: Seed of all choices.
        limits: Bounds on each node's requests.
        uploads: Requests that a host answers at a time; it refuses others as busy.
        parts: Hosts need a part each, as under expert parallelism: host `i` the pieces of part `i % parts`, and shared ones.
        shared: Share of the pieces that all hosts need.
    """

    hosts: int
    pieces: int
    piece_bytes: int
    rate: float
    latency: float = 0.0005
    lease: float = 10.0
    deaths: tuple[float, ...] = ()
    late: int = 0
    seed: int = 1
    limits: RequestLimits = LIMITS
    uploads: int = UPLOADS
    parts: int = 1
    shared: float = 0.1

    def needs(self, host: int) -> Bitmap:
        """Return the pieces that a host needs."""
        shared = int(self.shared * self.pieces)
        return Bitmap.of(self.pieces, [p for p in range(self.pieces) if p < shared or p % self.parts == host % self.parts])

    @property
    def one_transfer(self) -> float:
        """Seconds of the whole version over one link."""
        return self.pieces * self.piece_bytes / self.rate


@dataclass
class Outcome:
    """Result of a simulation.

    Attributes:
        seconds: Time until the last living host is complete.
        first: Time until the first one is.
        origin_sent: Bytes that the origin sent, as a multiple of the version's.
        repeated: Pieces received more than once, as a share of all.
        failed: Requests given up.
        refused: Requests answered as busy.
        reports: Reports that the daemon answered.
        cpu: CPU seconds of the daemon's table, grants and answers.
        answer_bytes: Mean bytes of the bitmaps in an answer.
        table_bytes: Bytes of the daemon's table at the end.
        choosing: CPU seconds of one node's choices, the mean of all nodes.
    """

    seconds: float = 0.0
    first: float = 0.0
    origin_sent: float = 0.0
    repeated: float = 0.0
    failed: int = 0
    refused: int = 0
    reports: int = 0
    cpu: float = 0.0
    answer_bytes: float = 0.0
    table_bytes: int = 0
    choosing: float = 0.0


@dataclass(eq=False)
class Flow:
    """Transfer of a piece.

    Attributes:
        left: Bytes left at the time `at`, from which on `rate` holds.
        due: Time of its event in the queue, never after its end.
    """

    piece: int
    source: "Host"
    target: "Host"
    started: float
    left: float
    at: float
    rate: float = 0.0
    due: float = math.inf
    ended: bool = False


@dataclass(eq=False)
class Host:
    """Host with its node: the pieces that it holds, the daemon's last answer, and its transfers."""

    name: str
    needs: Bitmap
    held: Bitmap
    chance: np.random.Generator
    named: dict[str, Bitmap] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)
    interval: float = SHORTEST
    reported: float = -math.inf
    reported_pieces: int = 0
    reports_early: bool = False
    records: dict[str, PeerRecord] = field(default_factory=dict)
    sending: list[Flow] = field(default_factory=list)
    receiving: list[Flow] = field(default_factory=list)
    alive: bool = True
    done: float = math.inf


class Swarm:
    """One simulation; `run` returns its outcome."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._chance = np.random.default_rng(network.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._number = count()
        self._now = 0.0
        self._outcome = Outcome()
        self._sent = self._received = self._repeated = self._answered = 0
        table = PieceTable()
        table.add_version(VERSION, network.pieces)
        table.add_source(VERSION, ORIGIN)
        self._tracker = Tracker(table)
        self._origin = self._host(ORIGIN, Bitmap(network.pieces), Bitmap.full(network.pieces))
        table.report(VERSION, ORIGIN, self._origin.held)
        self._hosts = [self._host(f"host{i}", network.needs(i), Bitmap(network.pieces)) for i in range(network.hosts)]
        self._by_name = {host.name: host for host in [self._origin, *self._hosts]}
        self._left = len(self._hosts)

    def _host(self, name: str, needs: Bitmap, held: Bitmap) -> Host:
        chance = np.random.default_rng(int(self._chance.integers(1 << 32)))
        return Host(name, needs, held, chance)

    def run(self) -> Outcome:
        """Run until every living host holds the version. Raises RuntimeError when nothing more happens before."""
        network, outcome = self._network, self._outcome
        for i, host in enumerate(self._hosts):
            late = i >= len(self._hosts) - network.late
            start = network.one_transfer / 2 if late else float(self._chance.random()) * SHORTEST
            self._at(start, self._report, host)
        for host, share in zip(self._hosts, network.deaths, strict=False):
            self._at(share * network.one_transfer, self._die, host)
        while self._left:
            if not self._events or self._now > 100 * network.one_transfer:
                raise RuntimeError(f"expected {self._left} more hosts to complete, found no event that leads there")
            self._now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)
        living = [host.done for host in self._hosts if host.alive]
        outcome.seconds, outcome.first = max(living), min(living)
        outcome.origin_sent = self._sent / network.pieces / network.piece_bytes
        outcome.repeated = self._repeated / max(1, self._received)
        outcome.answer_bytes = self._answered / max(1, outcome.reports)
        outcome.table_bytes = self._tracker.table.nbytes
        outcome.choosing /= len(self._hosts)
        return outcome

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), act, arguments))

    # Reports

    def _report(self, host: Host, early: bool = False) -> None:
        if host.alive:
            host.reported, host.reports_early = self._now, host.reports_early and not early
            held = Bitmap(host.held.count, host.held.bits.copy())
            host.reported_pieces = len(held)
            self._at(self._now + self._network.latency, self._answer, host, held, dict(host.failures), early)

    def _answer(self, host: Host, held: Bitmap, failures: dict[str, int], early: bool) -> None:
        before = time.process_time()
        answer = self._tracker.report(VERSION, host.name, held, host.needs, failures, self._now)
        self._outcome.cpu += time.process_time() - before
        self._outcome.reports += 1
        self._answered += sum(pieces.bits.nbytes for pieces in answer.named.values())
        self._at(self._now + self._network.latency, self._answered_to, host, answer, early)

    def _answered_to(self, host: Host, answer: TrackerAnswer, early: bool) -> None:
        host.named, host.interval = dict(answer.named), answer.interval
        if not early:
            self._at(self._now + answer.interval, self._report, host)
        self._fill(host)

    # Requests

    def _fill(self, host: Host) -> None:
        network = self._network
        if not host.alive or host.done < math.inf:
            return
        requests = [PieceRequest(flow.piece, flow.source.name, flow.started, network.piece_bytes) for flow in host.receiving]
        before = time.process_time()
        named = [(peer, pieces, peer == ORIGIN) for peer, pieces in host.named.items()]
        missing = host.needs - host.held
        chosen = choose(missing, named, host.records, requests, self._now, network.limits)
        few = sum(len(pieces & missing) for _, pieces, _ in named) <= FEW
        self._outcome.choosing += time.process_time() - before
        if few and not host.reports_early and len(host.held) > host.reported_pieces:
            host.reports_early = True
            self._at(max(self._now, host.reported + EARLY * host.interval), self._report, host, True)
        for piece, peer in chosen:
            flow = Flow(piece, self._by_name[peer], host, self._now, network.piece_bytes, self._now)
            host.receiving.append(flow)
            if flow.source.alive:
                self._at(self._now + 2 * network.latency, self._start, flow)
            else:
                self._at(self._now + network.limits.stalled, self._give_up, flow)

    def _start(self, flow: Flow) -> None:
        if not flow.ended:
            if len(flow.source.sending) >= self._network.uploads:
                self._refuse(flow)
                return
            flow.at = self._now
            flow.source.sending.append(flow)
            self._share(flow.source, flow.target)

    def _refuse(self, flow: Flow) -> None:
        self._outcome.refused += 1
        host, peer = flow.target, flow.source.name
        record = host.records.get(peer, PeerRecord())
        host.records[peer] = after_busy(record, self._network.piece_bytes, self._now, host.chance)
        self._end(flow)
        self._at(host.records[peer].retry_at, self._fill, host)

    def _share(self, *ends: Host) -> None:
        """Set the rates of all transfers of some hosts anew."""
        link = self._network.rate
        for flow in {flow for end in ends for flow in (*end.sending, *end.receiving)}:
            rate = min(link / max(1, len(flow.source.sending)), link / len(flow.target.receiving))
            if flow.source.alive and flow in flow.source.sending and rate != flow.rate:
                flow.left -= flow.rate * (self._now - flow.at)
                flow.at, flow.rate = self._now, rate
                if (end := self._now + flow.left / rate) < flow.due:
                    flow.due = end
                    self._at(end, self._check, flow, end)

    def _check(self, flow: Flow, due: float) -> None:
        """End a transfer, or look again at its end if it has become slower."""
        if flow.ended or flow.due != due or not flow.source.alive:
            return
        left = flow.left - flow.rate * (self._now - flow.at)
        if left > 1:
            flow.due = self._now + left / flow.rate
            self._at(flow.due, self._check, flow, flow.due)
        else:
            self._complete(flow)

    def _complete(self, flow: Flow) -> None:
        host, size = flow.target, self._network.piece_bytes
        self._received += 1
        record = host.records.get(flow.source.name, PeerRecord())
        host.records[flow.source.name] = after_answer(record, size, self._now - flow.started)
        self._end(flow)
        for other in [other for other in host.receiving if other.piece == flow.piece]:
            self._repeated += 1
            self._end(other)
        host.held.add(flow.piece)
        if not len(host.needs - host.held):
            host.done = self._now
            self._left -= 1
        self._fill(host)

    def _end(self, flow: Flow) -> None:
        flow.ended = True
        flow.target.receiving.remove(flow)
        if flow in flow.source.sending:
            left = max(0.0, flow.left - flow.rate * (self._now - flow.at))
            self._sent += (self._network.piece_bytes - left) * (flow.source is self._origin)
            flow.source.sending.remove(flow)
        self._share(flow.source, flow.target)

    # Faults

    def _die(self, host: Host) -> None:
        host.alive = False
        self._left -= host.done == math.inf
        for flow in list(host.receiving):
            self._end(flow)
        for flow in host.sending:
            self._at(self._now + self._network.limits.stalled, self._give_up, flow)
        self._at(self._now + self._network.lease, self._tracker.remove_node, host.name)

    def _give_up(self, flow: Flow) -> None:
        if not flow.ended:
            self._outcome.failed += 1
            host = flow.target
            record = host.records.get(flow.source.name, PeerRecord())
            host.records[flow.source.name] = after_failure(record, self._now, self._network.limits)
            host.failures[flow.source.name] += 1
            self._end(flow)
            self._fill(host)
