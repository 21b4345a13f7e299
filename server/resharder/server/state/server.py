"""What the daemon knows of one server, what can happen to it, and the orders that it gets: what `reconciler.step` is about."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from resharder.server.state.timing import Timing
from resharder.v1 import resources_pb2, server_pb2


class WorkerState(IntEnum):
    BOOTED = resources_pb2.Worker.BOOTED
    STAGED = resources_pb2.Worker.STAGED
    APPLIED = resources_pb2.Worker.APPLIED
    FAILED = resources_pb2.Worker.FAILED
    EMPTY = resources_pb2.Worker.EMPTY


class OrderKind(IntEnum):
    RENEWED = server_pb2.Order.RENEWED
    LEAD = server_pb2.Order.LEAD
    STAGE = server_pb2.Order.STAGE
    APPLY = server_pb2.Order.APPLY
    RESUME = server_pb2.Order.RESUME
    CLOSE = server_pb2.Order.CLOSE
    UNSTAGE = server_pb2.Order.UNSTAGE
    SLEEP = server_pb2.Order.SLEEP
    WAKE = server_pb2.Order.WAKE


class Power(IntEnum):
    UNKNOWN = resources_pb2.POWER_UNSPECIFIED
    AWAKE = resources_pb2.AWAKE
    WEIGHTS_AWAKE = resources_pb2.WEIGHTS_AWAKE
    ASLEEP_1 = resources_pb2.ASLEEP_1
    ASLEEP_2 = resources_pb2.ASLEEP_2

    @property
    def asleep(self) -> bool:
        return self in (Power.ASLEEP_1, Power.ASLEEP_2)


class InstallState(IntEnum):
    STAGING = resources_pb2.Install.STAGING
    APPLYING = resources_pb2.Install.APPLYING
    COMMITTED = resources_pb2.Install.COMMITTED
    FAILED = resources_pb2.Install.FAILED


@dataclass(frozen=True)
class Settings:
    """All in seconds but `attempts`, the tries that one version gets."""

    lease: float = 15.0
    grace: float = 15.0  # from LOST until its versions are let go
    boot: float = 1800.0  # from a claim that nobody renews until a control side attaches
    install_step: float = 600.0  # for all workers to stage, and again to apply
    attempts: int = 3
    first_retry: float = 2.0  # doubles with each failure
    last_retry: float = 60.0


@dataclass(frozen=True)
class Worker:
    """What a worker said last."""

    rank: int
    state: WorkerState
    version: int = 0
    install: str = ""
    error: str = ""
    process: str = ""
    fingerprint: str = ""  # of the version it holds
    needed_bytes: int = 0
    boxed_bytes: int = 0
    verified_tensors: int = 0
    transport: str = ""
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0
    memory: str = ""  # fingerprint of the layout that the direct path can write to
    direct: bool = False  # that layout has everything that it needs
    joined: bool = False  # it takes part in a transfer of the direct path for `install`
    timings: tuple[Timing, ...] = ()
    verification: resources_pb2.Verification | None = None  # its last one
    altered: bool = False  # FAILED, since that one found other contents in its memory than its version gives
    # What the daemon makes of it.
    holds: int = 0  # the version its parameters are proven to hold; 0: unknown
    held_as: str = ""  # the fingerprint that they were proven by
    differs: str = ""  # from the store's copy, by what it found when that was READY
    ordered: bool = False  # this daemon has ordered this process to apply something


@dataclass(frozen=True)
class Ahead:
    """A version that every rank offered before it was READY; `fingerprint` is what workers hold it by until then."""

    fingerprint: str
    staging: bool  # it is UPLOADING still, and the fleet serves ahead


@dataclass(frozen=True)
class Control:
    """One API server; `busy` is an install, or a change of power, that it was at when it attached."""

    nonce: str
    address: str
    seen: float
    busy: str = ""
    in_flight: int = 0  # requests that it is answering
    closing: bool = False  # it was told to close, and has not said that it did


@dataclass(frozen=True)
class Goal:
    """What the fleet wants of a server; `why` is a part of a sentence."""

    version: int | None = None  # None: the newest READY one; 0: what it has
    boot: int | None = None  # for processes that start; None: the newest READY one; 0: none
    apply: bool = True  # False: stay staged
    serves: tuple[int, int] | None = None  # the lowest and highest version that the gate may be opened on; None: any
    open: bool = True  # False: drained
    power: Power = Power.AWAKE
    strict: bool = False  # gates shut when leases end
    retry: tuple[int, int] = (0, 0)  # when it changes, failures are forgotten
    why: str = ""

    @property
    def in_service(self) -> bool:
        """Neither drained nor asleep."""
        return self.open and self.power == Power.AWAKE

    def permits(self, version: int) -> bool:
        """Whether the gate may be opened on it."""
        return self.in_service and (self.serves is None or self.serves[0] <= version <= self.serves[1])


@dataclass(frozen=True)
class Change:
    """An order to sleep or to wake that was given and not answered."""

    id: str
    power: Power
    began: float


@dataclass(frozen=True)
class Install:
    id: str
    version: int
    state: InstallState
    started: float
    step_started: float
    error: str = ""
    ended: float = 0.0
    control_done: bool = False
    pause_seconds: float = 0.0
    timings: tuple[Timing, ...] = ()  # the leader's
    profiled: bool = False  # workers are to profile it
    ahead_of: int = 0  # the READY version that workers keep at hand, where this one was not when the install began

    @property
    def active(self) -> bool:
        return self.state in (InstallState.STAGING, InstallState.APPLYING)


@dataclass(frozen=True)
class Failure:
    """How often a version failed here, how it did last, and when it may be tried again."""

    count: int
    error: str
    retry_at: float


@dataclass(frozen=True)
class Server:
    id: str
    model: str
    fleet: str
    life: str  # a nonce of the daemon's lifetime, the start of every install id
    seen: float  # the last word of a control side, or of anyone before one attached
    ready: Mapping[int, str] = field(default_factory=dict)  # READY versions of the model, with their fingerprints
    ahead: Mapping[int, Ahead] = field(default_factory=dict)  # READY by now or not
    boot_version: int = 0
    booting: bool = True  # not all workers have reported
    attached: bool = False  # a control side has been there in this boot
    renews: bool = False  # its claims are renewed until then
    world_size: int = 0
    controls: tuple[Control, ...] = ()  # the first one leads
    workers: Mapping[int, Worker] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()  # processes that others have replaced
    confirmed: int = 0  # the last version that every worker proved
    opened: int = 0  # the version that control sides were told to serve; 0: closed
    opened_by: str = ""  # under which id they were told: that of the install, or of none
    resumed: bool = False  # the leader has said that it does
    torn: frozenset[int] = frozenset()  # ranks that may hold a mix
    altered: Mapping[int, str] = field(
        default_factory=dict
    )  # of those, ranks that found it by a verification, and what they found
    install: Install | None = None  # the current or the last one
    ended: Install | None = None  # the last one that ended
    installs: int = 0
    failures: Mapping[int, Failure] = field(default_factory=dict)
    lost_at: float | None = None
    goal: Goal = Goal()
    power: Power = Power.AWAKE  # as the leader said last
    change: Change | None = None
    changes: int = 0  # orders about power so far
    term: int = 0  # of its leadership; each LEAD begins a higher one
    change_failed: Failure | None = None
    lingers: int = 0  # the version that clients may still get though the gate was ordered to close
    passes_kv: bool = False

    def lease(self, settings: Settings) -> float:
        """Seconds that it may be silent before it is LOST."""
        return settings.lease if self.attached or self.renews else settings.boot

    @property
    def wanted(self) -> int:
        """The version that it should hold; 0: what it has."""
        return self.newest if self.goal.version is None else self.goal.version

    @property
    def boots(self) -> int:
        """The version that its processes should start from; 0: none."""
        return self.newest if self.goal.boot is None else self.goal.boot

    @property
    def newest(self) -> int:
        return max(self.ready, default=0)

    def attempts(self, version: int) -> int:
        """Return how often an install of a version has failed."""
        return self.failures[version].count if version in self.failures else 0

    def serves(self, version: int) -> bool:
        """Whether a gate may be opened on it: READY, or UPLOADING where the fleet serves ahead."""
        return version in self.ready or self.is_ahead(version)

    def is_ahead(self, version: int) -> bool:
        return version not in self.ready and version in self.ahead and self.ahead[version].staging

    @property
    def unproven(self) -> bool:
        """What some worker holds has not been found in the store."""
        return any(worker.holds and worker.held_as != self.ready.get(worker.holds) for worker in self.workers.values())

    @property
    def differs(self) -> str:
        """How what it holds differs from the store's copy; empty where nobody has found that."""
        return next((worker.differs for _, worker in sorted(self.workers.items()) if worker.differs), "")

    @property
    def complete(self) -> bool:
        """Every worker has reported."""
        return self.world_size > 0 and all(rank in self.workers for rank in range(self.world_size))

    @property
    def agreed(self) -> int:
        """The version that every worker is proven to hold; 0 where there is none."""
        held = {worker.holds for worker in self.workers.values()}
        return held.pop() if self.complete and not self.torn and len(held) == 1 else 0

    @property
    def serving(self) -> int:
        """The version that clients get; 0 while none."""
        return self.opened if self.resumed and self.lost_at is None else 0

    @property
    def shown(self) -> frozenset[int]:
        """Every version that clients may get, by what has been ordered and answered."""
        return frozenset({self.opened, self.lingers} - {0})

    @property
    def staged(self) -> int:
        """The version that every worker has staged; 0: none."""
        install = self.install
        if install is None or install.state != InstallState.STAGING:
            return 0
        done = [w for w in self.workers.values() if w.install == install.id and w.state == WorkerState.STAGED]
        return install.version if self.complete and len(done) == self.world_size else 0

    @property
    def joined(self) -> bool:
        """Its install, which goes on, comes over the direct path, or some of it."""
        install = self.install
        if install is None or not install.active:
            return False
        return any(worker.joined and worker.install == install.id for worker in self.workers.values())

    def busy_elsewhere(self, control: Control) -> bool:
        """It is still at an order that is not the server's current one."""
        current = {self.install.id} if self.install is not None and self.install.active else set()
        return bool(control.busy) and control.busy not in current | ({self.change.id} if self.change else set())


