"""State of one server: data of `reconciler.step`. Its events and orders are in `server_events`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from resharder.server.state.timing import Timing
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

ASLEEP = (Power.ASLEEP_1, Power.ASLEEP_2)
"""Levels of sleep, which are vLLM's: weights in host memory, weights dropped."""


@dataclass(frozen=True)
class Settings:
    """Durations in seconds, and the number of attempts at one version."""

    lease: float = 15.0
    grace: float = 15.0  # from LOST until the server's versions are unpinned
    boot: float = 1800.0  # from a claim without renewal until a control side attaches
    install_step: float = 600.0  # for all workers to stage, and again to apply
    attempts: int = 3
    first_retry: float = 2.0  # doubles with each failure
    last_retry: float = 60.0
    forget: float = 86400.0  # from LOST until the server is forgotten


@dataclass(frozen=True)
class Worker:
    """Last report of a worker."""

    rank: int
    state: resources_pb2.Worker.State
    version: int = 0
    install: str = ""
    error: str = ""
    process: str = ""
    fingerprint: str = ""  # of its version
    needed_bytes: int = 0
    boxed_bytes: int = 0
    verified_tensors: int = 0
    transport: str = ""
    transport_reason: str = ""
    warnings: tuple[str, ...] = ()  # refusals that its environment allows
    host: str = ""  # identity of its kernel and network namespace
    stage_seconds: float = 0.0
    apply_seconds: float = 0.0
    memory: str = ""  # fingerprint of its declared layout on the direct path
    direct: bool = False  # whether the declared layout covers all tensors that it needs
    path: str = ""  # links of the direct path that `install` came over
    joined: bool = False  # takes part in a direct transfer for `install`
    timings: tuple[Timing, ...] = ()
    verification: resources_pb2.Verification | None = None  # result of the last verification
    altered: bool = False  # FAILED after a verification found a difference
    released_bytes: int | None = None  # of device memory, by the current sleep; None: awake or not measured
    # Derived by the daemon.
    holds: int = 0  # version that its parameters are verified to contain; 0: unknown
    held_as: str = ""  # fingerprint of that version
    differs: str = ""  # difference from the store's copy, found when the version became READY
    ordered: bool = False  # this daemon has ordered this process to apply


@dataclass(frozen=True)
class Reach:
    """Servers to which ranks offer a version."""

    hosts: frozenset[str] = frozenset()  # the ranks', if the version is not offered to all servers
    links: Mapping[str, str] | None = None  # None: to those of one host alone. Else why others have no link; empty if they have
    unlinked: str = "its link to the ranks has not been tried yet"  # why others than in `links` have none

    def why_not(self, server: "Server") -> str:
        """Return why a server is not among them; empty if it is."""
        elsewhere = [rank for rank, worker in sorted(server.workers.items()) if {worker.host} != self.hosts]
        if not self.hosts or not elsewhere:
            return ""
        place = f"worker {elsewhere[0]} is not on the trainer's host"
        if self.links is None:
            return place
        why = self.links.get(server.id, self.unlinked)
        return f"{place}, and {why}" if why else ""


@dataclass(frozen=True)
class Ahead:
    """Version that every rank offered before READY. `fingerprint` identifies it in workers' reports until then."""

    fingerprint: str
    staging: bool  # the version is UPLOADING, and the fleet serves ahead
    remote: bool = True  # also to servers that fetch from the store, which fetch the version to fall back on each time
    reach: Reach = Reach()


@dataclass(frozen=True)
class Control:
    """One API server. `busy` is the install, or change of power, that was in progress when it attached."""

    nonce: str
    address: str
    seen: float
    busy: str = ""
    in_flight: int = 0  # requests in flight
    closing: bool = False  # its gate may be open on an earlier version: it has not answered CLOSE, or RESUME if it returned


