"""Answers of the daemon to an operator: dataclasses and enumerations of plain types, named as in `resharder.v1`.

Times are datetimes in UTC, to the microsecond; durations are in seconds, sizes in bytes. A version is an int, its number within
its model; 0 is none. The values of enumerations are their names in `--json`. Written by tools/answers.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from resharder.client.deprecated import warn_renamed


class Power(StrEnum):
    """Power state of a server: the contents of its GPU memory."""

    UNSPECIFIED = "POWER_UNSPECIFIED"
    AWAKE = "AWAKE"
    WEIGHTS_AWAKE = "WEIGHTS_AWAKE"
    """Weights without a KV cache."""
    ASLEEP_1 = "ASLEEP_1"
    """vLLM's level 1: weights are in host memory."""
    ASLEEP_2 = "ASLEEP_2"
    """vLLM's level 2: weights are dropped, and come from the daemon at the next wake."""


class PauseMode(StrEnum):
    """Treatment of requests in progress while a version is installed. For an adapter, whose fleets begin with WAIT, they are its
    own.
    """

    UNSPECIFIED = "PAUSE_MODE_UNSPECIFIED"
    KEEP = "KEEP"
    """Requests are paused and continue with the new weights."""
    WAIT = "WAIT"
    """Requests finish with the old weights first; an adapter's are not waited for."""
    ABORT = "ABORT"
    """Requests end with the tokens they have."""


class ServeAhead(StrEnum):
    """Setting of a fleet for versions that are not READY."""

    UNSPECIFIED = "SERVE_AHEAD_UNSPECIFIED"
    AUTO = "SERVE_AHEAD_AUTO"
    """The default: on for ALL_AT_ONCE without a skew bound, else off."""
    ON = "SERVE_AHEAD_ON"
    OFF = "SERVE_AHEAD_OFF"


class BaseBinding(StrEnum):
    """Treatment of an adapter on a server whose base is at another version than the one that the adapter was trained on."""

    UNSPECIFIED = "BASE_BINDING_UNSPECIFIED"
    HOLD = "HOLD"
    """The default: it is not installed, or leaves service, until the base is at that version."""
    WARN = "WARN"
    """It is served, and the server says so."""


@dataclass(frozen=True)
class StoreAccess:
    """A file in the daemon's store. A client that finds `nonce` in `nonce_file` is on the daemon's host."""

    nonce_file: str = ""
    nonce: bytes = b""


@dataclass(frozen=True)
class PublisherStatus:
    """The claim of one training job to a model."""

    class State(StrEnum):
        """State of a job's claim to a model."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        REGISTERING = "REGISTERING"
        """Not all ranks have registered their slot."""
        ACTIVE = "ACTIVE"
        """Slots tile the model, and capacity is reserved."""
        REJECTED = "REJECTED"
        """Slots do not tile the model, or the store lacks capacity, see `reason`."""
        FENCED = "FENCED"
        """A later job has claimed the model."""
        GONE = "GONE"
        """ACTIVE before, but no rank has called within its lease: closed, ended or out of reach."""

    name: str = ""
    """`models/{model}/publishers/{epoch}`."""
    model: str = ""
    job: str = ""
    epoch: int = 0
    world_size: int = 0
    state: State = State.UNSPECIFIED
    reason: str = ""
    registered_slots: int = 0
    store: StoreAccess | None = None
    lease_seconds: float = 0.0
    live_ranks: int = 0
    """Ranks that have called within their lease."""
    newest_version: int = 0
    """Number of the model's newest version in any state; 0 for none."""
    data_address: str = ""
    """`host:port` of the data port, to which ranks on other hosts send chunks by HTTP; without host: the endpoint's. Empty for
    none.
    """
    nonce_files: tuple[str, ...] = ()
    """Paths of the nonce files of nodes, which a rank tries to read and reports by RegisterSlot; of CreatePublisher only."""
    settled_nonces: tuple[str, ...] = ()
    """SHA-256, as hexadecimal digits, of the nonces of nodes that have reported to this daemon, and of nodes that are known to be
    gone: after a restart of the daemon, no rank waits for a node whose nonce is among them; of CreatePublisher only.
    """
    base: str = ""
    """See CreatePublisherRequest.base."""


