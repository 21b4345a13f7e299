"""Answers of the daemon to an operator: frozen dataclasses and enumerations of plain Python types.

Times are datetimes in UTC, to the microsecond; durations are in seconds, sizes in bytes. A version is an int, its number within
its model; 0 is none. The values of enumerations are the names in `resharder.v1` and in `--json`. The metadata `wire` is a field's
name there, if it differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path


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


@dataclass(frozen=True)
class VersionTarget:
    """Version that a fleet follows."""

    kind: TargetKind
    version: int = 0
    """The version, for NUMBER."""
    every_seconds: float = 0.0
    """For LATEST, the least time between two moves; 0 is no bound."""


@dataclass(frozen=True)
class UpdateStrategy:
    """Way in which an update reaches a fleet's servers."""

    kind: StrategyKind
    at_a_time: int = 0
    """Servers that install at the same time; 0 is all."""
    max_failures: int = 0
    """Failed servers after which a move stops; 0 is 1."""
    canaries: int = 0
    """Servers that move first; 0 is 1."""
    hold_seconds: float = 0.0
    """Time for which canaries serve before the other servers follow."""
    approval: bool = False
    """Whether the other servers follow only after `Operator.approve`."""
    check: str = ""
    """Command of the daemon's configuration that must exit with 0 before the other servers follow."""


@dataclass(frozen=True)
class SlotStatus:
    """Part of a version that one rank delivers."""

    rank: int
    state: SlotState
    size_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class VersionStatus:
    """Version with its slots and its use by servers."""

    name: str
    """`models/{model}/versions/{number}`."""
    model: str
    number: int
    state: VersionState
    reason: str
    """Reason of its end, if it is ABORTED or RETIRED."""
    epoch: int
    step: int
    job: str
    size_bytes: int
    tensor_count: int
    create_time: datetime | None
    ready_time: datetime | None
    slots: tuple[SlotStatus, ...]
    folder: str
    """Folder of its safetensors files on the daemon's host."""
    fingerprint: str
    """BLAKE3 of the manifest, hexadecimal."""
    used_by: tuple[str, ...]
    """Uses that protect it from deletion."""
    servers_serving: int
    servers_following: int
    trace: str
    """W3C traceparent of its first span; empty without traces."""
    set_aside: bool
    """Whether the target `latest` skips it while the model has another READY version."""
    homes: tuple[VersionHomeStatus, ...] = ()  # nodes into whose files ranks write, while it is UPLOADING
    warnings: tuple[str, ...] = ()
    """Texts of refusals that RESHARDER_ALLOW allowed on its ranks."""


@dataclass(frozen=True)
class StoreNonce:
    """File in the daemon's store. A process that reads this content in it shares the daemon's memory."""

    nonce_file: str
    nonce: bytes


@dataclass(frozen=True)
class PublisherStatus:
    """Claim of one training job to a model."""

    name: str
    """`models/{model}/publishers/{epoch}`."""
    model: str
    job: str
    epoch: int
    world_size: int
    state: PublisherState
    reason: str
    registered_slots: int
    store: StoreNonce | None
    lease_seconds: float
    live_ranks: int
    """Ranks that have called the daemon within their lease."""
    newest_version: int
    """Number of the model's newest version, in any state."""
    data_address: str
    """`host:port` of the daemon's data port, by which ranks of other hosts send; without host: the endpoint's. Empty for none."""
    nonce_files: tuple[str, ...] = ()  # of nodes; only in the answer to a rank
    settled_nonces: tuple[str, ...] = ()


@dataclass(frozen=True)
class DaemonStatus:
    """State of the daemon: its release, its store, its models and their publishers."""

    release: str
    time: datetime | None
    start_time: datetime | None
    store: StoreNonce | None
    store_folder: str
    store_limit_bytes: int
    """Upper bound on the bytes of all versions."""
    store_used_bytes: int
    models: tuple[str, ...]
    publishers: tuple[PublisherStatus, ...]


@dataclass(frozen=True)
class MoveStatus:
    """Update of a fleet from one version to another."""

    id: int
    """Number of the move, increasing within a fleet."""
    state: MovePhase
    from_version: int
    to_version: int
    reason: str
    strategy: UpdateStrategy
    servers: tuple[str, ...]
    """Ids of the servers that may move so far, canaries first."""
    failed: Mapping[str, str]
    """Errors by server id."""
    start_time: datetime | None
    end_time: datetime | None


@dataclass(frozen=True)
class RefusedVersion:
    """Version that a fleet with target LATEST does not take."""

    version: int
    reason: str


@dataclass(frozen=True)
class FleetStatus:
    """Servers that follow one model, with their policy and their current move."""

    name: str
    model: str
    pause_mode: RequestHandling
    wanted_version: int
    """Version that `target` selects at present."""
    servers: tuple[str, ...]
    target: VersionTarget
    strategy: UpdateStrategy
    max_skew: int
    """Bound on the difference between versions served at the same time; 0 is no bound."""
    settled_version: int
    """Version of the last move that ended."""
    move: MoveStatus | None
    """The current move, or the last one."""
    refused: tuple[RefusedVersion, ...]
    power: ServerPower
    reason: str
    """Reason for the fleet's present state."""
    serve_ahead: bool
    """Whether servers take UPLOADING versions over the direct path."""
    serve_ahead_setting: ServeAhead
    """The setting that decides `serve_ahead`; UNSPECIFIED from a daemon without it."""
    serve_ahead_reason: str
    """The rule that decided `serve_ahead`."""
    returning: tuple[str, ...]
    """Servers of before the daemon's restart that it still awaits; waits for all servers include them."""


