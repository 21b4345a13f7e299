"""The control side under random schedules: fleets of vLLM servers with one or two API servers each, and a daemon.

A schedule boots the servers, then injects faults for some seconds while versions are published, operators give commands
and clients send requests: processes stop and die, messages are late, lost or doubled, the wall clock jumps, installs fail.
Then it leaves everything in peace, and every server must arrive at the newest version. `api_server.py`, `engine_model.py`
and `daemon_model.py` say which code is real, and have most invariants.
"""

from collections import Counter
from collections.abc import Callable
from contextvars import Context
from functools import partial
from random import Random

from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.state.errors import DaemonError
from resharder.server.state.fleet import Fleet
from resharder.v1 import operator_pb2, resources_pb2
from resharder.v1.resources_pb2 import Power

from tests.simulation.control.api_server import ApiServer, Request, simulated_modules
from tests.simulation.control.daemon_model import FLEET, LEASE, Daemon
from tests.simulation.control.engine_model import Caller, EngineCore, WorkerModel
from tests.simulation.control.schedule import Process, Schedule
from tests.support.simulated_store import MODEL

BOOT_BOUND, PEACE_BOUND, ANSWER_BOUND = 60.0, 90.0, 30.0
"""Simulated seconds within which servers boot, arrive at their target after the last fault, and answer requests."""
_STOPS = (0.05, 0.5, LEASE / 2, 1.2 * LEASE, 2.5 * LEASE)
_MODES = (resources_pb2.KEEP, resources_pb2.KEEP, resources_pb2.WAIT, resources_pb2.ABORT)
_KINDS = (
    resources_pb2.UpdateStrategy.ALL_AT_ONCE,
    resources_pb2.UpdateStrategy.ALL_AT_ONCE,
    resources_pb2.UpdateStrategy.ROLLING,
    resources_pb2.UpdateStrategy.ATOMIC,
)
_FAULTS = {
    "stop_leader": 5,
    "stop_other": 3,
    "stop_core": 2,
    "stop_daemon": 2,
    "kill_api": 2,
    "kill_server": 2,
    "kill_daemon": 2,
    "cut": 4,
    "hold": 3,
    "wall": 2,
    "power": 2,
    "drain": 1,
    "mode": 2,
    "fail": 2,
    "kill_after_apply": 2,
}


class ServerModel:
    """A vLLM server over all of its lives."""

    def __init__(self, world: "World", id: str, apis: int, workers: int) -> None:
        self.world, self.id, self._apis, self._workers = world, id, apis, workers
        self.lives = 0
        self.core: EngineCore | None = None
        self.apis: list[ApiServer] = []
        self.attached = False

    @property
    def alive(self) -> bool:
        """Whether it serves, or may serve."""
        return self.core is not None and self.core.process.alive

    def boot(self) -> None:
        """Start the server's processes."""
        if self.alive:
            return
        self.lives += 1
        self.apis, self.attached = [], False
        self.world.daemon.lost.discard(self.id)
        process = Process(f"{self.id}{self.lives}.core")
        workers = [WorkerModel(rank, f"{self.id}{self.lives}.worker{rank}") for rank in range(self._workers)]
        world = self.world
        self.core = EngineCore(world.schedule, world.daemon, self.id, process, workers, world.failures)
        world.schedule.after(0, process, self._claim)

    def _claim(self) -> None:
        core, daemon, schedule = self.core, self.world.daemon, self.world.schedule
        assert core is not None

        def answered(result: object) -> None:
            if isinstance(result, Exception):
                schedule.after(1.0, core.process, self._claim)
            elif not self.attached:
                self.attached = True
                self._renew()
                version = result.boot_version  # type: ignore[attr-defined]
                schedule.after(0.2 + 3 * schedule.random.random() ** 2, core.process, lambda: self._loaded(core, version))

        daemon.call(core.link, lambda: daemon.claim(self.id, boot=True), answered)

    def _renew(self) -> None:
        """Renew the claim, as the helper process does, until a control side has attached."""
        core, daemon, schedule = self.core, self.world.daemon, self.world.schedule
        assert core is not None

        def answered(result: object) -> None:
            if isinstance(result, Exception) or not result.attached:  # type: ignore[attr-defined]
                schedule.after(LEASE / 4, core.process, self._renew)

        daemon.call(core.link, lambda: daemon.claim(self.id, boot=False), answered)

    def _loaded(self, core: EngineCore, version: int) -> None:
        self.world.daemon.check_boot_version(self.id, version)
        if version not in self.world.daemon.versions.ready:
            self.kill()  # the daemon took it for lost meanwhile
            self.world.schedule.after(1.0, None, self.boot)
            return
        core.booted(version)
        for number in range(self._apis):
            process = Process(f"{self.id}{self.lives}.api{number}")
            delay = 0.5 * self.world.schedule.random.random()
            self.world.schedule.after(delay, process, partial(self._start_api, core, process))

    def _start_api(self, core: EngineCore, process: Process) -> None:
        if core.process.alive:
            api = ApiServer(self.world.schedule, self.world.daemon, core, process, self.world.strict)
            api.admitted = self.world.check_mix
            self.world.apis.append(api)
            self.apis.append(api)

    def kill(self) -> None:
        """Kill all processes."""
        assert self.core is not None
        for api in self.apis:
            self.world.kill_process(api.process)
        self.world.kill_process(self.core.process)

    def at(self, target: int) -> bool:
        """Whether everything about a live server is as it should be on version `target`."""
        core = self.core
        assert core is not None
        up = bool(self.apis) and core.installed == target and not core.paused and not core.slumber.tags and not core.busy
        admitted = {api.admits for api in self.apis if api.process.alive}
        return up and admitted == {target}


