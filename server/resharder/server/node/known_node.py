"""A node as the daemon's register has it."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from resharder.converters.wire.pieces import Bitmap
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.node.reports import StateReport
from resharder.server.state.errors import FailedPrecondition


@dataclass
class KnownNode:
    """The last report of a node, and what workers on its host need."""

    report: StateReport
    caller: str
    reported_at: float
    report_time: float
    drained: bool = False
    lost: bool = False
    former: deque[str] = field(default_factory=lambda: deque(maxlen=64))
    """Earlier processes of this id."""
    wants: dict[str, set[str]] = field(default_factory=dict)
    """Ids of the servers that asked for each version; versions in the order of their last new request."""
    pieces: dict[str, Bitmap] = field(default_factory=dict)
    """Pieces of each of these versions that workers on the host need."""
    changed: ChangeSignal = field(default_factory=ChangeSignal)

    def want(self, version: str, servers: Iterable[str], pieces: Bitmap) -> None:
        """Add the servers and pieces of a request for a version, which becomes the last requested one."""
        self.wants[version] = self.wants.pop(version, set()).union(servers)
        self.pieces[version] = self.pieces.get(version, Bitmap(pieces.count)) | pieces


def replaced(id: str) -> FailedPrecondition:
    """Return the error for a node whose id another process has."""
    return FailedPrecondition("NODE_REPLACED", f"another process has become node {id!r}: it has to end")


def model_of(version: str) -> str:
    """Return the model in `models/{model}/versions/{number}`."""
    return version.split("/")[1]


def readers_of(names: set[str], nodes: Iterable[KnownNode]) -> set[str]:
    """Return the identities that nodes admit of the callers that may read a model; nodes with tokens by their certificates."""
    tokens = {name for name in names if name.startswith("token:")}
    callers = [node for node in nodes if node.caller.rpartition("@")[0] in tokens]
    return (names - tokens) | {node.report.certificate for node in callers if node.report.certificate}
