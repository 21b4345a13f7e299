"""Queries and commands about nodes, which hold versions in the memory of other hosts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from resharder.client.operator.convert import answer
from resharder.client.operator.queries import OperatorQueries
from resharder.v1 import operator_pb2


class NodeLife(StrEnum):
    """State of a node."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    LIVE = "LIVE"
    DRAINED = "DRAINED"
    """Takes no further version, and drops versions that no process maps."""
    LOST = "LOST"
    """No call within its lease."""


@dataclass(frozen=True)
class NodeCopyStatus:
    """A version that a node holds or should hold."""

    version: str
    """`models/{model}/versions/{number}`."""
    held_pieces: int
    wanted_pieces: int
    """Pieces that workers on its host need, or that ranks there write."""
    pieces: int
    wanted: bool
    """Whether the node should hold it."""
    problem: str
    """Reason for which it does not arrive; empty for none."""
    servers: tuple[str, ...]
    """Ids of the servers that asked for it."""
    uploading: bool = False
    """Whether ranks on its host write `wanted_pieces` of it."""


@dataclass(frozen=True)
class NodeLink:
    """A node's transfers from one peer since the node's process began."""

    peer: str
    """`nodes/{id}`, or `daemon`."""
    received_bytes: int
    """Bytes of verified pieces."""
    seconds: float
    """Sum over their requests, several of which run at a time: `received_bytes / seconds` is the rate of one."""
    failures: int
    problem: str
    """Reason for which the last request failed; empty if it succeeded."""


@dataclass(frozen=True)
class NodeStatus:
    """Process that holds versions in the shared memory of its host."""

    name: str
    """`nodes/{id}`."""
    state: NodeLife
    data_address: str
    """`host:port` at which other nodes fetch pieces."""
    capacity_bytes: int
    used_bytes: int
    transfers: int
    """Pieces that it sends to other nodes now."""
    received_origin_bytes: int
    """Bytes that it received from the daemon since its process began."""
    received_peer_bytes: int
    """Bytes that it received from other nodes."""
    sent_bytes: int
    report_time: datetime | None
    copies: tuple[NodeCopyStatus, ...]
    received_engine_bytes: int
    """Bytes that it received from other nodes by a transfer engine."""
    links: tuple[NodeLink, ...]
    """To the last peers from which it requested pieces."""


@dataclass(frozen=True)
class ReplicaShortageStatus:
    """Version of which too few hosts hold pieces."""

    version: str
    """`models/{model}/versions/{number}`."""
    short_pieces: int
    """Pieces with fewer holders than `replicas`."""
    pieces: int
    replicas: int
    waits: bool
    """Whether it is withheld from READY until it has its replicas."""
    problem: str


@dataclass(frozen=True)
class LinkRate:
    """Bytes received over a number of connections at once, and the time."""

    streams: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class LinkMeasurement:
    """Link between two hosts, measured by the node that reads from the other one."""

    source: str
    """`nodes/{id}` of the node that has measured it."""
    target: str
    """`nodes/{id}`, or `daemon`."""
    data_address: str
    """`host:port` of the target."""
    round_trip_seconds: float | None
    """Time of a request for one byte; of a connection if no byte may be read; None if there is no connection."""
    rates: tuple[LinkRate, ...]
    problem: str
    """Reason for which it is not measured; empty for none."""
    mend: str
    """Advice."""
    unread: str
    """Reason for which the target sends no piece, although it answers; empty if it does."""


class NodeCommands(OperatorQueries):
    """Queries and commands named as in `resharder`."""

    def nodes(self) -> list[NodeStatus]:
        """Return nodes, sorted by id."""
        return list(self._pages(self._stub.ListNodes, operator_pb2.ListNodesRequest(), "nodes", NodeStatus))

    def replica_shortages(self) -> list[ReplicaShortageStatus]:
        """Return the versions with fewer replicas than the daemon's `replicas`, if that is above 2."""
        found = self._call(self._stub.ListNodes, operator_pb2.ListNodesRequest(page_size=1))
        return [answer(ReplicaShortageStatus, each) for each in found.shortages]

    def drain_node(self, node: str) -> NodeStatus:
        """Let a node take no further version, and drop versions that no process maps.

        Args:
            node: Id, or `nodes/{id}`.

        Returns:
            The node after the change.

        Raises:
            NotFound: No such node.
        """
        return self._set_node_drained(node, True)

    def resume_node(self, node: str) -> NodeStatus:
        """Let a drained node take versions again.

        Args:
            node: Id, or `nodes/{id}`.

        Returns:
            The node after the change.

        Raises:
            NotFound: No such node.
        """
        return self._set_node_drained(node, False)

    def measure_links(
        self, sources: Iterable[str] = (), targets: Iterable[str] = (), *, timeout: float = 900.0
    ) -> Iterator[LinkMeasurement]:
        """Let nodes measure the links to other hosts.

        A node reads at most 64 MiB or for 3 s, over one connection and over four, and discards what it has read. A host takes
        part in one measurement at a time.

        Args:
            sources: Ids of the nodes that measure, or `nodes/{id}`; none for all live ones.
            targets: The same, or `daemon`; none for all nodes and the daemon.
            timeout: Seconds after which the links that are left are yielded with a problem.

        Returns:
            Iterator of the measurements, in the order in which they arrive.

        Raises:
            NotFound: No such node.
            Refused: NODE: no link between two hosts, or more than 256.
        """
        request = operator_pb2.MeasureLinksRequest(
            sources=map(_node_name, sources),
            targets=(name if name == "daemon" else _node_name(name) for name in targets),
            wait_seconds=timeout,
        )
        for found in self._channel.stream(self._channel.begin(self._stub.MeasureLinks, request, timeout=timeout + 30)):
            yield answer(LinkMeasurement, found)

    def _set_node_drained(self, node: str, drained: bool) -> NodeStatus:
        request = operator_pb2.SetNodeDrainedRequest(node=_node_name(node), drained=drained)
        return answer(NodeStatus, self._call(self._stub.SetNodeDrained, request))


def _node_name(node: str) -> str:
    return f"nodes/{node.removeprefix('nodes/')}"
