"""What nodes report, and views of them for operators."""

from dataclasses import dataclass

from resharder.converters.wire.pieces import Bitmap
from resharder.server.state.errors import InvalidArgument
from resharder.v1 import node_pb2, resources_pb2


@dataclass(frozen=True)
class CopyView:
    """A version on a node, for display. Of an UPLOADING one, ranks write `wanted_pieces` there."""

    version: str
    held_pieces: int
    wanted_pieces: int
    pieces: int
    wanted: bool
    problem: str
    servers: tuple[str, ...]
    uploading: bool = False


@dataclass(frozen=True)
class NodeView:
    """A node for display. `report_time` is in seconds since 1970."""

    report: node_pb2.SyncNodeRequest
    state: resources_pb2.Node.State
    report_time: float
    copies: tuple[CopyView, ...]


def id_of(report: node_pb2.SyncNodeRequest) -> str:
    """Return the id of the node that reports."""
    return report.node.removeprefix("nodes/")


def wanted_of(count: int, version: str, pieces: bytes) -> Bitmap:
    """Return the pieces that are needed, all if there is no bitmap. Raises InvalidArgument (NODE) for one of another length."""
    return bitmap_of(count, node_pb2.NodeVersion(version=version, held=pieces)) if pieces else Bitmap.full(count)


def bitmap_of(count: int, copy: node_pb2.NodeVersion | None) -> Bitmap:
    """Return the pieces of a report. Raises InvalidArgument (NODE) for a bitmap of another length."""
    try:
        return Bitmap.from_bytes(count, copy.held) if copy is not None and copy.held else Bitmap(count)
    except ValueError as error:
        raise InvalidArgument("NODE", f"{copy.version if copy else ''}: {error}") from None
