"""Operators' orders to nodes to measure the links from them to other hosts.

A link is measured by the node that reads over it. A host takes part in one measurement at a time, as source or target, so that
none slows another one. Orders and results last as long as the operator's call.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from resharder.server.infra.change_signal import ChangeSignal, Pause
from resharder.server.nodes.known_node import KnownNode
from resharder.server.nodes.reports import LinkOrder, StateReport
from resharder.server.state.errors import InvalidArgument, PermissionDenied, ResourceNotFound
from resharder.server.state.version import DAEMON, host_name
from resharder.v1 import resources_pb2

MOST_LINKS = 256
"""Links of one order at most."""
_MOST_VERSIONS = 8  # of which a node tries pieces
_MOST_RATES = 8
_LINK_SECONDS = 60.0  # until a source that is live and sends no result is given up
_LOOK_SECONDS = 0.5
_MOST_SECONDS = 1e9


class LinkEnds(NamedTuple):
    """Link from the node with the id `source` to `target`: `nodes/{id}` or `daemon`."""

    source: str
    target: str

    @property
    def hosts(self) -> frozenset[str]:
        """Names of both ends."""
        return frozenset((f"nodes/{self.source}", self.target))


@dataclass
class _Measurement:
    link: LinkEnds
    order: LinkOrder
    instance: str
    began: float
    result: resources_pb2.LinkMeasurement | None = None


class LinkOrders:
    """Measurements that operators wait for. Thread-safe.

    Args:
        nodes: All nodes by id, of the register.
        lock: The register's lock, which guards them.
        served: READY versions, of which nodes may send pieces.
    """

    def __init__(
        self,
        nodes: Mapping[str, KnownNode],
        lock: threading.Lock,
        served: Container[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nodes, self._lock, self._served, self._clock = nodes, lock, served, clock
        self._running: dict[str, _Measurement] = {}  # by the source's id
        self._changed = ChangeSignal()

    def measure(
        self, sources: Sequence[str], targets: Sequence[str], own_versions: Sequence[str], wait_seconds: float
    ) -> Iterator[resources_pb2.LinkMeasurement | Pause]:
        """Let nodes measure links, and yield the measurements as they arrive. Closing the generator ends the orders.

        Args:
            sources: Ids of nodes that measure; none for all live ones.
            targets: `nodes/{id}` or `daemon`; none for all.
            own_versions: READY versions of the daemon's data port.
            wait_seconds: Bound on the wait: links that are not measured by then are yielded with a problem.

        Raises:
            ResourceNotFound: NODE_UNKNOWN.
            InvalidArgument: NODE: no link, or more than `MOST_LINKS`.
        """
        with self._lock:
            waiting = links_of(sources, targets, {id: not node.lost for id, node in self._nodes.items()})
        until, mine = self._clock() + wait_seconds, list[_Measurement]()
        try:
            while waiting or mine:
                seen = self._changed.count
                with self._lock:
                    done = [result for each in list(mine) if (result := self._result(each, mine, until)) is not None]
                    if self._clock() >= until:
                        done += [self._failed(link, f"not measured within {wait_seconds:g} s") for link in waiting]
                        waiting = []
                    for link in next_links(waiting, {host for each in self._running.values() for host in each.link.hosts}):
                        waiting.remove(link)
                        if (missing := self._missing(link.source)) is not None:
                            done.append(self._failed(link, missing))
                        else:
                            mine.append(self._start(link, own_versions))
                yield from done
                if not done:
                    yield self._changed.pause(seen, _LOOK_SECONDS)
        finally:
            with self._lock:
                for each in list(mine):
                    self._end(each, mine)

    def put(self, node: str, instance: str, caller: str, order: str, found: resources_pb2.LinkMeasurement) -> None:
        """Record a node's measurement. A no-op if its order has ended.

        Raises:
            ResourceNotFound: NODE_UNKNOWN.
            PermissionDenied: NOT_ALLOWED: the node belongs to another identity.
        """
        with self._lock:
            known = self._nodes.get(node)
            if known is None:
                raise ResourceNotFound("NODE_UNKNOWN", f"node {node!r} is not live")
            if known.caller != caller:
                raise PermissionDenied("NOT_ALLOWED", f"node {node!r} belongs to {known.caller or 'a caller without a name'}")
            running = self._running.get(node)
            if running is not None and (running.order.id, running.instance) == (order, instance):
                running.result = _bounded(running, found)
        self._changed.emit()

    def _start(self, link: LinkEnds, own_versions: Sequence[str]) -> _Measurement:
        node, target = self._nodes[link.source], self._nodes.get(link.target.removeprefix("nodes/"))
        address, versions = "", tuple(own_versions)
        if link.target != host_name(DAEMON):
            address = target.report.data_address if target is not None else ""
            versions = _held(target.report, self._served) if target is not None else ()
        order = LinkOrder(secrets.token_hex(8), link.target, address, versions[:_MOST_VERSIONS])
        found = self._running[link.source] = _Measurement(link, order, node.report.instance, self._clock())
        node.link = order
        node.changed.emit()
        return found

    def _result(self, running: _Measurement, mine: list[_Measurement], until: float) -> resources_pb2.LinkMeasurement | None:
        """Return the result of a measurement, which ends by it; None while it runs."""
        id, now, found = running.link.source, self._clock(), running.result
        problem = self._missing(id)
        if not problem and self._nodes[id].report.instance != running.instance:
            problem = f"nodes/{id} has started again"
        if not problem and now >= min(until, running.began + _LINK_SECONDS):
            problem = f"nodes/{id} has sent no result in {now - running.began:.0f} s"
        if found is None and problem:
            found = self._failed(running.link, problem)
        if found is not None:
            self._end(running, mine)
        return found

    def _end(self, running: _Measurement, mine: list[_Measurement]) -> None:
        mine.remove(running)
        del self._running[running.link.source]
        node = self._nodes.get(running.link.source)
        if node is not None:
            node.link = None
            node.changed.emit()
        self._changed.emit()

    def _missing(self, id: str) -> str | None:
        node = self._nodes.get(id)
        if node is None:
            return f"nodes/{id} has left"
        return f"nodes/{id} is lost, and measures nothing" if node.lost else None

    def _failed(self, link: LinkEnds, problem: str) -> resources_pb2.LinkMeasurement:
        target = self._nodes.get(link.target.removeprefix("nodes/"))
        return resources_pb2.LinkMeasurement(
            source=f"nodes/{link.source}",
            target=link.target,
            data_address=target.report.data_address if target is not None else "",
            problem=problem,
            mend=f"look at the process resharder-node on the host of nodes/{link.source}, and in its log",
        )


def links_of(sources: Sequence[str], targets: Sequence[str], nodes: Mapping[str, bool]) -> list[LinkEnds]:
    """Return the links from each source to each target.

    Args:
        sources: Ids of nodes; none for all live ones.
        targets: `nodes/{id}` or `daemon`; none for all.
        nodes: Whether each known node is live.

    Raises as `LinkOrders.measure` does.
    """
    names = {host_name(DAEMON), *(f"nodes/{id}" for id in nodes)}
    if unknown := [name for name in (*(f"nodes/{id}" for id in sources), *targets) if name not in names]:
        raise ResourceNotFound("NODE_UNKNOWN", f"{unknown[0]} is unknown; there are {', '.join(sorted(names))}")
    chosen = sources or [id for id, live in sorted(nodes.items()) if live]
    reached = targets or sorted(names)
    found = list(dict.fromkeys(LinkEnds(id, target) for id in chosen for target in reached if target != f"nodes/{id}"))
    if not 0 < len(found) <= MOST_LINKS:
        raise InvalidArgument(
            "NODE", f"expected 1 to {MOST_LINKS} links between two hosts each, got {len(found)}: name other sources or targets"
        )
    return found


def next_links(waiting: Sequence[LinkEnds], busy: Collection[str]) -> list[LinkEnds]:
    """Return links of hosts that take part in no other measurement, the first ones first."""
    taken, chosen = set(busy), []
    for link in waiting:
        if taken.isdisjoint(link.hosts):
            taken |= link.hosts
            chosen.append(link)
    return chosen


def _held(report: StateReport, served: Container[str]) -> tuple[str, ...]:
    """Return the READY versions of which a node holds pieces, most pieces first."""
    held = {copy.version: int.from_bytes(copy.held).bit_count() for copy in report.copies if copy.version in served}
    return tuple(sorted((version for version in held if held[version]), key=lambda version: -held[version]))


def _bounded(running: _Measurement, found: resources_pb2.LinkMeasurement) -> resources_pb2.LinkMeasurement:
    """Return a node's measurement with the ends that it was ordered, and with its texts cut to their bounds."""
    trip = _seconds(found.round_trip_seconds) if found.HasField("round_trip_seconds") else None
    return resources_pb2.LinkMeasurement(
        source=f"nodes/{running.link.source}",
        target=running.link.target,
        data_address=(running.order.data_address or found.data_address)[:300],
        round_trip_seconds=trip,
        rates=[
            resources_pb2.LinkRate(streams=max(1, rate.streams), bytes=max(0, rate.bytes), seconds=_seconds(rate.seconds))
            for rate in found.rates[:_MOST_RATES]
        ],
        problem=found.problem[:500],
        mend=found.mend[:500],
        unread=found.unread[:500],
    )


def _seconds(value: float) -> float:
    return min(max(0.0, value), _MOST_SECONDS)  # in this order, 0.0 for no number
