"""Operators' calls about nodes."""

from collections.abc import Iterator

from google.protobuf.message import Message
from resharder.server.infra.change_signal import Pause
from resharder.server.infra.event_log import Events
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.nodes.replication import ReplicaShortage
from resharder.server.rpc.dispatch import Call
from resharder.server.rpc.node_service import node_id, node_to_proto
from resharder.server.rpc.views import page_of, seconds
from resharder.server.store.catalogue import Catalogue
from resharder.v1 import operator_pb2


class NodeCalls:
    """Methods of `OperatorService` about nodes. Errors are those of the parts that each method calls."""

    def __init__(self, nodes: NodeRegistry, events: Events, catalogue: Catalogue) -> None:
        self._nodes, self._node_events, self._catalogue = nodes, events, catalogue

    def ListNodes(self, request: operator_pb2.ListNodesRequest, call: Call) -> Message:
        """List nodes by id, in pages. Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN)."""
        views = [(view.report.node, view) for view in self._nodes.views()]
        page, token = page_of(views, request.page_size, request.page_token)
        shortages = () if request.page_token else self._nodes.replication.shortages()
        return operator_pb2.ListNodesResponse(
            nodes=map(node_to_proto, page), next_page_token=token, shortages=map(_shortage, shortages)
        )

    def SetNodeDrained(self, request: operator_pb2.SetNodeDrainedRequest, call: Call) -> Message:
        """Drain a node, or resume it. Raises InvalidArgument (NODE), ResourceNotFound (NODE_UNKNOWN)."""
        view = self._nodes.set_drained(node_id(request.node), request.drained)
        self._node_events.add("operator", request.node, "drain" if request.drained else "resume")
        return node_to_proto(view)

    def MeasureLinks(self, request: operator_pb2.MeasureLinksRequest, call: Call) -> Iterator[Message | Pause]:
        """Let nodes measure links, and stream the results. Raises InvalidArgument (NODE), ResourceNotFound (NODE_UNKNOWN)."""
        newest = filter(None, map(self._catalogue.newest, self._catalogue.models()))
        versions = [record.name for record in sorted(newest, key=lambda record: -record.ready_time)]
        sources = [node_id(name) for name in request.sources]
        yield from self._nodes.links.measure(sources, request.targets, versions, seconds(request.wait_seconds))


def _shortage(found: ReplicaShortage) -> operator_pb2.ReplicaShortage:
    return operator_pb2.ReplicaShortage(
        version=found.version,
        short_pieces=found.short,
        pieces=found.pieces,
        replicas=found.replicas,
        waits=found.waits,
        problem=found.problem,
    )
