"""Reports of nodes, the daemon's orders to them, and views of both for operators and workers."""

from dataclasses import dataclass
from typing import NamedTuple

from resharder.converters.wire.pieces import Bitmap
from resharder.server.holding.sources import PeerOffer
from resharder.server.holding.swarm import LinkReport
from resharder.server.state.errors import InvalidArgument
from resharder.v1 import node_pb2, resources_pb2


@dataclass(frozen=True)
class CopyReport:
    """A node's report on one version. `held` and `wanted` are packed bitmaps of its pieces; no `wanted` means all.

    `addresses` are those of its files in the memory of `StateReport.session`; none if they are not there.
    """

    version: str
    folder: str
    held: bytes
    problem: str = ""
    wanted: bytes = b""
    addresses: tuple[int, ...] = ()


class ReportedSet(NamedTuple):
    """A node's files of one version of an epoch, in `folder`."""

    id: str
    folder: str


@dataclass(frozen=True)
class ReservationReport:
    """A node's report on a reservation: the sets of files that no READY version has taken over, or why there is none."""

    id: str
    sets: tuple[ReportedSet, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class StateReport:
    """A node's report on itself. `instance` names the lifetime of its process, `session` its transfer engine; empty for none."""

    node: str
    instance: str
    data_address: str
    nonce_file: str
    nonce: bytes
    capacity_bytes: int
    used_bytes: int
    transfers: int = 0
    received_daemon_bytes: int = 0
    received_peer_bytes: int = 0
    sent_bytes: int = 0
    copies: tuple[CopyReport, ...] = ()
    session: str = ""
    received_engine_bytes: int = 0
    links: tuple[LinkReport, ...] = ()
    certificate: str = ""
    reservations: tuple[ReservationReport, ...] = ()
    ending: bool = False
    gathers: bool = False
    """Whether it fetches boxes that ranks have written on other nodes."""


@dataclass(frozen=True)
class FileSetOrder:
    """State of a set that a version has taken. `version` is empty if the set has ended.

    While ranks write, `closed` names the files that all of them have closed. `gathers`: whether nodes fetch boxes from each other
    in this version. Once all ranks have sealed, `sources` has the nodes with boxes of the set's files, and their data ports.
    """

    set: str
    version: str
    state: node_pb2.FileSetOrder.State
    closed: tuple[str, ...] = ()
    gathers: bool = False
    sources: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ReservationOrder:
    """A reservation of files on a node, and the sets that versions have taken. `readers` are nodes that fetch boxes from it."""

    id: str
    publisher: str
    sets: tuple[FileSetOrder, ...] = ()
    readers: tuple[str, ...] = ()


@dataclass(frozen=True)
class PeerSource:
    """A peer's pieces, its data port, and where its transfer engine has them. An empty data address is the daemon's."""

    offer: PeerOffer
    data_address: str
    session: str = ""
    addresses: tuple[int, ...] = ()


@dataclass(frozen=True)
class CopyOrder:
    """A version that a node should hold, and the packed bitmap of the pieces that workers on its host need.

    `sole_holder`: whether no other host holds some of its pieces.
    """

    version: str
    wanted: bytes
    peers: tuple[PeerSource, ...] = ()
    scarce: bytes = b""
    granted: tuple[int, ...] = ()
    readers: tuple[str, ...] = ()
    sole_holder: bool = False


@dataclass(frozen=True)
class Orders:
    """Answer to a report.

    `revision` changes with the set of versions, their pieces and readers, reservations, `drained`, and doubts about pieces.
    """

    revision: int
    versions: tuple[CopyOrder, ...]
    drained: bool
    report_seconds: float
    reservations: tuple[ReservationOrder, ...] = ()


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

    report: StateReport
    state: resources_pb2.Node.State
    report_time: float
    copies: tuple[CopyView, ...]


@dataclass(frozen=True)
class HostCopy:
    """State of a version on the node of a worker's host. `folder` is empty until the node has created it.

    `whole` is whether the node holds all that the worker needs.
    """

    node: str = ""
    folder: str = ""
    whole: bool = False
    held_bytes: int = 0
    problem: str = ""
    nonce_files: tuple[str, ...] = ()


def wanted_of(count: int, version: str, pieces: bytes) -> Bitmap:
    """Return the pieces that are needed, all if there is no bitmap. Raises InvalidArgument (NODE) for one of another length."""
    return bitmap_of(count, CopyReport(version, "", pieces)) if pieces else Bitmap.full(count)


def bitmap_of(count: int, copy: CopyReport | None) -> Bitmap:
    """Return the pieces of a report. Raises InvalidArgument (NODE) for a bitmap of another length."""
    try:
        return Bitmap.from_bytes(count, copy.held) if copy is not None and copy.held else Bitmap(count)
    except ValueError as error:
        raise InvalidArgument("NODE", f"{copy.version if copy else ''}: {error}") from None
