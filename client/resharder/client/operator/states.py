"""Enumerations in the answers of a daemon. Values are the names of `resharder.v1`, and those in `--json`."""

from enum import StrEnum


class VersionState(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    UPLOADING = "UPLOADING"
    READY = "READY"
    RETIRED = "RETIRED"
    ABORTED = "ABORTED"


class SlotState(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    OPEN = "OPEN"
    SEALED = "SEALED"


class PublisherState(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    REGISTERING = "REGISTERING"
    ACTIVE = "ACTIVE"
    REJECTED = "REJECTED"
    FENCED = "FENCED"


class ServerState(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    BOOTING = "BOOTING"
    SERVING = "SERVING"
    STAGING = "STAGING"
    """Serves one version and fetches another."""
    APPLYING = "APPLYING"
    """Paused."""
    FAILED = "FAILED"
    LOST = "LOST"
    """Its lease has ended."""
    ASLEEP = "ASLEEP"
    DRAINED = "DRAINED"
    WAITING = "WAITING"
    """Staged or applied; goes on when other servers of the fleet have."""


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
    """State of a worker, as it last reported it."""

    UNSPECIFIED = "STATE_UNSPECIFIED"
    BOOTED = "BOOTED"
    STAGED = "STAGED"
    APPLIED = "APPLIED"
    FAILED = "FAILED"
    EMPTY = "EMPTY"


class InstallPhase(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    STAGING = "STAGING"
    APPLYING = "APPLYING"
    COMMITTED = "COMMITTED"
    FAILED = "FAILED"


class MovePhase(StrEnum):
    UNSPECIFIED = "STATE_UNSPECIFIED"
    STAGING = "STAGING"
    APPLYING = "APPLYING"
    TRYING = "TRYING"
    HOLDING = "HOLDING"
    MOVING = "MOVING"
    BACK = "BACK"
    STOPPED = "STOPPED"
    DONE = "DONE"
    FAILED = "FAILED"


class RequestHandling(StrEnum):
    """Treatment of requests in flight while a version is installed."""

    UNSPECIFIED = "PAUSE_MODE_UNSPECIFIED"
    KEEP = "KEEP"
    """They freeze, and go on with the new weights."""
    WAIT = "WAIT"
    """They finish on the old weights first."""
    ABORT = "ABORT"
    """They end with the tokens they have."""


class TargetKind(StrEnum):
    UNSPECIFIED = "KIND_UNSPECIFIED"
    LATEST = "LATEST"
    """The newest READY version that is not refused."""
    NUMBER = "NUMBER"
    """One version, regardless of newer ones."""
    NONE = "NONE"
    """The version served now, if any."""


class StrategyKind(StrEnum):
    UNSPECIFIED = "KIND_UNSPECIFIED"
    ALL_AT_ONCE = "ALL_AT_ONCE"
    """Each server for itself."""
    ROLLING = "ROLLING"
    """At most `at_a_time` servers; stops after `max_failures` of them failed."""
    CANARY = "CANARY"
    """`canaries` servers first; then the rest as by ROLLING, or all back."""
    ATOMIC = "ATOMIC"
    """All servers switch, or none."""
