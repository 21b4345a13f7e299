"""Answers of the daemon to an operator: frozen dataclasses of plain Python types.

Times are datetimes in UTC, to the microsecond; durations are seconds; sizes are bytes. A version is an int, the number of a
version of a model, with 0 for none. `wire` is a field's name in `resharder.v1` and in `--json` if it differs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from resharder.client.operator.states import (
    InstallPhase,
    MovePhase,
    PublisherState,
    RequestHandling,
    ServerPower,
    ServerState,
    SlotState,
    StrategyKind,
    TargetKind,
    VersionState,
    WorkerReport,
)


@dataclass(frozen=True)
class VersionTarget:
    """Version that a fleet should serve."""

    kind: TargetKind
    version: int = 0
    """With NUMBER."""
    every_seconds: float = 0.0
    """With LATEST: at most one move in this time."""


@dataclass(frozen=True)
class UpdateStrategy:
    """Way in which a fleet gets from one version to another."""

    kind: StrategyKind
    at_a_time: int = 0
    """0: all."""
    max_failures: int = 0
    """0: 1."""
    canaries: int = 0
    """0: 1."""
    hold_seconds: float = 0.0
    """Time for which canaries serve before the rest follows."""
    approval: bool = False
    """The rest follows after `Operator.approve` only."""
    check: str = ""
    """The rest follows after this command of the daemon's configuration has ended with 0."""


@dataclass(frozen=True)
class SlotStatus:
    """Part of a version that one rank delivers."""

    rank: int
    state: SlotState
    size_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class VersionStatus:
    name: str
    """`models/{model}/versions/{number}`."""
    model: str
    number: int
    state: VersionState
    reason: str
    """Cause of its end, if it is ABORTED or RETIRED."""
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
    servers_serving: int
    servers_following: int
    trace: str
    """W3C traceparent of its first span; empty without traces."""


@dataclass(frozen=True)
class StoreNonce:
    """File in the daemon's store by whose content a process recognises that it shares the daemon's memory."""

    nonce_file: str
    nonce: bytes


@dataclass(frozen=True)
class PublisherStatus:
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
    newest_version: int


@dataclass(frozen=True)
class DaemonStatus:
    release: str
    time: datetime | None
    start_time: datetime | None
    store: StoreNonce | None
    store_folder: str
    store_limit_bytes: int
    store_used_bytes: int
    models: tuple[str, ...]
    publishers: tuple[PublisherStatus, ...]


@dataclass(frozen=True)
class MoveStatus:
    """A fleet's way from one version to another."""

    id: int
    """Number of the move, increasing within a fleet."""
    state: MovePhase
    from_version: int
    to_version: int
    reason: str
    strategy: UpdateStrategy
    servers: tuple[str, ...]
    """Ids of the servers that were allowed to move so far, canaries first."""
    failed: Mapping[str, str]
    """Errors by server id."""
    start_time: datetime | None
    end_time: datetime | None


@dataclass(frozen=True)
class RefusedVersion:
    """A version that a fleet does not take by itself."""

    version: int
    reason: str


@dataclass(frozen=True)
class FleetStatus:
    name: str
    model: str
    pause_mode: RequestHandling
    wanted_version: int
    """Version that `target` selects now."""
    servers: tuple[str, ...]
    target: VersionTarget
    strategy: UpdateStrategy
    max_skew: int
    """Bound on the difference between versions served at once; 0: none."""
    settled_version: int
    """Version of the last move that ended."""
    move: MoveStatus | None
    """The current move, or the last one."""
    refused: tuple[RefusedVersion, ...]
    power: ServerPower
    reason: str
    serve_ahead: bool


@dataclass(frozen=True)
class PhaseTiming:
    """Duration of one phase of an install, by the clock of the process that did it."""

    phase: str
    start_time: datetime | None
    seconds: float


@dataclass(frozen=True)
class WorkerVerification:
    """Comparison of a worker's memory with the version that it holds."""

    rank: int
    request: str
    """The request that it answers; empty if it was due by itself."""
    time: datetime | None
    seconds: float
    version: int
    tensors: int
    covered_bytes: int
    """Bytes, of `total_bytes`, whose place in memory was read."""
    total_bytes: int
    different_tensors: int
    different: tuple[str, ...]
    """Names of the first few tensors that differ."""
    skipped: str
    """Reason if nothing was compared."""


@dataclass(frozen=True)
class WorkerStatus:
    rank: int
    """Over the whole server, data parallel replicas included."""
    state: WorkerReport
    version: int
    install: str
    error: str
    needed_bytes: int
    transport: str
    """`shared-memory` or `grpc`."""
    stage_seconds: float
    apply_seconds: float
    verified_tensors: int
    process: str
    boxed_bytes: int
    fingerprint: str
    timings: tuple[PhaseTiming, ...]
    direct: bool
    joined: bool
    verification: WorkerVerification | None
    """The last one of this process."""
    altered: bool
    """With FAILED: a verification found a difference, and no install was tried since."""
    memory: str


@dataclass(frozen=True)
class InstallStatus:
    id: str
    version: int
    state: InstallPhase
    error: str
    start_time: datetime | None
    end_time: datetime | None
    stage_seconds: float
    apply_seconds: float
    pause_seconds: float


@dataclass(frozen=True)
class ServerStatus:
    name: str
    """`servers/{id}`."""
    fleet: str
    model: str
    state: ServerState
    reason: str
    version: int
    """Version confirmed by every worker."""
    wanted_version: int
    workers: tuple[WorkerStatus, ...]
    install: InstallStatus | None
    """The current install, or the last one."""
    lease_expire_time: datetime | None
    address: str
    world_size: int
    control_sides: int
    power: ServerPower
    wanted_power: ServerPower
    drained: bool
    in_flight: int
    passes_kv: bool
    ahead: bool
    """Serves a version that is not READY, or not yet compared with the store's copy."""
    verify_request: str
    """Empty in answers to operators."""


@dataclass(frozen=True)
class DaemonEvent:
    id: int
    """Increasing, over restarts too."""
    time: datetime | None
    kind: str
    subject: str
    what: str
    reason: str
    details: Mapping[str, str]


@dataclass(frozen=True)
class ArchivedVersion:
    name: str = field(metadata={"wire": "version"})
    """`models/{model}/versions/{number}`."""
    url: str
    size_bytes: int
    fingerprint: str
    archive_time: datetime | None

    @property
    def model(self) -> str:
        return self.name.split("/")[1]

    @property
    def number(self) -> int:
        return int(self.name.rpartition("/")[2])


@dataclass(frozen=True)
class CollectedVersions:
    """Result of `Operator.gc`."""

    retired: tuple[VersionStatus, ...]
    kept: tuple[VersionStatus, ...]
    """Versions that were named and are in use."""
    freed_bytes: int


@dataclass(frozen=True)
class WorkerProfile:
    """Time that one worker spent on one install."""

    rank: int
    install: str
    trace: bytes
    """A Chrome trace, gzip."""
    table: str
    error: str


@dataclass(frozen=True)
class ExportedVersion:
    version: VersionStatus
    folder: Path
    files: int
    bytes: int
