"""A server that is lost in a move is named by it, whatever died, when, and however the fleet moves.

The fleets are the daemon's own, under a simulated clock, with three servers. Each cell of the table is a test: strategy, what
dies, and when. With real processes: `tests/e2e/test_lost_servers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.state.fleet import Fleet, Move
from resharder.server.state.server import Server
from resharder.server.state.server_events import Reported
from resharder.v1 import operator_pb2, resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.simulated_fleet import FleetSimulation
from tests.support.simulated_fleet_servers import FLEET, NAMES, SETTINGS

ALL, ROLLING, CANARY, ATOMIC = resources_pb2.UpdateStrategy.Kind.values()[1:]
DEATHS = {
    # As the daemon sees them: what the API server reports last, and whether the connection is closed.
    "worker": ("its engine died", True),
    "engine core": ("its engine core ended with code -9", True),
    "API server": ("", True),
    "host": ("", False),
}
MOMENTS = ("staging", "applying", "resuming", "between")


@dataclass
class Site:
    """Three servers that serve version 1, and what is done to them."""

    fleets: FleetSimulation

    @property
    def fleet(self) -> Fleet:
        return self.fleets.fleet

    @property
    def move(self) -> Move:
        assert self.fleet.move is not None
        return self.fleet.move

    def known(self, name: str) -> Server:
        return self.fleets.fleets.server(name)

    def states(self) -> dict[str, str]:
        views = self.fleets.fleets.servers()
        return {view.server.id: resources_pb2.Server.State.Name(view.state) for view in views}  # type: ignore[arg-type]

    def serving(self) -> dict[str, int]:
        return {view.server.id: view.server.serving for view in self.fleets.fleets.servers()}

    def go_on(self, rounds: int = 16) -> None:
        """Time passes, and all servers that live do what they are told."""
        for _ in range(rounds):
            for name in self.fleets.plants:
                for _ in range(12):
                    self.fleets.carry_out(name, fails=False)
            self.fleets.pass_time(1)

    def wait(self) -> None:
        """A lease ends before the other servers have done anything."""
        for _ in range(int(SETTINGS.lease) + 1):
            self.fleets.pass_time(1)

    def begin_install(self, moment: str) -> str:
        """The server that is at this moment of an install, or of the server's time in the move beside its install."""
        if moment == "between":
            return self.arrive_first()
        for _ in range(200):
            for name in NAMES:
                if self.is_at(name, moment):
                    return name
            for name in NAMES:
                self.fleets.carry_out(name, fails=False)
            self.fleets.pass_time(0.5)
        raise AssertionError(f"no server comes to {moment}: {self.fleets.reasons()}")

    def arrive_first(self) -> str:
        """The server that has done its part of the move, while the others have not begun or go on with theirs."""
        for _ in range(50):
            self.fleets.carry_out("a", fails=False)
            if 2 in (self.known("a").serving, self.known("a").staged):
                return "a"
        raise AssertionError(f"a does not arrive: {self.fleets.reasons()}")

    def is_at(self, name: str, moment: str) -> bool:
        install, server = self.known(name).install, self.known(name)
        if install is None or install.version != 2:
            return False
        if moment == "resuming":
            return install.state == resources_pb2.Install.COMMITTED and not server.resumed
        return install.state == resources_pb2.Install.State.Value(moment.upper())

    def die(self, name: str, what: str) -> None:
        """The server's end; its lease may go on."""
        failure, closes = DEATHS[what]
        plant = self.fleets.plants.pop(name)
        assert plant.attachment is not None
        if failure:
            plant.attachment.report(Reported(f"control-{plant.nonce}", failure=failure, power=plant.power))
        if closes:
            plant.attachment.close()

    def leave(self, name: str) -> None:
        """SIGTERM to a server."""
        plant = self.fleets.plants.pop(name)
        assert plant.attachment is not None
        plant.attachment.report(Reported(f"control-{plant.nonce}", leaving=True, power=plant.power))
        plant.attachment.close()


