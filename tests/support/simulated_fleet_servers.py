"""Servers of one fleet under a simulated clock, and their rules: they start, die, are cut off, report and obey orders."""

import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Attachment, Fleets
from resharder.server.state.errors import DaemonError
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import ASLEEP, Settings, Worker
from resharder.server.state.server_events import Attached, Order, Reported
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import PauseMode, Power

from tests.support.simulated_store import MODEL, SimulatedFiles, SimulatedVersions
from tests.support.waits import completed

SETTINGS = Settings(lease=10, grace=10, boot=1000, install_step=200, attempts=2, first_retry=1, last_retry=2)
NAMES = ("a", "b", "c")
FLEET = "fleet"
HERE = "here"  # the host of all


@dataclass
class ServerModel:
    """A vLLM server as it really is: `holds` is None while its one worker's weights are torn or dropped."""

    id: str
    nonce: str
    holds: int | None
    held_as: str = ""
    differs: str = ""
    applied: str = ""  # the install that brought it
    ahead: bool = False  # what is staged comes from the ranks
    attachment: Attachment | None = None
    state: resources_pb2.Worker.State = resources_pb2.Worker.BOOTED
    install: str = ""
    staged: int = 0
    gate: int = 0
    paused: bool = False
    power: Power = Power.AWAKE
    lease_until: float = 0.0
    strict: bool = False
    cut: bool = False
    term: int = 0  # of the last order
    led: int = 0  # of the last LEAD
    answered: dict[str, bool] = field(default_factory=dict)

    def shows(self, now: float) -> int:
        """Return the version that a request receives now."""
        if self.strict and now >= self.lease_until:
            self.gate = 0
        return self.gate if self.power == Power.AWAKE and not self.paused else 0


class CheckedOrders(queue.SimpleQueue[Order | None]):
    """The orders of an attachment, each looked at when it is given."""

    def __init__(self, given: "queue.SimpleQueue[Order | None]", check: Callable[[Order | None], None]) -> None:
        super().__init__()
        self._check = check
        while not given.empty():
            super().put(given.get())

    def put(self, item: Order | None, block: bool = True, timeout: float | None = None) -> None:
        self._check(item)
        super().put(item)