@dataclass(frozen=True)
class Daemon:
    """State of the daemon: its release, its store, its models and their publishers."""

    release: str = ""
    time: datetime | None = None
    start_time: datetime | None = None
    store: StoreAccess | None = None
    store_folder: str = ""
    store_limit_bytes: int = 0
    """Upper bound on the bytes of all versions."""
    store_used_bytes: int = 0
    models: tuple[str, ...] = ()
    publishers: tuple[PublisherStatus, ...] = ()


@dataclass(frozen=True)
class Slot:
    """The part of a version that one rank delivers."""

    class State(StrEnum):
        """State of one rank's part of a version."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        OPEN = "OPEN"
        SEALED = "SEALED"
        """The rank has delivered it."""

    rank: int = 0
    state: State = State.UNSPECIFIED
    size_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True)
class VersionHome:
    """Files of an UPLOADING version on a node."""

    node: str = ""
    """`nodes/{id}`."""
    folder: str = ""
    """Folder of the files on the node's host."""
    gathers: bool = False
    """Whether ranks write Assignment.gathered_boxes there too, which nodes fetch from each other."""
    shares: bool = False
    """Whether ranks may leave their boxes of frozen tensors there as they are in Version.frozen_from."""


@dataclass(frozen=True)
class Version:
    """An immutable, complete, numbered set of a model's tensors."""

    class State(StrEnum):
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

    name: str = ""
    """`models/{model}/versions/{number}`."""
    model: str = ""
    number: int = 0
    state: State = State.UNSPECIFIED
    reason: str = ""
    """Reason of its end, if it is ABORTED or RETIRED."""
    epoch: int = 0
    step: int = 0
    job: str = ""
    size_bytes: int = 0
    tensor_count: int = 0
    create_time: datetime | None = None
    ready_time: datetime | None = None
    slots: tuple[Slot, ...] = ()
    folder: str = ""
    """Folder of its safetensors files on the daemon's host; empty if it has none there."""
    fingerprint: str = ""
    """BLAKE3 of the manifest, hexadecimal."""
    used_by: tuple[str, ...] = ()
    """Uses that protect it from deletion."""
    servers_serving: int = 0
    servers_following: int = 0
    trace: str = ""
    """W3C traceparent of its first span; empty if the daemon creates no traces."""
    skipped: bool = False
    """Whether LATEST skips it while the model has another READY version; NUMBER does not."""
    homes: tuple[VersionHome, ...] = ()
    """While it is UPLOADING: nodes into whose files ranks of their hosts write."""
    warnings: tuple[str, ...] = ()
    """Texts of refusals that RESHARDER_ALLOW allowed on its ranks."""
    base: str = ""
    """Id of the model that this one, an adapter, is loaded beside; empty for a model of its own."""
    base_version: int = 0
    """Version of `base` that the adapter was trained on; 0 if the trainer has not said it."""
    frozen_from: int = 0
    """While it is UPLOADING: number of the version whose files of frozen tensors it shares; 0 for none: ranks send all boxes."""
    sent_bytes: int = 0
    """Bytes that its ranks have sent, once it is READY. Less than `size_bytes` by those that it shares with the version before; 0
    from a daemon that does not say it.
    """

    @property
    def set_aside(self) -> bool:
        """Earlier name of `skipped`, for one release."""
        warn_renamed("Version.set_aside", "Version.skipped")
        return self.skipped


@dataclass(frozen=True)
class Timing:
    """Duration of one phase of an operation, by the clock of the process that ran it."""

    phase: str = ""
    start_time: datetime | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Uncompared:
    """Tensors of a version that a verification has not compared."""

    reason: str = ""
    tensors: int = 0
    bytes: int = 0
    names: tuple[str, ...] = ()
    """Names of the first few."""