@pytest.fixture
def make() -> Callable[..., Site]:
    def made(kind: resources_pb2.UpdateStrategy.Kind, max_failures: int = 0) -> Site:
        fleets = FleetSimulation()
        fleets.set_up(kind, 0, 1, approval=False, ahead=False)
        if max_failures:
            strategy = resources_pb2.UpdateStrategy(kind=int(kind), at_a_time=1, max_failures=max_failures)  # type: ignore[arg-type]
            request = operator_pb2.UpdateFleetRequest(
                fleet=resources_pb2.Fleet(name=FLEET, strategy=strategy), update_mask=FieldMask(paths=["strategy"])
            )
            fleets.operations.update(request)
        site = Site(fleets)
        site.go_on(14)  # the time after its start in which a daemon awaits its servers
        assert site.serving() == dict.fromkeys(NAMES, 1)
        return site

    return made


EXPECTED = {
    ALL: (resources_pb2.Move.STOPPED, 2),
    ROLLING: (resources_pb2.Move.STOPPED, 1),  # the others stay where they are
    CANARY: (resources_pb2.Move.FAILED, 1),
    ATOMIC: (resources_pb2.Move.FAILED, 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", DEATHS)
@pytest.mark.parametrize("kind", resources_pb2.UpdateStrategy.Kind.values()[1:], ids=resources_pb2.UpdateStrategy.Kind.Name)
def test_a_move_that_loses_a_server_names_it_and_is_not_done(
    make: Callable[..., Site], kind: resources_pb2.UpdateStrategy.Kind, what: str, moment: str
) -> None:
    site = make(kind)
    site.fleets.publish()
    victim = site.begin_install(moment)
    site.die(victim, what)
    if what == "host" or moment == "between":
        site.wait()
    site.go_on()
    assert site.states()[victim] == "LOST"
    state, version = EXPECTED[kind]
    if (kind, what, moment) == (CANARY, "host", "between"):
        state = resources_pb2.Move.STOPPED  # the canary's hold ends before its lease
    assert site.move.state == state, site.fleets.reasons()
    assert victim in site.move.reason
    if kind == CANARY and state == resources_pb2.Move.FAILED:
        assert site.move.reason.startswith(f"canary servers/{victim} was lost while it installed version {site.move.to}")
    assert victim in site.move.failed or state == resources_pb2.Move.FAILED
    others = {name: found for name, found in site.serving().items() if name != victim}
    assert others == dict.fromkeys(others, version)


@pytest.mark.parametrize("moment", ["staging", "applying"])
@pytest.mark.parametrize("what", DEATHS)
def test_a_rolling_move_stops_at_the_first_server_that_does_not_arrive(make: Callable[..., Site], what: str, moment: str) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    victim = site.begin_install(moment)
    site.die(victim, what)
    site.go_on()
    assert site.move.state == resources_pb2.Move.STOPPED
    assert site.move.failed.keys() == {victim}
    assert {name: v for name, v in site.serving().items() if name != victim} == {n: 1 for n in NAMES if n != victim}


@pytest.mark.parametrize("what", DEATHS)
def test_a_rolling_move_stops_when_a_server_dies_that_waits_for_its_turn(make: Callable[..., Site], what: str) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    assert site.begin_install("staging") == "a"
    site.die("c", what)
    site.go_on()
    assert site.move.state == resources_pb2.Move.STOPPED
    assert site.move.failed.keys() == {"c"}


def test_a_rolling_move_counts_the_first_failed_attempt(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    victim = site.begin_install("applying")
    site.fleets.carry_out(victim, fails=True)
    while site.known(victim).install.state == resources_pb2.Install.APPLYING:  # type: ignore[union-attr]
        site.fleets.carry_out(victim, fails=True)
    site.go_on()
    assert site.move.state == resources_pb2.Move.STOPPED
    assert site.serving() == dict.fromkeys(NAMES, 1)


def test_a_rolling_move_that_may_fail_twice_is_not_done_without_the_one_that_it_lost(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=2)
    site.fleets.publish()
    victim = site.begin_install("staging")
    site.die(victim, "engine core")
    site.go_on()
    assert site.move.state == resources_pb2.Move.STOPPED
    assert site.move.reason == f"1 of 3 servers is missing: servers/{victim}: its engine core ended with code -9"
    assert {name: v for name, v in site.serving().items() if name != victim} == {n: 2 for n in NAMES if n != victim}


def test_nothing_moves_while_it_is_not_known_whether_a_server_is_lost(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=2)
    site.fleets.publish()
    victim = site.begin_install("staging")
    site.die(victim, "API server")
    site.go_on(int(SETTINGS.lease) - 2)
    assert site.states()[victim] != "LOST"
    assert {name: v for name, v in site.serving().items() if name != victim} == {n: 1 for n in NAMES if n != victim}


def test_a_server_that_crashes_and_is_back_within_its_lease_has_failed_all_the_same(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    victim = site.begin_install("applying")
    site.die(victim, "API server")
    site.fleets.pass_time(1)
    site.fleets.start_server(victim)
    site.go_on()
    assert site.move.state == resources_pb2.Move.STOPPED
    assert "it ended while it installed version 2" in site.move.failed[victim]
    assert {name: v for name, v in site.serving().items() if name != victim} == {n: 1 for n in NAMES if n != victim}


@pytest.mark.parametrize("moment", ["staging", "applying", "resuming"])
def test_a_server_that_is_terminated_in_an_install_has_not_left(make: Callable[..., Site], moment: str) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    victim = site.begin_install(moment)
    site.leave(victim)
    site.go_on()
    assert site.states()[victim] == "LOST"
    assert site.move.state == resources_pb2.Move.STOPPED
    assert site.move.failed == {victim: "it ended while it installed version 2"}


def test_a_server_that_leaves_by_order_is_not_missing(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    site.begin_install("staging")
    site.leave("c")
    site.go_on()
    assert site.move.state == resources_pb2.Move.DONE
    assert site.serving() == {"a": 2, "b": 2}


def test_a_drained_server_leaves_also_in_an_install(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    victim = site.begin_install("staging")
    site.fleets.drain(victim, drained=True)
    site.leave(victim)
    site.go_on()
    assert site.move.state == resources_pb2.Move.DONE
    assert victim not in site.serving()


def stopped_short(make: Callable[..., Site]) -> Site:
    site = make(ALL)
    site.fleets.publish()
    site.begin_install("staging")
    site.die("a", "worker")
    site.go_on()
    assert (site.move.state, site.move.short) == (resources_pb2.Move.STOPPED, True)
    return site


def test_a_move_that_stopped_without_a_server_is_done_when_it_is_back(make: Callable[..., Site]) -> None:
    site = stopped_short(make)
    site.fleets.start_server("a")
    assert site.fleets.plants["a"].holds == 2, "it boots from where the others are"
    site.go_on()
    assert (site.move.state, site.move.reason, dict(site.move.failed)) == (resources_pb2.Move.DONE, "", {})
    assert site.serving() == dict.fromkeys(NAMES, 2)


def test_a_move_that_stopped_without_a_server_goes_back_when_told_to(make: Callable[..., Site]) -> None:
    site = stopped_short(make)
    site.fleets.decide(go_on=False)
    site.fleets.start_server("a")
    assert site.fleets.plants["a"].holds == 1, "it boots from where the others go"
    site.go_on()
    assert site.move.state == resources_pb2.Move.FAILED
    assert site.serving() == dict.fromkeys(NAMES, 1)


@pytest.mark.parametrize("act", ["forget", "approve"])
def test_an_operator_ends_a_move_without_the_server_that_is_missing(make: Callable[..., Site], act: str) -> None:
    site = stopped_short(make)
    site.fleets.fleets.forget("a") if act == "forget" else site.fleets.decide(go_on=True)
    site.go_on(2)
    assert site.move.state == resources_pb2.Move.DONE
    assert site.serving() == {"b": 2, "c": 2} | ({} if act == "forget" else {"a": 0})


def test_the_next_version_takes_the_servers_that_are_left(make: Callable[..., Site]) -> None:
    site = stopped_short(make)
    site.fleets.publish()
    site.go_on()
    assert (site.move.to, site.move.state) == (3, resources_pb2.Move.DONE)


def test_a_server_lost_on_the_way_to_a_version_that_another_replaces_is_missing_at_the_end(make: Callable[..., Site]) -> None:
    site = make(ALL)
    site.fleets.publish()
    site.begin_install("applying")
    site.die("a", "worker")
    site.fleets.publish()
    site.go_on()
    assert (site.move.to, site.move.state) == (3, resources_pb2.Move.STOPPED)
    assert "a" in site.move.reason


def test_a_server_that_was_lost_before_a_move_does_not_stop_it(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.die("b", "host")
    site.go_on(15)
    site.fleets.publish()
    site.go_on()
    assert site.move.state == resources_pb2.Move.DONE
    assert site.states()["b"] == "LOST"


def test_a_move_goes_on_after_a_restart_of_the_daemon_and_misses_who_does_not_come_back(make: Callable[..., Site]) -> None:
    site = make(ALL)
    site.fleets.publish()
    victim = site.begin_install("staging")
    site.die(victim, "host")
    site.fleets.restart_daemon()
    for name in site.fleets.plants:
        site.fleets.connect(name)
    site.go_on()
    assert site.states()[victim] == "LOST"
    assert site.move.state == resources_pb2.Move.STOPPED
    assert "it has not come back since the daemon's restart" in site.move.reason


@pytest.mark.parametrize("what", DEATHS)
@pytest.mark.parametrize("power", [Power.ASLEEP_1, Power.ASLEEP_2])
def test_a_server_that_is_lost_on_its_way_to_sleep_is_lost(make: Callable[..., Site], what: str, power: Power) -> None:
    site = make(ALL)
    site.fleets.set_power(power, one=False)
    while site.known("a").change is None:
        site.fleets.carry_out("a", fails=False)
    site.die("a", what)
    site.go_on(15)
    assert site.states() == {"a": "LOST", "b": "ASLEEP", "c": "ASLEEP"}


@pytest.mark.parametrize("order", [server_pb2.Order.SLEEP, server_pb2.Order.WAKE])
def test_a_server_that_is_terminated_on_its_way_to_sleep_or_awake_has_not_left(
    make: Callable[..., Site], order: server_pb2.Order.Kind
) -> None:
    site = make(ALL)
    site.fleets.set_power(Power.ASLEEP_1, one=False)
    if order == server_pb2.Order.WAKE:
        site.go_on(3)
        site.fleets.set_power(Power.AWAKE, one=False)
    while site.known("a").change is None:
        site.fleets.carry_out("a", fails=False)
    site.leave("a")
    reasons = site.fleets.reasons()
    assert site.states()["a"] == "LOST"
    assert "it ended while it changed its power" in reasons["a"]


def test_a_server_asleep_by_order_is_not_missing(make: Callable[..., Site]) -> None:
    site = make(ROLLING, max_failures=1)
    site.fleets.publish()
    site.begin_install("staging")
    site.fleets.set_power(Power.ASLEEP_1, one=True)
    site.go_on(3)
    site.die("a", "host")
    site.go_on()
    assert site.move.state == resources_pb2.Move.DONE


def test_a_fleet_that_moves_has_counted_servers_on_its_medium(make: Callable[..., Site]) -> None:
    site = make(ROLLING)
    site.fleets.publish()
    found: Any = site.fleets.files.kept[FLEET].move
    assert found.counted == frozenset(NAMES)
