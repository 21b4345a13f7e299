"""Events that change the state of one server, and the orders that follow from them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from resharder.server.state.server import Ahead, Goal, Worker
from resharder.server.state.timing import Timing
from resharder.v1 import server_pb2
from resharder.v1.resources_pb2 import Power


@dataclass(frozen=True)
class Claimed:
    """Claim of a server's id by a starting process. `boot`: the process asks for a version to load, and one is READY."""

    boot: bool
    renews: bool = False  # the claim is repeated within every lease


@dataclass(frozen=True)
class Attached:
    """Begin of a control side's stream, with the state of its engine."""

    control: str
    world_size: int
    address: str = ""
    busy: str = ""
    power: Power = Power.POWER_UNSPECIFIED
    in_flight: int = 0
    passes_kv: bool = False
    serving: int = 0  # version on which its gate is open, by an earlier order
    term: int = 0  # highest term that it has seen


@dataclass(frozen=True)
class Reported:
    """Renewal by a control side, with the result of an order if `done` is set."""

    control: str
    install: str = ""
    done: server_pb2.Order.Kind = server_pb2.Order.KIND_UNSPECIFIED
    ok: bool = True
    error: str = ""
    pause_seconds: float = 0.0
    power: Power = Power.POWER_UNSPECIFIED
    in_flight: int = 0
    timings: tuple[Timing, ...] = ()
    leaving: bool = False  # the control side ends after this report, by an order
    restarting: bool = False  # STAGE failed for the server's config, and its processes end to start again
    failure: str = ""  # the control side ends after this report, for this reason and without an order
    workers_failed: bool = False  # STAGE or APPLY failed in workers, which report it themselves


@dataclass(frozen=True)
class Detached:
    """End of a control side's stream."""

    control: str


@dataclass(frozen=True)
class WorkerReported:
    """Report of a worker, which replaces its previous one."""

    worker: Worker


@dataclass(frozen=True)
class VersionsChanged:
    """Change of the versions that servers may load: fingerprints of READY ones, and those served ahead of READY, by number."""

    ready: Mapping[int, str]
    ahead: Mapping[int, Ahead] = field(default_factory=dict)


@dataclass(frozen=True)
class Ticked:
    """Passage of time, so that leases and deadlines expire."""


@dataclass(frozen=True)
class Wanted:
    """Change of the server's goal, as its fleet decides it."""

    goal: Goal


@dataclass(frozen=True)
class Reinstalled:
    """Request to repeat the current install under a profiler. Ignored while the server is busy."""


Event = Claimed | Attached | Reported | Detached | WorkerReported | VersionsChanged | Ticked | Wanted | Reinstalled


@dataclass(frozen=True)
class Order:
    """Order to one control side. `install` is the id that its answer repeats, also for orders about the gate and power."""

    control: str
    kind: server_pb2.Order.Kind
    install: str = ""
    version: int = 0
    reason: str = ""
    power: Power = Power.POWER_UNSPECIFIED
    profile: bool = False
    ahead_of: int = 0
    term: int = 0  # set by the fleets when the order is sent
    boots_another: bool = False  # for STAGE: processes that start now boot another version
    base_version: int = 0  # for RESUME of an adapter: the only version of its base with which it may be served; 0: any