@dataclass(frozen=True)
class Verification:
    """A comparison of a worker's memory with its version."""

    rank: int = 0
    request: str = ""
    """Id of the last request to verify; empty if there was none."""
    time: datetime | None = None
    seconds: float = 0.0
    version: int = 0
    tensors: int = 0
    """Tensors that were compared."""
    covered_bytes: int = 0
    """Bytes of `total_bytes` that were read from memory."""
    total_bytes: int = 0
    """Bytes of HF tensors that the worker needs."""
    different_tensors: int = 0
    different: tuple[str, ...] = ()
    """Names of the first few that differ."""
    skipped: str = ""
    """Reason for comparing nothing."""
    digested_bytes: int = 0
    """Bytes of `covered_bytes` compared with the store's digests; the rest, with what the install left."""
    uncompared: tuple[Uncompared, ...] = ()
    """The rest of `total_bytes`, by reason."""


@dataclass(frozen=True)
class Worker:
    """One process of a server that holds a part of the model."""

    class State(StrEnum):
        """State of a worker, as last reported by it."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        BOOTED = "BOOTED"
        """Booted `version`, and verified it."""
        STAGED = "STAGED"
        """Staged `install`, which is not applied."""
        APPLIED = "APPLIED"
        """Applied `install`, and verified `version`."""
        FAILED = "FAILED"
        """See `error`."""
        EMPTY = "EMPTY"
        """Without a version: its weights came from elsewhere, or were dropped."""

    rank: int = 0
    """Rank over the whole server, data-parallel replicas included."""
    state: State = State.UNSPECIFIED
    version: int = 0
    install: str = ""
    error: str = ""
    needed_bytes: int = 0
    """Bytes of HF tensors that it needs, by its recorded layout."""
    transport: str = ""
    """`shared-memory`, `node`, `http` or `grpc`."""
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0
    verified_tensors: int = 0
    """Boxes whose digests were compared and are equal."""
    process: str = ""
    """Nonce of the process."""
    boxed_bytes: int = 0
    """Bytes of `needed_bytes` that go straight into parameters."""
    fingerprint: str = ""
    """Fingerprint of its version: numbers start again with a new store."""
    timings: tuple[Timing, ...] = ()
    """Phases of `install`, or of the boot."""
    direct: bool = False
    """Whether all that it needs can come over the direct path."""
    joined: bool = False
    """Whether it takes part in a transfer over the direct path for `install`."""
    verification: Verification | None = None
    """The last one of this process."""
    altered: bool = False
    """Whether `verification` found a difference, and no install was tried since; for FAILED."""
    released_bytes: int | None = None
    """Bytes of memory that the current sleep released on its device, as measured. Absent if awake, or not measured."""
    memory: str = ""
    """Fingerprint of the declared layout of its memory; empty without the direct path."""
    path: str = ""
    """Links of the direct path that `install` came over, joined by `+`: `peer-memory`, `nixl`, `nccl`, `gloo`; empty for the
    store.
    """
    transport_reason: str = ""
    """Reason for gRPC in place of HTTP, or for either in place of a node; empty if there is none."""
    warnings: tuple[str, ...] = ()
    """Refusals that RESHARDER_ALLOW of its environment has turned into warnings."""
    host: str = ""
    """Identity of its kernel and network namespace: processes with the same one reach each other's sockets."""


