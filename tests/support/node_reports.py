"""Reports of nodes to the daemon, and the daemon's orders of sets."""

from collections.abc import Iterable
from typing import Any

from resharder.converters.wire.pieces import Bitmap
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.known_node import KnownNode
from resharder.v1 import node_pb2, resources_pb2


def report_of(
    node: str, instance: str = "i", capacity: int = 1 << 30, nonce: bytes = b"", **more: Any
) -> node_pb2.SyncNodeRequest:
    """A report of the node of this id, whose data port is `{node}:7679`."""
    store = resources_pb2.StoreAccess(nonce_file=f"/{node}/nonce", nonce=nonce or node.encode())
    given = {"data_address": f"{node}:7679", "store": store, "capacity_bytes": capacity} | more
    return node_pb2.SyncNodeRequest(node=f"nodes/{node}", instance=instance, **given)


def report_to(homes: HomeRegister, report: node_pb2.SyncNodeRequest, caller: str = "", drained: bool = False) -> None:
    """Have a node report to a register of homes."""
    homes.reported(KnownNode(report, caller, 0.0, 0.0, drained=drained))


def lose_nodes(homes: HomeRegister, *nodes: str) -> None:
    """Have nodes leave a register of homes."""
    homes.gone(*(homes.nodes.pop(node) for node in nodes if node in homes.nodes))


def with_values(report: node_pb2.SyncNodeRequest, **more: Any) -> node_pb2.SyncNodeRequest:
    """A report with these values in place of its own."""
    found = node_pb2.SyncNodeRequest()
    found.CopyFrom(report)
    for name in more:
        found.ClearField(name)
    found.MergeFrom(node_pb2.SyncNodeRequest(**more))
    return found


def reservation_of(id: str, node: str, sets: Iterable[str], problem: str = "") -> node_pb2.NodeReservation:
    """A node's report on a reservation: its sets, each in a folder of its id."""
    found = [node_pb2.FileSet(id=each, folder=f"/{node}/{each}") for each in sets]
    return node_pb2.NodeReservation(id=id, sets=found, problem=problem)


def order_of(
    version: str, state: node_pb2.FileSetOrder.State, closed: Iterable[str] = (), gathers: bool = False, *sources: tuple[str, str]
) -> node_pb2.FileSetOrder:
    """The order for the set `s`. `sources`: ids of nodes and their data ports."""
    parts = [node_pb2.PartSource(node=f"nodes/{node}", data_address=address) for node, address in sources]
    return node_pb2.FileSetOrder(id="s", version=version, state=state, closed=closed, gathers=gathers, sources=parts)


def pieces_at(order: node_pb2.NodeOrder, pieces: int) -> dict[str, list[int]]:
    """The pieces of each peer in an order."""
    return {peer.node: list(Bitmap.from_bytes(pieces, peer.held)) for peer in order.peers}