class SimulatedServers(RuleBasedStateMachine):
    """A daemon's fleets, and the servers that follow one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.nonces = 1000.0, 0
        self.wall, self.booted = 1.7e9, 0.0  # the wall clock; when the daemon's host came up, by `now`
        self.versions, self.files = SimulatedVersions(), SimulatedFiles()
        self.plants: dict[str, ServerModel] = {}
        self.joins = False  # servers take what they stage over the direct path
        self.start_daemon()

    def start_daemon(self) -> None:
        self.versions.restart()
        self.fleets = Fleets(
            self.versions,
            self.versions,
            offers=self.versions,
            settings=SETTINGS,
            clock=lambda: self.now - self.booted,
            wall=lambda: self.wall,
            files=self.files,  # type: ignore[arg-type]
            tick_seconds=0,
        )
        self.operations = Operations(self.fleets)
        for plant in self.plants.values():
            plant.attachment = None

    @property
    def fleet(self) -> Fleet:
        return self.files.kept[FLEET]

    # Servers

    @rule(name=st.sampled_from(NAMES))
    def start_server(self, name: str) -> None:
        if name in self.plants:
            return
        try:
            server = completed(self.fleets.claim, name, MODEL, FLEET, wait_seconds=0, boot=True)
        except DaemonError:
            return
        self.nonces += 1
        assert server.boot_version in self.versions.ready, "servers boot from READY versions"
        fingerprint = self.versions.ready[server.boot_version]
        self.plants[name] = ServerModel(name, f"process{self.nonces}", server.boot_version, fingerprint)
        self.connect(name)

    @rule(name=st.sampled_from(NAMES))
    def kill_server(self, name: str) -> None:
        plant = self.plants.pop(name, None)
        if plant is not None and plant.attachment is not None and not plant.cut:
            plant.attachment.close()

    @rule(name=st.sampled_from(NAMES))
    def cut_off(self, name: str) -> None:
        if name in self.plants:
            self.plants[name].cut = True

    @rule(name=st.sampled_from(NAMES))
    def connect(self, name: str) -> None:
        plant = self.plants.get(name)
        if plant is None:
            return
        plant.cut = False
        if plant.attachment is not None:
            plant.attachment.close()
        completed(self.fleets.claim, name, MODEL, FLEET, wait_seconds=0, boot=False)
        self.report_state(plant)
        plant.lease_until = self.now + SETTINGS.lease
        attached = Attached(f"control-{plant.nonce}", 1, power=plant.power, serving=plant.shows(self.now))
        plant.attachment = self.fleets.attach(name, attached)
        plant.attachment.orders = CheckedOrders(plant.attachment.orders, self.check_order)

    def report_state(self, plant: ServerModel) -> None:
        """The worker's own report."""
        if plant.cut:
            return
        version = plant.staged if plant.state == resources_pb2.Worker.STAGED else plant.holds or 0
        error = "it failed" if plant.state == resources_pb2.Worker.FAILED else ""
        holding = plant.state in (resources_pb2.Worker.BOOTED, resources_pb2.Worker.APPLIED)
        self.report(plant, plant.state, version, plant.install, plant.differs if holding else error)

    def report(self, plant: ServerModel, state: resources_pb2.Worker.State, version: int, install: str, error: str) -> None:
        fingerprint = plant.held_as if plant.holds else ""
        worker = Worker(0, state, version, install, error, plant.nonce, fingerprint, memory="memory", direct=True, host=HERE)
        worker = replace(worker, joined=self.joins and bool(install))
        self.fleets.report_worker(plant.id, worker)

    @rule(name=st.sampled_from(NAMES))
    def compare(self, name: str) -> None:
        """A worker looks whether what it has from the ranks is in the store."""
        plant, versions = self.plants.get(name), self.versions
        if plant is None or plant.cut or plant.attachment is None or plant.differs or plant.holds not in versions.ready:
            return
        if plant.held_as != versions.sent_as(plant.holds):
            return
        if plant.holds in versions.changed:
            plant.differs = "other weights"
        else:
            plant.held_as = versions.ready[plant.holds]
        self.report(plant, resources_pb2.Worker.APPLIED, plant.holds, plant.applied, plant.differs)

    @rule(name=st.sampled_from(NAMES), fails=st.booleans())
    def carry_out(self, name: str, fails: bool) -> None:
        """The next order of a control side."""
        plant = self.plants.get(name)
        if plant is None or plant.cut or plant.attachment is None or plant.attachment.orders.empty():
            return
        order = plant.attachment.orders.get()
        if order is None:
            plant.attachment = None
            return
        assert order.term >= plant.term
        plant.term = order.term
        if order.kind == server_pb2.Order.LEAD:
            assert order.term > plant.led, "each LEAD begins a higher term"
            plant.led = order.term
        if order.kind == server_pb2.Order.RENEWED:
            plant.strict = self.fleets.policy(name)[1]
        elif order.kind != server_pb2.Order.LEAD:
            self.obey(plant, order, fails)

    def obey(self, plant: ServerModel, order: Order, fails: bool) -> None:
        ok, now = not fails, self.now
        match order.kind:
            case server_pb2.Order.STAGE:
                assert plant.power not in ASLEEP, "nothing is staged while asleep"
                plant.install, plant.staged, plant.ahead = order.install, order.version if ok else 0, bool(order.ahead_of)
                plant.state = resources_pb2.Worker.STAGED if ok else resources_pb2.Worker.FAILED
                self.report_state(plant)
                ok = True
            case server_pb2.Order.APPLY:
                if now >= plant.lease_until:
                    return self.connect(plant.id)
                assert plant.power not in ASLEEP, "nothing is applied while asleep"
                if plant.install != order.install or plant.staged != order.version:
                    if plant.answered.get(order.install) is None:
                        ok = False
                else:
                    self.check_service(plant)
                    plant.paused = True
                    plant.holds, plant.differs, plant.applied = order.version if ok else None, "", order.install
                    stored = self.versions.ready.get(order.version, "")
                    plant.held_as = self.versions.sent_as(order.version) if plant.ahead else stored
                    plant.state = resources_pb2.Worker.APPLIED if ok else resources_pb2.Worker.FAILED
                    plant.staged = 0
                    plant.answered[order.install] = ok
                    self.report_state(plant)
            case server_pb2.Order.RESUME:
                if now >= plant.lease_until:
                    return self.connect(plant.id)
                ok = True
                plant.paused, plant.gate = False, order.version
            case server_pb2.Order.CLOSE:
                plant.gate, ok = 0, True
            case server_pb2.Order.UNSTAGE:
                plant.staged, ok = 0, True
            case server_pb2.Order.SLEEP:
                plant.gate = 0
                if order.power == Power.ASLEEP_2:
                    plant.holds, plant.state, plant.install = None, resources_pb2.Worker.EMPTY, ""
                    self.report_state(plant)
                plant.power = order.power if ok else plant.power
            case server_pb2.Order.WAKE:
                plant.power = order.power if ok else plant.power
        if plant.cut or plant.attachment is None:
            return None
        report = Reported(f"control-{plant.nonce}", order.install, order.kind, ok, "" if ok else "no", power=plant.power)
        plant.attachment.report(report)
        return None

    def check_order(self, order: Order | None) -> None:
        """At the moment it is given."""
        if order is not None and order.kind == server_pb2.Order.APPLY:
            self.check_line()
        if order is None or order.kind not in (server_pb2.Order.STAGE, server_pb2.Order.RESUME):
            return
        fleet, version = self.fleet, order.version
        ahead = fleet.serves_ahead and version in self.versions.staging
        known = self.versions.ready if order.kind == server_pb2.Order.STAGE else self.versions.ever
        assert version in known or ahead, (
            f"{server_pb2.Order.Kind.Name(order.kind)}: what is staged or served anew is READY or to be"
        )
        if order.kind == server_pb2.Order.RESUME:
            return
        assert not order.ahead_of or order.ahead_of in self.versions.ready, "there is a READY version to fall back on"
        assert version in self.versions.ready or order.ahead_of, "what is not READY is staged as such"
        named = fleet.target.kind == resources_pb2.VersionTarget.NUMBER and fleet.target.version == version
        held = any(plant.holds == version for plant in self.plants.values())
        move = fleet.moving  # an operator may have sent it back to where it was rolled back from
        back = move is not None and move.state == resources_pb2.Move.BACK and move.back_to == version
        assert version not in fleet.refused or named or held or back, (
            f"a refused version is not installed again by itself: {fleet}"
        )

    def check_line(self) -> None:
        """When one more has been told to pause."""
        move, known = self.fleet.moving, [view.server for view in self.fleets.servers()]
        together = self.fleet.pause_mode == PauseMode.WAIT or (
            move is not None and move.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC
        )
        if together or not self.joins:
            return
        taking = [s.id for s in known if s.joined and s.install and s.install.state == resources_pb2.Install.APPLYING]
        late = [s.id for s in known if s.install and s.install.active and self.now - self.booted >= s.install.step_started + 20]
        assert len(set(taking) - set(late)) <= 2, f"two at a time pause for the direct path: {taking}, {late}"

    def check_service(self, plant: ServerModel) -> None:
        """A server that leaves service for an install: few enough are out of service for one."""
        move = self.fleet.moving
        rolling = self.kind == resources_pb2.UpdateStrategy.ROLLING and (
            move is None or move.strategy.kind == resources_pb2.UpdateStrategy.ROLLING
        )
        if not rolling or plant.shows(self.now) == 0:
            return
        away = [
            p
            for p in self.plants.values()
            if p is not plant and p.paused and not p.cut and p.attachment is not None and p.power == Power.AWAKE
            if p.id not in self.fleet.drained and self.fleet.power_of(p.id) == Power.AWAKE
        ]
        beside = [p.id for p in away]
        assert len(away) < self.at_a_time, f"at most so many at a time: {plant.id} beside {beside}, {self.reasons()}"

    def reasons(self) -> dict[str, str]:
        """Explanations of all servers and fleets."""
        return {view.server.id: view.reason for view in self.fleets.servers()} | {FLEET: self.fleets.fleet(FLEET).reason}