def in_use(server: Server, now: float, settings: Settings) -> frozenset[int]:
    """The versions that must not go away for this server's sake."""
    if server.lost_at is not None and now >= server.lost_at + settings.grace:
        return frozenset()
    versions = {server.confirmed, server.opened, *(worker.holds for worker in server.workers.values())}
    if server.booting:
        versions.add(server.boot_version)
    if server.install is not None and server.install.active:
        versions.add(server.install.version)
    return frozenset(versions) & server.ready.keys()


@dataclass(frozen=True)
class Claimed:
    """A process asks who it is; with `boot` also which version to load. A READY version is there by then."""

    boot: bool
    renews: bool = False  # the claim lasts for a lease, and is made again before that ends


@dataclass(frozen=True)
class Attached:
    control: str
    world_size: int
    address: str = ""
    busy: str = ""
    power: Power = Power.UNKNOWN
    in_flight: int = 0
    passes_kv: bool = False
    serving: int = 0  # the version that its gate is open on, by an earlier word
    term: int = 0  # the highest that it has seen


@dataclass(frozen=True)
class Reported:
    """A control side's renewal, with how an order went if `done` is set."""

    control: str
    install: str = ""
    done: OrderKind | None = None
    ok: bool = True
    error: str = ""
    pause_seconds: float = 0.0
    power: Power = Power.UNKNOWN
    in_flight: int = 0
    timings: tuple[Timing, ...] = ()


@dataclass(frozen=True)
class Detached:
    control: str


@dataclass(frozen=True)
class WorkerReported:
    worker: Worker


@dataclass(frozen=True)
class VersionsChanged:
    ready: Mapping[int, str]
    ahead: Mapping[int, Ahead] = field(default_factory=dict)


@dataclass(frozen=True)
class Ticked:
    pass


@dataclass(frozen=True)
class Wanted:
    goal: Goal


@dataclass(frozen=True)
class Reinstalled:
    """An operator wants what is served to be installed once more, and profiled; ignored by a server that is at anything else."""


Event = Claimed | Attached | Reported | Detached | WorkerReported | VersionsChanged | Ticked | Wanted | Reinstalled


@dataclass(frozen=True)
class Order:
    control: str
    kind: OrderKind
    install: str = ""
    version: int = 0
    reason: str = ""
    power: Power = Power.UNKNOWN
    profile: bool = False
    ahead_of: int = 0
    term: int = 0  # filled in by the fleets when it is sent
