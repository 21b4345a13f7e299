"""Enumerations in the daemon's answers. Values are the names in `resharder.v1` and in `--json`."""

from dataclasses import dataclass
from enum import StrEnum


class VersionState(StrEnum):
    """State of a version."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    UPLOADING = "UPLOADING"
    """Ranks deliver their slots."""
    READY = "READY"
    """Complete and verified."""
    RETIRED = "RETIRED"
    """Deleted by retention or an operator."""
    ABORTED = "ABORTED"
    """Ended before READY."""


class SlotState(StrEnum):
    """State of one rank's part of a version. SEALED: the rank has delivered it."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    OPEN = "OPEN"
    SEALED = "SEALED"


class PublisherState(StrEnum):
    """State of a job's claim to a model."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    REGISTERING = "REGISTERING"
    """Not all ranks have registered their slot."""
    ACTIVE = "ACTIVE"
    """Slots tile the model, and the store has reserved capacity."""
    REJECTED = "REJECTED"
    """Slots do not tile the model, or the store lacks capacity."""
    FENCED = "FENCED"
    """A newer job has taken over the model."""
    GONE = "GONE"
    """ACTIVE before, but no rank has called within its lease: it has closed, ended, or is out of reach."""


class ServerState(StrEnum):
    """State of a server."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    BOOTING = "BOOTING"
    SERVING = "SERVING"
    STAGING = "STAGING"
    """Serves one version and stages another."""
    APPLYING = "APPLYING"
    """Paused for an install."""
    FAILED = "FAILED"
    """Out of service; the gate answers 503."""
    LOST = "LOST"
    """Its lease has ended."""
    ASLEEP = "ASLEEP"
    DRAINED = "DRAINED"
    """Closed by an operator."""
    WAITING = "WAITING"
    """Staged or applied; continues when other servers of the fleet are as far."""


class ServerPower(StrEnum):
    """Content of a server's GPU memory."""

    UNSPECIFIED = "POWER_UNSPECIFIED"
    AWAKE = "AWAKE"
    WEIGHTS_AWAKE = "WEIGHTS_AWAKE"
    """Weights without a KV cache."""
    ASLEEP_1 = "ASLEEP_1"
    """Weights are in host memory."""
    ASLEEP_2 = "ASLEEP_2"
    """Weights are dropped and come from the daemon at the next wake."""


class WorkerReport(StrEnum):
    """State of a worker, as last reported by it."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    BOOTED = "BOOTED"
    STAGED = "STAGED"
    APPLIED = "APPLIED"
    FAILED = "FAILED"
    EMPTY = "EMPTY"


class InstallPhase(StrEnum):
    """Phase of an install on one server."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    STAGING = "STAGING"
    APPLYING = "APPLYING"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class MovePhase(StrEnum):
    """Phase of a fleet's update from one version to another."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    STAGING = "STAGING"
    """ATOMIC: servers stage while they serve."""
    APPLYING = "APPLYING"
    """ATOMIC: all servers are closed until all have applied."""
    TRYING = "TRYING"
    """CANARY: the canaries install."""
    HOLDING = "HOLDING"
    """CANARY: the canaries serve, until the hold time, an approval or a check ends it."""
    MOVING = "MOVING"
    """Servers install."""
    BACK = "BACK"
    """Servers return to the previous version."""
    STOPPED = "STOPPED"
    """Too many servers have failed; an operator decides."""
    DONE = "DONE"
    FAILED = "FAILED"
    """All servers have returned; the new version is refused."""


class RequestHandling(StrEnum):
    """Treatment of requests in progress while a version is installed."""

    UNSPECIFIED = "PAUSE_MODE_UNSPECIFIED"
    KEEP = "KEEP"
    """Requests are paused, and continue with the new weights."""
    WAIT = "WAIT"
    """Requests finish with the old weights first."""
    ABORT = "ABORT"
    """Requests end with the tokens they have."""


class ServeAhead(StrEnum):
    """Setting of a fleet for versions that are not READY."""

    UNSPECIFIED = "SERVE_AHEAD_UNSPECIFIED"
    AUTO = "SERVE_AHEAD_AUTO"
    """Servers of a fleet that moves all at once, without a skew bound, take them; others do not."""
    ON = "SERVE_AHEAD_ON"
    OFF = "SERVE_AHEAD_OFF"


class TargetKind(StrEnum):
    """Kind of a version target."""

    UNSPECIFIED = "KIND_UNSPECIFIED"
    LATEST = "LATEST"
    """The newest READY version that is not refused."""
    NUMBER = "NUMBER"
    """One version, regardless of newer ones."""
    NONE = "NONE"
    """The version served now, if any."""


class StrategyKind(StrEnum):
    """Kind of an update strategy."""

    UNSPECIFIED = "KIND_UNSPECIFIED"
    ALL_AT_ONCE = "ALL_AT_ONCE"
    """Each server independently."""
    ROLLING = "ROLLING"
    """At most `at_a_time` servers; stops after `max_failures` of them failed."""
    CANARY = "CANARY"
    """`canaries` servers first; then the others as with ROLLING, or all back."""
    ATOMIC = "ATOMIC"
    """All servers switch, or none."""


@dataclass(frozen=True)
class VersionHomeStatus:
    """Files of an UPLOADING version on `nodes/{id}`, in `folder` on its host.

    `gathers`: whether nodes fetch boxes of tensors from each other that ranks of several hosts write.
    """

    node: str
    folder: str
    gathers: bool = False