@dataclass(frozen=True)
class Install:
    """The transition of one server to a version: stage, then apply."""

    class State(StrEnum):
        """State of an install on one server."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        STAGING = "STAGING"
        APPLYING = "APPLYING"
        COMMITTED = "COMMITTED"
        FAILED = "FAILED"

    id: str = ""
    version: int = 0
    state: State = State.UNSPECIFIED
    error: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0
    pause_seconds: float = 0.0
    """From the request to pause to the end of resuming, as measured by the control side."""


@dataclass(frozen=True)
class Server:
    """One vLLM deployment with its workers."""

    class State(StrEnum):
        """State of a server."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        BOOTING = "BOOTING"
        SERVING = "SERVING"
        STAGING = "STAGING"
        """Serves the old version while it stages the new one."""
        APPLYING = "APPLYING"
        """Paused for an install."""
        FAILED = "FAILED"
        """Out of service, its gate answers 503, see `reason`."""
        LOST = "LOST"
        """Its lease ended."""
        ASLEEP = "ASLEEP"
        """See `power`."""
        DRAINED = "DRAINED"
        """Closed by an operator; `in_flight` requests are still in progress."""
        WAITING = "WAITING"
        """Staged or applied; continues when other servers of the fleet are as far."""

    name: str = ""
    """`servers/{id}`."""
    fleet: str = ""
    model: str = ""
    state: State = State.UNSPECIFIED
    reason: str = ""
    version: int = 0
    """Version that every worker has confirmed; 0 for none."""
    wanted_version: int = 0
    workers: tuple[Worker, ...] = ()
    install: Install | None = None
    """The current install, or the last one."""
    lease_expire_time: datetime | None = None
    address: str = ""
    world_size: int = 0
    control_sides: int = 0
    """Attached API servers, of which one leads."""
    power: Power = Power.UNSPECIFIED
    wanted_power: Power = Power.UNSPECIFIED
    drained: bool = False
    """Whether an operator has drained it."""
    in_flight: int = 0
    """Requests in progress, over all control sides, as last reported."""
    passes_kv: bool = False
    """Whether it exchanges its KV cache with other servers."""
    ahead: bool = False
    """Whether its version is not READY, or not yet compared with the store's copy."""
    verify_request: str = ""
    """Id of the last request to verify, for `Verification.request`; in answers to workers alone."""
    base_server: str = ""
    """`servers/{id}` of the server that the adapter is loaded into; empty for a server of a model of its own."""


@dataclass(frozen=True)
class VersionTarget:
    """The version that a fleet follows."""

    class Kind(StrEnum):
        """Kind of a version target."""

        UNSPECIFIED = "KIND_UNSPECIFIED"
        LATEST = "LATEST"
        """The newest READY version that is neither refused nor skipped."""
        NUMBER = "NUMBER"
        """`version`, regardless of newer ones."""
        NONE = "NONE"
        """The version served now, if any; the fleet takes no other."""

    kind: Kind = Kind.UNSPECIFIED
    version: int = 0
    """The version, for NUMBER."""
    every_seconds: float = 0.0
    """For LATEST, the least time between two moves; 0 is no bound."""


@dataclass(frozen=True)
class UpdateStrategy:
    """The way in which an update reaches a fleet's servers."""

    class Kind(StrEnum):
        """Kind of an update strategy."""

        UNSPECIFIED = "KIND_UNSPECIFIED"
        ALL_AT_ONCE = "ALL_AT_ONCE"
        """Each server independently."""
        ROLLING = "ROLLING"
        """At most `at_a_time` servers; stops after `max_failures` of them failed."""
        CANARY = "CANARY"
        """`canaries` first; then the others as with ROLLING, or all back."""
        ATOMIC = "ATOMIC"
        """All stage, then all apply, then all serve; or none does."""

    kind: Kind = Kind.UNSPECIFIED
    at_a_time: int = 0
    """Servers that install at the same time; 0 is all."""
    max_failures: int = 0
    """Failed servers after which a move stops; 0 is 1."""
    canaries: int = 0
    """Servers that move first; 0 is 1."""
    hold_seconds: float = 0.0
    """Time for which canaries serve before the others follow."""
    approval: bool = False
    """Whether the others also wait for an operator's decision."""
    check: str = ""
    """Command of the daemon's configuration that must exit with 0 before the others follow."""