class World:
    """One schedule."""

    def __init__(self, random: Random, trace: Callable[[str], None]) -> None:
        self.random, self.counts = random, Counter[str]()
        self.schedule = Schedule(random, trace)
        self.schedule.stop_seconds = _STOPS
        self.daemon = Daemon(self.schedule, random.choice((0.002, 0.02, 0.1)), random.choice((1, 3)))
        self.kind = random.choice(_KINDS)
        self.max_skew = random.choice((0, 0, 1)) if self.kind == resources_pb2.UpdateStrategy.ROLLING else 0
        self.strict = self.kind == resources_pb2.UpdateStrategy.ATOMIC or self.max_skew > 0
        self.failures: list[str] = []
        self.requests: list[Request] = []
        ids = "ab"[: random.choice((1, 1, 2))]
        self.servers = [ServerModel(self, id, random.choice((1, 2)), random.choice((1, 2))) for id in ids]
        self.apis: list[ApiServer] = []  # of all lives
        self._faults = False
        # Few kinds in one schedule, so that they meet more often than among all others.
        self.kinds_of_faults = random.choices(list(_FAULTS), list(_FAULTS.values()), k=random.choice((1, 2, 3, 6)))
        self.published = 0
        self._due = 0
        """Version that was published before the fleet can have arrived."""

    # The operator and the trainer

    def _ask(self, act: Callable[[], object]) -> None:
        """Call the daemon as an operator; a refusal is an answer too."""
        if not self.daemon.process.alive:
            return

        def ask() -> None:
            try:
                act()
            except DaemonError as error:
                self.schedule.trace(f"operator refused: {error}")
            self.daemon.drain()

        self.schedule.after(0, self.daemon.process, ask)

    def _update(self, paths: list[str], **fields: object) -> None:
        fleet = resources_pb2.Fleet(name=FLEET, model=MODEL, **fields)  # type: ignore[arg-type]
        request = operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask=FieldMask(paths=paths))
        self._ask(lambda: self.daemon.operations.update(request))

    def _publish(self) -> None:
        def publish() -> None:
            self.published = self.daemon.versions.publish()
            self.schedule.trace(f"published version {self.published}")
            self.daemon.tick()

        self.schedule.after(0, self.daemon.process, publish)

    def _set_power(self, power: Power) -> None:
        self.schedule.trace(f"operator sets {Power.Name(power)}")
        request = operator_pb2.SetPowerRequest(fleet=FLEET, power=power)
        self._ask(lambda: self.daemon.operations.set_power(request))

    def _drain(self, server: str, drained: bool) -> None:
        request = operator_pb2.SetDrainedRequest(fleet=FLEET, server=f"servers/{server}", drained=drained)
        self._ask(lambda: self.daemon.operations.set_drained(request))

    @property
    def fleet(self) -> Fleet:
        return self.daemon.files.kept[FLEET]

    # Clients

    def _send_requests(self) -> None:
        apis = [api for server in self.servers for api in server.apis if api.process.alive]
        if apis and self._faults:
            self._send_to(self.random.choice(apis))
        if self._faults:
            self.schedule.after(self.random.expovariate(3.0), None, self._send_requests)

    def _send_to(self, api: ApiServer) -> Request:
        request = Request(
            f"r{len(self.requests)}", self.random.random() < 0.4, self.random.choice((1, 2, 5, 15)), self.schedule.now
        )
        self.requests.append(request)
        api.process.when_killed.append(partial(setattr, request, "broken", True))
        self.schedule.after(0.001, api.process, lambda: api.serve(request))
        return request

    def check_mix(self, api: ApiServer) -> None:
        """Check that no other server's gate admits a version that must not mix with that of a request admitted now."""
        if not self.strict or self.schedule.now - api.process.read_at > 1e-3:
            return
        others = [s for s in self.servers if s.alive and api not in s.apis and len(s.apis) == 1]
        alone = any(server.apis == [api] for server in self.servers)
        for other in others if alone else ():
            also, here = other.apis[0].admits, api.gate.version
            if also and abs(also - here) > self.max_skew:
                self.schedule.fail(f"{api.process.name} admits version {here}, {other.apis[0].process.name} {also}")

    # Faults

    def kill_process(self, process: Process) -> None:
        """Kill a process; its connections break, now or only by silence."""
        links = [link for server in self.servers for api in server.apis if api.process is process for link in [api.link]]
        silent = self.random.random() < 0.3
        self.schedule.kill(process)
        for link in links if not silent else ():
            for stream in list(link.streams):
                self.schedule.after(self.daemon.latency(), stream.daemon_process, stream.close)

    def _fault(self) -> None:
        kind = self.random.choice(self.kinds_of_faults)
        server = self.random.choice(self.servers)
        apis = [api for api in server.apis if api.process.alive]
        seconds = self.random.choice(_STOPS)
        self.counts[kind] += 1
        if kind in ("stop_leader", "stop_other", "cut", "hold", "kill_api"):
            chosen = [api for api in apis if api.leads == (kind == "stop_leader")] or apis
            if chosen:
                self._fault_of_api(kind, server, self.random.choice(chosen), seconds)
        elif kind == "stop_core" and server.core is not None:
            self.schedule.stop(server.core.process, seconds)
        elif kind == "stop_daemon":
            self.schedule.stop(self.daemon.process, seconds)
        elif kind == "kill_server" and server.alive:
            server.kill()
            self._maybe_boot(server)
        elif kind == "kill_daemon" and self.daemon.process.alive:
            self._kill_daemon(seconds)
        elif kind == "wall":
            self.schedule.wall_offset += self.random.choice((-3e8, -3e4, -10.0, 10.0, 3e4, 3e8))
            self.schedule.trace("wall clock jumps")
        elif kind == "power":
            self._set_power(self.random.choice((Power.ASLEEP_1, Power.ASLEEP_2)))
            self.schedule.after(seconds, None, lambda: self._set_power(Power.AWAKE))
        elif kind == "drain":
            self._drain(server.id, True)
            self.schedule.after(seconds, None, lambda: self._drain(server.id, False))
        elif kind == "mode":
            self._update(["pause_mode"], pause_mode=self.random.choice(_MODES))
        elif kind == "kill_after_apply" and server.core is not None:
            server.core.when_applied = partial(self._kill_after_apply, server, seconds)
        elif kind == "fail":
            self.failures.append(self.random.choice(("stage", "apply", "apply")))

    def _fault_of_api(self, kind: str, server: ServerModel, api: ApiServer, seconds: float) -> None:
        match kind:
            case "cut":
                self.schedule.trace(f"CUT {api.process.name}")
                api.link.cut()
            case "hold":
                self.schedule.trace(f"HOLD {api.process.name} for {seconds:g} s")
                api.link.hold(seconds)
            case "kill_api" if sum(other.process.alive for other in server.apis) == 1:
                server.kill()
                self._maybe_boot(server)
            case "kill_api":
                self.kill_process(api.process)
            case _:
                self.schedule.stop(api.process, seconds)

    def _kill_after_apply(self, server: ServerModel, seconds: float, leader: Caller) -> None:
        """Kill the API server that leads before it resets the caches, if another can take its place, and often the daemon."""
        if sum(api.process.alive for api in server.apis) > 1:
            self.kill_process(leader.process)
        if self.daemon.process.alive and self.random.random() < 0.7:
            self._kill_daemon(seconds)

    def _kill_daemon(self, seconds: float) -> None:
        self.daemon.kill(silent=self.random.random() < 0.3)
        self.schedule.after(seconds, None, self._start_daemon)

    def _maybe_boot(self, server: ServerModel) -> None:
        if self.random.random() < 0.6:
            self.schedule.after(0.1 + 3 * self.random.random(), None, server.boot)

    def _start_daemon(self) -> None:
        if not self.daemon.process.alive:
            self.schedule.trace("daemon starts")
            self.daemon.start()

    # The schedule

    def run(self) -> None:
        """Run the schedule to its end."""
        self._set_up()
        if self.random.random() < 0.7:
            self._arrive("boot", BOOT_BOUND)
        self._faults = True
        self.schedule.hazard = self.random.choice((0.0, 0.3, 1.0, 3.0))
        self.daemon.doubled = self.random.choice((0.0, 0.1))
        seconds = self.random.choice((3.0, 6.0))
        begin = self.schedule.now
        for _ in range(self.random.choice((0, 2, 4, 8, 12))):
            self.schedule.at(begin + seconds * self.random.random(), None, self._fault)
        for _ in range(self.random.choice((1, 3, 6))):
            self.schedule.at(begin + seconds * self.random.random(), None, self._publish)
        self._send_requests()
        self.schedule.run_until(begin + seconds)
        self._calm()
        self._arrive("peace", PEACE_BOUND)
        last = [self._send_to(api) for server in self.servers if server.alive for api in server.apis if api.process.alive]
        self.schedule.run_until(self.schedule.now + ANSWER_BOUND, lambda: all(r.answered or r.broken for r in self.requests))
        self.schedule.run_until(self.schedule.now + 2 * LEASE, lambda: not self._dead_but_live())
        self._check_end(last)

    def _set_up(self) -> None:
        strategy = resources_pb2.UpdateStrategy(kind=self.kind)
        if self.kind == resources_pb2.UpdateStrategy.ROLLING:
            strategy.at_a_time = 1
        self._publish()
        self.schedule.run_until(self.schedule.now + 0.1)
        mode = self.random.choice(_MODES)
        self._update(["strategy", "max_skew", "pause_mode"], strategy=strategy, max_skew=self.max_skew, pause_mode=mode)
        self.schedule.run_until(self.schedule.now + 0.1)
        self.schedule.trace(f"{resources_pb2.UpdateStrategy.Kind.Name(self.kind)}, skew {self.max_skew}, pause mode {mode}")
        for server in self.servers:
            self.schedule.after(self.random.random(), None, server.boot)

    def _calm(self) -> None:
        """End all faults: what is stopped continues, and what is dead returns or stays dead."""
        self.schedule.trace("peace")
        self._faults, self.schedule.hazard, self.daemon.doubled = False, 0.0, 0.0
        self.failures.clear()
        for core in [server.core for server in self.servers if server.core is not None]:
            core.when_applied = None
        self._start_daemon()
        if self.daemon.process.stopped:
            self.schedule.go_on(self.daemon.process)
            self.schedule.run_until(self.schedule.now + 0.02)  # earlier commands of the operator do not overtake those of peace
        for server in self.servers:
            for process in [api.process for api in server.apis] + ([server.core.process] if server.core else []):
                self.schedule.go_on(process)
            for api in server.apis:
                api.link.held_until = 0.0
            self._drain(server.id, False)
        self._set_power(Power.AWAKE)
        if not any(server.alive for server in self.servers):
            self.servers[0].boot()
        self._due = self.daemon.versions.last + 1
        self._publish()

    def _arrived(self) -> bool:
        if not self.daemon.process.alive or FLEET not in self.daemon.files.kept or not any(s.alive for s in self.servers):
            return False
        fleet, ready = self.fleet, self.daemon.versions.ready
        if self.published < self._due:
            return False
        move = fleet.moving
        if move is not None:
            if move.state == resources_pb2.Move.STOPPED and self.schedule.now >= self._decided + 1:
                self._decided = self.schedule.now
                request = operator_pb2.DecideMoveRequest(fleet=FLEET, go_on=True)
                self._ask(lambda: self.daemon.operations.decide(request))
            return False
        target = max((version for version in ready if version not in fleet.refused), default=0)
        if not target or fleet.settled != target:
            return False
        return all(server.at(target) for server in self.servers if server.alive)

    _decided = 0.0
    """Time at which the operator last let a stopped move go on."""

    def _arrive(self, what: str, bound: float) -> None:
        """Run until everything has arrived at its target, within a bound."""
        looked = 0.0

        def done() -> bool:
            nonlocal looked
            if self.schedule.now < looked + 0.1:
                return False
            looked = self.schedule.now
            return self._arrived()

        if not self.schedule.run_until(self.schedule.now + bound, done):
            self.schedule.fail(f"{what}: not at the target after {bound:g} s: {self._state()}")

    def _state(self) -> str:
        views = {view.server.id: view.reason for view in self.daemon.fleets.servers()}
        reason = self.daemon.fleets.fleet(FLEET).reason
        about = {
            api.process.name: (api.gate._position.value, api.gate.version, api.gate._reason)
            for server in self.servers
            for api in server.apis
            if api.process.alive
        }
        cores = {server.id: (server.core.installed, server.core.paused) for server in self.servers if server.core}
        return f"{views} {reason!r} {about} {cores} {self.fleet.moving}"

    def _dead_but_live(self) -> list[str]:
        """Return the dead servers that the daemon takes for live."""
        known = self.daemon.fleets.by_id
        return [s.id for s in self.servers if not s.alive and s.id in known and known[s.id].lost_at is None]

    def _check_end(self, last: list[Request]) -> None:
        if dead := self._dead_but_live():
            self.schedule.fail(f"the daemon takes dead servers for live: {dead}")
        for request in self.requests:
            if not request.answered and not request.broken:
                self.schedule.fail(f"{request.id} of {request.sent_at - 1000:.3f} s was not answered")
        for request in last:
            if request.status != 200:
                self.schedule.fail(f"{request.id}: expected an answer in peace, got {request.status}")
        for server in self.servers:
            for api in server.apis:
                if api.loop.errors and api.process.alive:
                    self.schedule.fail(f"{api.process.name}: {api.loop.errors[0]}")
        self.counts["requests"] += len(self.requests)
        self.counts["answered"] += sum(request.status == 200 for request in self.requests)
        self.counts["steps"] += self.schedule.steps
        self.counts["seconds"] += int(self.schedule.now - 1000)
        self.counts["installs"] += len(self.daemon.versions.ever)

    def close(self) -> None:
        """End all processes."""
        for api in self.apis:
            self.schedule.kill(api.process)
            api.loop.unwind()
        for server in self.servers:
            if server.core is not None:
                self.schedule.kill(server.core.process)
        self.schedule.kill(self.daemon.process)


def simulate_control_side(random: Random, trace: Callable[[str], None]) -> Counter[str]:
    """Run one schedule of control sides.

    Args:
        random: Determines the schedule.
        trace: Takes each line of the trace.

    Returns:
        Counts of what happened.

    Raises:
        AssertionError: An invariant is violated.
    """
    world = World(random, trace)
    with simulated_modules(world.schedule):
        try:
            Context().run(world.run)
        finally:
            world.close()
    return world.counts