@dataclass(frozen=True)
class Goal:
    """Intended state of a server. `why` is a clause that explanations of the server's state include."""

    version: int | None = None  # None: the newest READY one; 0: no change
    boot: int | None = None  # for processes that start; None: the newest READY one; 0: none
    apply: bool = True  # False: stay staged
    serves: tuple[int, int] | None = None  # lowest and highest version on which the gate may open; None: any
    open: bool = True  # False: drained
    power: Power = Power.AWAKE
    strict: bool = False  # gates close when leases expire
    retry: tuple[int, int] = (0, 0)  # a change clears all failures
    why: str = ""
    leaves: str = ""  # why the version in service has to leave it: a clause; empty for none
    warning: str = ""  # a clause that explanations of a server in service include
    bound: Mapping[int, int] = field(default_factory=dict)  # versions of an adapter that may be served with one of the base alone

    @property
    def in_service(self) -> bool:
        """Whether the server is neither drained nor asleep."""
        return self.open and self.power == Power.AWAKE

    def permits(self, version: int) -> bool:
        """Return whether the gate may open on a version."""
        in_range = self.serves is None or self.serves[0] <= version <= self.serves[1]
        return self.in_service and not self.leaves and in_range


@dataclass(frozen=True)
class Change:
    """Order to sleep or wake without an answer yet."""

    id: str
    power: Power
    began: float


@dataclass(frozen=True)
class OrderFailure:
    """Failure of STAGE or APPLY that a control side has reported at a monotonic time."""

    kind: server_pb2.Order.Kind
    error: str
    workers_failed: bool  # in workers, which report it themselves
    at: float


@dataclass(frozen=True)
class Install:
    """One install on a server. `started`, `step_started` and `ended` are in seconds, by the monotonic clock."""

    id: str
    version: int
    state: resources_pb2.Install.State
    started: float
    step_started: float
    error: str = ""
    ended: float = 0.0
    control_done: bool = False
    order_failed: OrderFailure | None = None
    pause_seconds: float = 0.0
    timings: tuple[Timing, ...] = ()  # the leader's
    profiled: bool = False  # workers profile it
    ahead_of: int = 0  # READY version to fall back on, for a version that was not READY when the install began

    @property
    def active(self) -> bool:
        """Whether the install has neither committed nor failed."""
        return self.state in (resources_pb2.Install.STAGING, resources_pb2.Install.APPLYING)


@dataclass(frozen=True)
class Failure:
    """Failures of a version on this server: count, last error, time of the next attempt."""

    count: int
    error: str
    retry_at: float