@dataclass(frozen=True)
class Move:
    """The update of a fleet from one version to another."""

    class State(StrEnum):
        """State of a fleet's move from one version to another."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        STAGING = "STAGING"
        """ATOMIC: servers stage while they serve."""
        APPLYING = "APPLYING"
        """ATOMIC: all servers are closed until all have applied."""
        TRYING = "TRYING"
        """CANARY: the canaries install."""
        HOLDING = "HOLDING"
        """CANARY: the canaries serve, until the hold time, an operator's decision or a check ends it."""
        MOVING = "MOVING"
        """Servers install."""
        BACK = "BACK"
        """Servers return to `from_version`."""
        STOPPED = "STOPPED"
        """Too many servers failed, and no further one moves until an operator decides or the target changes; or at its end,
        servers are missing: DONE once they are back or forgotten, or an operator decides.
        """
        DONE = "DONE"
        FAILED = "FAILED"
        """All servers have returned; `to_version` is refused."""

    id: int = 0
    """Number of the move, which increases within a fleet."""
    state: State = State.UNSPECIFIED
    from_version: int = 0
    to_version: int = 0
    reason: str = ""
    strategy: UpdateStrategy = UpdateStrategy()
    """Strategy in effect; a step wider than the skew bound is ATOMIC."""
    servers: tuple[str, ...] = ()
    """Ids of the servers that may move so far, canaries first."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Errors by server id."""
    start_time: datetime | None = None
    end_time: datetime | None = None


@dataclass(frozen=True)
class Refusal:
    """A version that LATEST does not select."""

    version: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Fleet:
    """The servers that follow one model under one policy. Settings survive restarts of the daemon."""

    name: str = ""
    model: str = ""
    pause_mode: PauseMode = PauseMode.UNSPECIFIED
    wanted_version: int = 0
    """Version that `target` selects at present; 0 for none."""
    servers: tuple[str, ...] = ()
    target: VersionTarget = VersionTarget()
    strategy: UpdateStrategy = UpdateStrategy()
    max_skew: int = 0
    """Bound on the difference between versions served at the same time; 0 is no bound."""
    settled_version: int = 0
    """Version of the last move that ended."""
    move: Move | None = None
    """The current move, or the last one."""
    refused: tuple[Refusal, ...] = ()
    power: Power = Power.UNSPECIFIED
    reason: str = ""
    """Reason for its present state."""
    serve_ahead: bool = False
    """Whether it takes UPLOADING versions over the direct path; in an update: ON or OFF."""
    returning: tuple[str, ...] = ()
    """Servers of before the daemon's restart that it still awaits; waits for all servers include them."""
    serve_ahead_setting: ServeAhead = ServeAhead.UNSPECIFIED
    """The setting that decides `serve_ahead`; UNSPECIFIED from a daemon without it."""
    serve_ahead_reason: str = ""
    """The rule that decided `serve_ahead`."""
    base_binding: BaseBinding = BaseBinding.UNSPECIFIED
    """For fleets of an adapter."""
    base: str = ""
    """Id of the model that the fleet's one, an adapter, is loaded beside; empty for a model of its own."""


@dataclass(frozen=True)
class NodeCopy:
    """A version that a node holds or should hold, in part or in whole."""

    version: str = ""
    """`models/{model}/versions/{number}`."""
    held_pieces: int = 0
    pieces: int = 0
    wanted: bool = False
    """Whether the daemon wants it there."""
    problem: str = ""
    """Reason for which it does not arrive; empty for none."""
    servers: tuple[str, ...] = ()
    """Ids of servers that asked for it."""
    wanted_pieces: int = 0
    """Pieces that workers on the node's host need, or that ranks there write."""
    uploading: bool = False
    """Whether ranks on the node's host write `wanted_pieces` of it."""


@dataclass(frozen=True)
class NodeLink:
    """A node's transfers from the daemon or from another node, since the node's process began."""

    peer: str = ""
    """`nodes/{id}`, or `daemon`."""
    received_bytes: int = 0
    """Bytes of verified pieces."""
    seconds: float = 0.0
    """Sum over its requests, several of which run at a time: `received_bytes / seconds` is the rate of one."""
    failures: int = 0
    """Requests that failed."""
    problem: str = ""
    """Reason for which the last request failed; empty if it succeeded."""
    delta_bytes: int = 0
    """Bytes of deltas of a version that both hold, which came in place of `delta_part_bytes` of pieces."""
    delta_part_bytes: int = 0
    """Bytes of `received_bytes` that came as deltas."""
    whole_rate: float = 0.0
    """Bytes a second of parts that came whole, a moving average; 0 before the first."""
    delta_rate: float = 0.0
    """Bytes a second of parts that were asked for as deltas, with the time to encode and decode them."""
    delta_failures: int = 0
    """Deltas that did not decode to their parts, which came whole then."""
    delta_problem: str = ""
    """Reason for the last one of them."""


