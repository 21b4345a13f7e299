"""Fleets under a simulated clock: the daemon's own fleets, with a store, files and servers in memory.

Servers are models that keep the plugin's side of the protocol. Invariants concern what their gates show to clients, not
the daemon's view.
"""

from collections.abc import Callable

import hypothesis.strategies as st
from google.protobuf.field_mask_pb2 import FieldMask
from hypothesis.stateful import initialize, invariant, precondition, rule
from resharder.server.fleets.commands import SERVE_AHEAD
from resharder.server.state.errors import DaemonError
from resharder.server.state.server_events import Reported
from resharder.v1 import operator_pb2, resources_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.simulated_fleet_servers import FLEET, HERE, NAMES, SETTINGS, SimulatedServers
from tests.support.simulated_store import MODEL


class FleetSimulation(SimulatedServers):
    """Time, versions, operators and the daemon's restarts; what always holds."""

    @initialize(
        kind=st.sampled_from(resources_pb2.UpdateStrategy.Kind.values()[1:]),
        max_skew=st.sampled_from([0, 0, 1, 2]),
        at_a_time=st.integers(1, 2),
        approval=st.booleans(),
        ahead=st.sampled_from([None, True, False]),
    )
    def begin(
        self, kind: resources_pb2.UpdateStrategy.Kind, max_skew: int, at_a_time: int, approval: bool, ahead: bool | None
    ) -> None:
        self.set_up(kind, max_skew, at_a_time, approval, ahead)

    def set_up(
        self, kind: resources_pb2.UpdateStrategy.Kind, max_skew: int, at_a_time: int, approval: bool, ahead: bool | None
    ) -> None:
        self.versions.publish()
        strategy = resources_pb2.UpdateStrategy(kind=int(kind))  # type: ignore[arg-type]
        if kind in (resources_pb2.UpdateStrategy.ROLLING, resources_pb2.UpdateStrategy.CANARY):
            strategy.at_a_time = at_a_time
        if kind == resources_pb2.UpdateStrategy.CANARY:
            strategy.hold_seconds, strategy.approval = 5, approval
        self.kind, self.max_skew, self.at_a_time = kind, max_skew, at_a_time
        fleet = resources_pb2.Fleet(name=FLEET, model=MODEL, strategy=strategy, max_skew=max_skew)
        mask = FieldMask(paths=["strategy", "max_skew"])
        self.operations.update(operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask=mask))
        self.serve_ahead(ahead)
        for name in NAMES:
            self.start_server(name)

    @rule(seconds=st.sampled_from([0.5, 1, 3, 6, 12, 30]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        for plant in self.plants.values():
            if not plant.cut and plant.attachment is not None and seconds <= SETTINGS.lease:
                plant.attachment.report(Reported(f"control-{plant.nonce}", power=plant.power))
                if self.fleets.server(plant.id).controls:
                    plant.lease_until = self.now + SETTINGS.lease
        self.fleets.tick()

    @rule(joins=st.booleans())
    def join(self, joins: bool) -> None:
        self.joins = joins

    @rule()
    def publish(self) -> None:
        self.versions.publish()
        self.fleets.tick()

    @precondition(lambda self: len(self.versions.staging) < 2)
    @rule(host=st.sampled_from(["", HERE, "another"]))
    def begin_version(self, host: str = HERE) -> None:
        self.versions.begin(host)
        self.fleets.tick()

    @precondition(lambda self: self.versions.staging)
    @rule(changed=st.booleans())
    def complete_version(self, changed: bool) -> None:
        self.versions.complete(min(self.versions.staging), changed)
        self.fleets.tick()

    @precondition(lambda self: self.versions.staging)
    @rule(data=st.data())
    def abort_version(self, data: st.DataObject) -> None:
        self.versions.abort(data.draw(st.sampled_from(sorted(self.versions.staging))))
        self.fleets.tick()

    @rule(ahead=st.sampled_from([None, True, False]))
    def serve_ahead(self, ahead: bool | None) -> None:
        setting = next(value for value, on in SERVE_AHEAD.items() if on is ahead)
        fleet = resources_pb2.Fleet(name=FLEET, serve_ahead_setting=setting)  # type: ignore[arg-type]
        request = operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask=FieldMask(paths=["serve_ahead_setting"]))
        self.ask(lambda: self.operations.update(request))

    @rule()
    def restart_daemon(self) -> None:
        self.start_daemon()

    @rule()
    def reboot(self) -> None:
        """The daemon's host starts again, and with it the monotonic clock."""
        self.booted = self.now
        self.start_daemon()

    @rule(seconds=st.sampled_from([-3e8, -3e7, -86400, -30, 30, 86400, 3e7]))
    def set_wall_clock(self, seconds: float) -> None:
        self.wall += seconds
        self.fleets.tick()

    @rule(data=st.data(), kind=st.sampled_from(resources_pb2.VersionTarget.Kind.values()[1:]), every=st.sampled_from([0, 0, 20]))
    def want(self, data: st.DataObject, kind: resources_pb2.VersionTarget.Kind, every: float) -> None:
        want = resources_pb2.VersionTarget(kind=int(kind))  # type: ignore[arg-type]
        if kind == resources_pb2.VersionTarget.NUMBER:
            want.version = data.draw(st.sampled_from(sorted(self.versions.ever)))
        if kind == resources_pb2.VersionTarget.LATEST:
            want.every_seconds = every
        request = operator_pb2.UpdateFleetRequest(
            fleet=resources_pb2.Fleet(name=FLEET, target=want), update_mask=FieldMask(paths=["target"])
        )
        self.ask(lambda: self.operations.update(request))

    def ask(self, act: Callable[[], object]) -> None:
        """An operator's request; a refusal is an answer too, and what was granted is on the medium."""
        try:
            act()
        except DaemonError:
            return

    @rule()
    def roll_back(self) -> None:
        self.ask(lambda: self.operations.roll_back(operator_pb2.RollBackFleetRequest(fleet=FLEET)))

    @rule(go_on=st.booleans())
    def decide(self, go_on: bool) -> None:
        self.ask(lambda: self.operations.decide(operator_pb2.DecideMoveRequest(fleet=FLEET, go_on=go_on)))

    @rule(power=st.sampled_from([Power.AWAKE, Power.WEIGHTS_AWAKE, Power.ASLEEP_1, Power.ASLEEP_2]), one=st.booleans())
    def set_power(self, power: Power, one: bool) -> None:
        request = operator_pb2.SetPowerRequest(fleet=FLEET, power=int(power), server="servers/a" if one else "")  # type: ignore[arg-type]
        self.ask(lambda: self.operations.set_power(request))

    @rule(name=st.sampled_from(NAMES), drained=st.booleans())
    def drain(self, name: str, drained: bool) -> None:
        request = operator_pb2.SetDrainedRequest(fleet=FLEET, server=f"servers/{name}", drained=drained)
        self.ask(lambda: self.operations.set_drained(request))

    @rule(name=st.sampled_from(NAMES))
    def profile(self, name: str) -> None:
        self.ask(lambda: self.fleets.reinstall(name))

    @precondition(lambda self: self.plants)
    @rule(rounds=st.integers(1, 4))
    def all_goes_well(self, rounds: int) -> None:
        for _ in range(rounds):
            self.settle()

    def settle(self) -> None:
        for name in NAMES:
            if name in self.plants and self.plants[name].attachment is None and not self.plants[name].cut:
                self.connect(name)
            for _ in range(12):
                self.carry_out(name, fails=False)
                self.check_gates()
            self.compare(name)
        self.pass_time(1)

    # What always holds

    @invariant()
    def check_gates(self) -> None:
        shown = {id: version for id, plant in self.plants.items() if (version := plant.shows(self.now))}
        confirmed = {view.server.id: view.server.serving for view in self.fleets.servers()}
        for id, version in shown.items():
            assert self.plants[id].holds == version, "nothing is served from torn or dropped weights"
            sent = version in self.versions.staging | self.versions.aborted
            assert version in self.versions.ever or sent, "what is served was READY, or offered"
            sent |= self.plants[id].held_as == self.versions.sent_as(version)  # until it has been compared
            if not sent and confirmed.get(id) == version and not self.plants[id].cut:
                assert version in self.versions.ready, "nothing in use is dropped"
        versions = set(shown.values())
        if self.plants and self.kind == resources_pb2.UpdateStrategy.ATOMIC:
            assert len(versions) <= 1, f"an atomic fleet serves one version: {shown}, {self.reasons()}"
        elif self.plants and self.max_skew:
            assert not versions or max(versions) - min(versions) <= self.max_skew, (
                f"the skew bound is kept: {shown}, {self.reasons()}"
            )

    def teardown(self) -> None:
        """Left in peace, every fleet gets where it should be."""
        if not self.files.kept:
            return
        self.set_power(Power.AWAKE, one=False)
        for name in NAMES:
            self.drain(name, drained=False)
        for name in NAMES:
            self.start_server(name)
            self.connect(name)
        for i, number in enumerate(sorted(self.versions.staging)):
            self.versions.complete(number, changed=i == 0)
            self.fleets.tick()
        for _ in range(60):
            self.settle()
            move = self.fleet.moving
            if move is not None and (move.state == resources_pb2.Move.STOPPED or (move.strategy.approval and not move.approved)):
                self.decide(go_on=True)
        want = self.fleet.target
        fleet = self.fleet
        assert fleet.moving is None, f"the move ends: {self.reasons()}"
        goal = fleet.settled
        if want.kind == resources_pb2.VersionTarget.LATEST:
            assert goal == max((v for v in self.versions.ready if v not in fleet.refused), default=goal)
        shown = {name: plant.shows(self.now) for name, plant in self.plants.items()}
        assert shown == dict.fromkeys(NAMES, goal), f"every server serves version {goal}: {shown}, {self.reasons()}"
        held = {name: plant.held_as for name, plant in self.plants.items()}
        assert held == dict.fromkeys(NAMES, self.versions.ready[goal]), f"and what the store has of it: {held}, {self.reasons()}"


class AheadSimulation(FleetSimulation):
    """A fleet that takes versions before they are READY, and does what it is told more often than not."""

    @initialize()
    def begin(self) -> None:  # type: ignore[override]
        self.set_up(resources_pb2.UpdateStrategy.ALL_AT_ONCE, 0, 1, approval=False, ahead=True)

    @precondition(lambda self: len(self.versions.staging) < 2)
    @rule(rounds=st.integers(0, 2))
    def begin_well(self, rounds: int) -> None:
        self.begin_version()
        for _ in range(rounds):
            self.settle()