@dataclass(frozen=True)
class PhaseTiming:
    """Duration of one phase of an install, by the clock of the process that ran it."""

    phase: str
    start_time: datetime | None
    seconds: float


@dataclass(frozen=True)
class UncomparedTensors:
    """Tensors of a version that a verification did not compare, for one reason."""

    reason: str
    tensors: int
    bytes: int
    names: tuple[str, ...]
    """Names of the first few."""


@dataclass(frozen=True)
class WorkerVerification:
    """Comparison of a worker's memory with its version."""

    rank: int
    request: str
    """Id of the last request to verify; empty if there was none."""
    time: datetime | None
    seconds: float
    version: int
    tensors: int
    covered_bytes: int
    """Bytes of `total_bytes` that were read from memory."""
    total_bytes: int
    """Bytes of the version that the worker needs."""
    different_tensors: int
    different: tuple[str, ...]
    """Names of the first few tensors that differ."""
    skipped: str
    """Reason for comparing nothing; empty if tensors were compared."""
    digested_bytes: int
    """Bytes of `covered_bytes` that were compared with the store's digests. The rest was compared with what the install left."""
    uncompared: tuple[UncomparedTensors, ...]
    """The rest of `total_bytes`, by reason."""


@dataclass(frozen=True)
class WorkerStatus:
    """Process of a server that holds a part of the model."""

    rank: int
    """Rank over the whole server, data-parallel replicas included."""
    state: WorkerReport
    version: int
    install: str
    error: str
    needed_bytes: int
    """Bytes of HF tensors that the worker needs."""
    transport: str
    """`shared-memory`, `node`, `http` or `grpc`."""
    transport_reason: str
    """Reason for gRPC in place of HTTP, or for either in place of a node; empty if there is none."""
    stage_seconds: float
    apply_seconds: float
    verified_tensors: int
    """Boxes whose digests were compared and are equal."""
    process: str
    """Nonce of the process."""
    boxed_bytes: int
    """Bytes of `needed_bytes` that go straight into parameters."""
    fingerprint: str
    timings: tuple[PhaseTiming, ...]
    direct: bool
    """Whether all that it needs can come over the direct path."""
    joined: bool
    """Whether it takes part in a transfer over the direct path for `install`."""
    verification: WorkerVerification | None
    """Last verification of this process."""
    altered: bool
    """Whether a verification found a difference since the last install, for FAILED."""
    memory: str
    """Fingerprint of the declared layout of its memory; empty without the direct path."""
    released_bytes: int | None
    """Device memory that the current sleep released, as measured."""
    path: str
    """Links of the direct path that `install` came over: `peer-memory`, `nccl` or `gloo`, joined by `+`; empty for the store."""
    warnings: tuple[str, ...]
    """Refusals that `RESHARDER_ALLOW` in its environment has turned into warnings."""


@dataclass(frozen=True)
class InstallStatus:
    """Install of one version on one server: stage, then apply."""

    id: str
    version: int
    state: InstallPhase
    error: str
    start_time: datetime | None
    end_time: datetime | None
    stage_seconds: float
    apply_seconds: float
    pause_seconds: float
    """Time from the pause of the engine to its resumption."""


@dataclass(frozen=True)
class ServerStatus:
    """vLLM deployment with its workers, its current install and its lease."""

    name: str
    """`servers/{id}`."""
    fleet: str
    model: str
    state: ServerState
    reason: str
    version: int
    """Version that every worker has confirmed."""
    wanted_version: int
    workers: tuple[WorkerStatus, ...]
    install: InstallStatus | None
    """The current install, or the last one."""
    lease_expire_time: datetime | None
    address: str
    world_size: int
    control_sides: int
    """Attached API server processes, of which one leads."""
    power: ServerPower
    wanted_power: ServerPower
    drained: bool
    in_flight: int
    """Requests in progress, as last reported."""
    passes_kv: bool
    """Whether it exchanges its KV cache with other servers."""
    ahead: bool
    """Whether it serves a version that is not READY, or not yet compared with the store's copy."""
    verify_request: str
    """Always empty in answers to operators."""


@dataclass(frozen=True)
class DaemonEvent:
    """Entry of the daemon's journal. `subject` is a resource name, `what` one word for the event."""

    id: int
    """Number that increases with each event, also over restarts of the daemon."""
    time: datetime | None
    kind: str
    subject: str
    what: str
    reason: str
    details: Mapping[str, str]


@dataclass(frozen=True)
class ArchivedVersion:
    """Copy of a version in the archive."""

    name: str = field(metadata={"wire": "version"})
    """`models/{model}/versions/{number}`."""
    url: str
    size_bytes: int
    fingerprint: str
    archive_time: datetime | None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.name.split("/")[1]

    @property
    def number(self) -> int:
        """Number of the version."""
        return int(self.name.rpartition("/")[2])


@dataclass(frozen=True)
class CollectedVersions:
    """Result of `Operator.gc`."""

    retired: tuple[VersionStatus, ...]
    kept: tuple[VersionStatus, ...]
    """Versions that were requested and are in use."""
    freed_bytes: int


@dataclass(frozen=True)
class WorkerProfile:
    """Profile of one install by one worker."""

    rank: int
    install: str
    trace: bytes
    """Chrome trace of torch.profiler, compressed by gzip."""
    table: str
    """Operators by their own time, as text."""
    error: str
    """Reason for an absent profile."""


@dataclass(frozen=True)
class ExportedVersion:
    """Result of `Operator.export`: number of files and their bytes in `folder`."""

    version: VersionStatus
    folder: Path
    files: int
    bytes: int


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