@dataclass(frozen=True)
class Node:
    """A process that holds versions in the shared memory of its host."""

    class State(StrEnum):
        """State of a node."""

        UNSPECIFIED = "STATE_UNSPECIFIED"
        LIVE = "LIVE"
        DRAINED = "DRAINED"
        """Takes no further version, and drops those that no process has mapped."""
        LOST = "LOST"
        """No call within its lease."""

    name: str = ""
    """`nodes/{id}`."""
    state: State = State.UNSPECIFIED
    data_address: str = ""
    """`host:port` at which other nodes fetch pieces."""
    capacity_bytes: int = 0
    used_bytes: int = 0
    transfers: int = 0
    """Pieces that it sends to other nodes now."""
    received_daemon_bytes: int = 0
    """Bytes that it received from the daemon since its process began."""
    received_peer_bytes: int = 0
    """Bytes that it received from other nodes."""
    sent_bytes: int = 0
    report_time: datetime | None = None
    copies: tuple[NodeCopy, ...] = ()
    links: tuple[NodeLink, ...] = ()
    """To the last peers from which it requested pieces."""
    received_engine_bytes: int = 0
    """Bytes of `received_peer_bytes` that came by a transfer engine."""

    @property
    def received_origin_bytes(self) -> int:
        """Earlier name of `received_daemon_bytes`, for one release."""
        warn_renamed("Node.received_origin_bytes", "Node.received_daemon_bytes")
        return self.received_daemon_bytes


@dataclass(frozen=True)
class ReplicaShortage:
    """Version of which too few hosts hold pieces. Only with `replicas` above 1."""

    version: str = ""
    """`models/{model}/versions/{number}`."""
    short_pieces: int = 0
    """Pieces with fewer holders than `replicas`."""
    pieces: int = 0
    replicas: int = 0
    waits: bool = False
    """Whether it is withheld from READY until it has its replicas."""
    problem: str = ""


@dataclass(frozen=True)
class RetireVersionsResponse:
    """Versions that a call has deleted, and those that it has kept."""

    retired: tuple[Version, ...] = ()
    """Deleted versions; with `dry_run`, those that would be deleted."""
    kept: tuple[Version, ...] = ()
    """Versions that were requested and are in use, see `used_by`."""
    freed_bytes: int = 0


@dataclass(frozen=True)
class Profile:
    """Profile of one install by one worker."""

    rank: int = 0
    install: str = ""
    trace: bytes = b""
    """Chrome trace of torch.profiler, compressed by gzip."""
    table: str = ""
    """Operators by their own time, as text."""
    error: str = ""
    """Reason for an absent profile."""


@dataclass(frozen=True)
class Event:
    """An entry of the daemon's journal."""

    id: int = 0
    """Number that increases with each event, also over restarts of the daemon."""
    time: datetime | None = None
    kind: str = ""
    """Kind of the subject: daemon, publisher, version, server, fleet, move, operator, archive or node."""
    subject: str = ""
    """A resource name."""
    what: str = ""
    """Event in one word: ready, aborted, serving, lost, ..."""
    reason: str = ""
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ArchivedVersion:
    """Copy of a version in the archive."""

    version: str = ""
    """`models/{model}/versions/{number}`."""
    url: str = ""
    size_bytes: int = 0
    fingerprint: str = ""
    archive_time: datetime | None = None

    @property
    def name(self) -> str:
        """Name of the version, `models/{model}/versions/{number}`."""
        return self.version

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.version.split("/")[1]

    @property
    def number(self) -> int:
        """Number of the version."""
        return int(self.version.rpartition("/")[2])


@dataclass(frozen=True)
class ExportedVersion:
    """Result of `Operator.export`: number of files and their bytes in `folder`."""

    version: Version
    folder: Path
    files: int
    bytes: int