@dataclass(frozen=True)
class Server:
    """State of one server. Replaced, never modified, by `reconciler.step`. Times are monotonic seconds."""

    id: str
    model: str
    fleet: str
    life: str  # nonce of the daemon's lifetime, prefix of every install id
    seen: float  # time of a control side's last report; before one attached, of any process's
    ready: Mapping[int, str] = field(default_factory=dict)  # READY versions of the model with their fingerprints
    ahead: Mapping[int, Ahead] = field(default_factory=dict)  # versions that every rank has offered, READY or not
    boot_version: int = 0
    booting: bool = True  # not all workers have reported
    attached: bool = False  # a control side has attached in this boot
    renews: bool = False  # processes renew their claims until a control side attaches
    world_size: int = 0
    controls: tuple[Control, ...] = ()  # the first one leads
    workers: Mapping[int, Worker] = field(default_factory=dict)
    reported_at: Mapping[int, float] = field(default_factory=dict)  # time of the last report of each of `workers`
    gone: frozenset[str] = frozenset()  # processes that others have replaced, or will
    confirmed: int = 0  # last version that every worker verified
    opened: int = 0  # version on which control sides were ordered to open; 0: closed
    opened_by: str = ""  # id of that order: the install's, or a new one
    resumed: bool = False  # the leader has confirmed that the gate is open
    torn: frozenset[int] = frozenset()  # ranks whose parameters may mix two versions
    altered: Mapping[int, str] = field(
        default_factory=dict
    )  # the ranks of `torn` in which a verification found a difference, with that difference
    install: Install | None = None  # the current or the last one
    ended: Install | None = None  # the last one that ended
    installs: int = 0
    failures: Mapping[int, Failure] = field(default_factory=dict)
    lost_at: float | None = None
    left: bool = False  # its last control side has announced its end by an order
    failure: str = ""  # why a control side ended without an order, since the last one attached
    address: str = ""  # of the last control side that attached
    ending: bool = False  # its processes end, to start again on another config
    restarts: bool = False  # from `ending` until it serves again or is LOST
    goal: Goal = Goal()
    power: Power = Power.AWAKE  # as last reported by the leader
    change: Change | None = None
    changes: int = 0  # orders about power so far
    term: int = 0  # of its leadership; each LEAD begins a higher one
    change_failed: Failure | None = None
    lingers: int = 0  # version that clients may still get after the gate was ordered to close
    passes_kv: bool = False
    base_server: str = ""  # id of the server that the adapter is loaded into; empty for a model of its own

    def lease(self, settings: Settings) -> float:
        """Return the seconds of silence after which the server is LOST."""
        return settings.lease if self.attached or self.renews else settings.boot

    @property
    def wanted(self) -> int:
        """Version that the server should install; 0: no change."""
        return self.newest if self.goal.version is None else self.goal.version

    @property
    def boots(self) -> int:
        """Version that its processes should boot from; 0: none."""
        return self.newest if self.goal.boot is None else self.goal.boot

    @property
    def newest(self) -> int:
        """Newest READY version of the model; 0: none."""
        return max(self.ready, default=0)

    def attempts(self, version: int) -> int:
        """Return how often an install of a version has failed."""
        return self.failures[version].count if version in self.failures else 0

    def serves(self, version: int) -> bool:
        """Return whether a gate may open on a version: READY, or UPLOADING if the fleet serves ahead."""
        return version in self.ready or self.is_ahead(version)

    def is_ahead(self, version: int) -> bool:
        """Return whether a version is UPLOADING and may be installed, because the fleet serves ahead."""
        return version not in self.ready and version in self.ahead and self.ahead[version].staging

    @property
    def verifications(self) -> tuple[resources_pb2.Verification, ...]:
        """Last verification of each worker that has made one, by rank."""
        workers = [worker for _, worker in sorted(self.workers.items())]
        return tuple(worker.verification for worker in workers if worker.verification is not None)

    @property
    def unproven(self) -> bool:
        """Whether a worker has a version that is not verified against the store."""
        return any(worker.holds and worker.held_as != self.ready.get(worker.holds) for worker in self.workers.values())

    @property
    def differs(self) -> str:
        """Difference between a worker's memory and the store's copy; empty if none was found."""
        return next((worker.differs for _, worker in sorted(self.workers.items()) if worker.differs), "")

    @property
    def complete(self) -> bool:
        """Whether every worker has reported."""
        return self.world_size > 0 and all(rank in self.workers for rank in range(self.world_size))

    @property
    def agreed(self) -> int:
        """Version that every worker has verified; 0: none."""
        held = {worker.holds for worker in self.workers.values()}
        return held.pop() if self.complete and not self.torn and len(held) == 1 else 0

    @property
    def serving(self) -> int:
        """Version that clients get; 0: none."""
        return self.opened if self.resumed and self.lost_at is None else 0

    @property
    def shown(self) -> frozenset[int]:
        """Every version that clients may get, by the orders and answers so far."""
        return frozenset({self.opened, self.lingers} - {0})

    @property
    def changes_now(self) -> bool:
        """Whether an install, the opening of the gate after it, or a change of power is in progress."""
        install = self.install
        opening = install is not None and bool(self.opened) and not self.resumed
        return opening or self.change is not None or (install is not None and install.active)

    @property
    def staged(self) -> int:
        """Version that every worker has staged; 0: none."""
        install = self.install
        if install is None or install.state != resources_pb2.Install.STAGING:
            return 0
        done = [w for w in self.workers.values() if w.install == install.id and w.state == resources_pb2.Worker.STAGED]
        return install.version if self.complete and len(done) == self.world_size else 0

    @property
    def joined(self) -> bool:
        """Whether the current install uses the direct path."""
        install = self.install
        if install is None or not install.active:
            return False
        return any(worker.joined and worker.install == install.id for worker in self.workers.values())

    def busy_elsewhere(self, control: Control) -> bool:
        """Return whether a control side is busy with an order that is not the current one."""
        current = {self.install.id} if self.install is not None and self.install.active else set()
        return bool(control.busy) and control.busy not in current | ({self.change.id} if self.change else set())


def processes(server: Server) -> frozenset[str]:
    """Return the nonces of the processes of all workers that have reported."""
    return frozenset(worker.process for worker in server.workers.values())


def in_use(server: Server, now: float, settings: Settings) -> frozenset[int]:
    """Return the READY versions that a server needs; none after the grace of a LOST server."""
    if server.lost_at is not None and now >= server.lost_at + settings.grace:
        return frozenset()
    versions = {server.confirmed, server.opened, *(worker.holds for worker in server.workers.values())}
    if server.booting:
        versions.add(server.boot_version)
    if server.install is not None and server.install.active:
        versions.add(server.install.version)
    return frozenset(versions) & server.ready.keys()
