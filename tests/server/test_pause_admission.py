"""Servers that take a version over the direct path pause when their turn is near, and not before.

The servers are those of tests/support/simulated_fleet.py.
"""

from collections.abc import Set
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.fleets.goals import held_back
from resharder.server.state.fleet import View
from resharder.server.state.server import Control, Install, Server, Settings, Worker
from resharder.server.state.server_events import Order
from resharder.v1 import operator_pb2, resources_pb2, server_pb2

from tests.support.simulated_fleet import FleetSimulation
from tests.support.simulated_fleet_servers import FLEET, NAMES


class Site(FleetSimulation):
    """Three servers on version 1, which are to take version 2 from trainers' memory."""

    def begin_move(self, kind: resources_pb2.UpdateStrategy.Kind = resources_pb2.UpdateStrategy.ALL_AT_ONCE) -> None:
        self.set_up(kind, 0, 3, approval=False, ahead=False)
        self.settle()
        self.joins = True
        self.publish()

    def stage(self, *names: str) -> None:
        for name in names:
            self.obey(self.plants[name], self.order(name, server_pb2.Order.STAGE), fails=False)

    def order(self, name: str, kind: server_pb2.Order.Kind) -> Order:
        """The next that is not about its lease."""
        attachment = self.plants[name].attachment
        assert attachment is not None
        while (order := attachment.orders.get_nowait()) is not None and order.kind in (
            server_pb2.Order.RENEWED,
            server_pb2.Order.LEAD,
        ):
            pass
        assert order is not None
        assert order.kind == kind
        return order

    def apply(self, name: str) -> None:
        self.obey(self.plants[name], self.order(name, server_pb2.Order.APPLY), fails=False)

    def applying(self) -> set[str]:
        servers = (view.server for view in self.fleets.servers())
        return {server.id for server in servers if server.install and server.install.state == resources_pb2.Install.APPLYING}

    def reason(self, name: str) -> str:
        return {view.server.id: view.reason for view in self.fleets.servers()}[name]


@pytest.fixture
def site() -> Site:
    return Site()


def test_no_more_than_two_pause_at_once_and_the_next_when_one_is_done(site: Site) -> None:
    site.begin_move()
    site.stage("c", "b", "a")
    assert site.applying() == {"b", "c"}
    assert site.reason("a") == "serving version 1; version 2 is staged; it waits for its turn on the direct path"
    assert site.plants["a"].shows(site.now) == 1
    site.apply("b")
    assert site.applying() == {"a", "c"}
    for _ in range(3):
        site.settle()
    assert {site.plants[name].shows(site.now) for name in NAMES} == {2}


def test_who_takes_it_from_the_store_waits_for_nobody(site: Site) -> None:
    site.begin_move()
    site.stage("a", "b")
    site.joins = False
    site.stage("c")
    assert site.applying() == set(NAMES)


def test_nobody_waits_for_one_that_does_not_come_back_from_its_pause(site: Site) -> None:
    site.begin_move()
    site.stage("a", "b", "c")
    assert site.applying() == {"a", "b"}
    for _ in range(5):  # both are silent about their installs, and keep their leases
        site.pass_time(5)
    assert site.applying() == {"a", "b", "c"}


def test_nobody_waits_for_one_that_is_staged_and_cut_off(site: Site) -> None:
    site.begin_move()
    site.stage("a", "b", "c")
    for name in ("a", "b"):
        site.cut_off(name)
        attachment = site.plants[name].attachment
        assert attachment is not None
        attachment.close()
    site.pass_time(1)
    assert "c" not in site.applying()  # theirs may be going on
    for _ in range(4):
        site.pass_time(5)
    assert "c" in site.applying()


def test_atomic_fleets_pause_all_together(site: Site) -> None:
    site.begin_move(resources_pb2.UpdateStrategy.ATOMIC)
    site.stage("a", "b")
    assert not site.applying()
    site.stage("c")
    assert site.applying() == set(NAMES)


def test_servers_that_first_answer_what_they_have_begun_to_do_so_all_together(site: Site) -> None:
    site.begin_move()
    fleet = resources_pb2.Fleet(name=FLEET, pause_mode=resources_pb2.WAIT)
    site.operations.update(operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask=FieldMask(paths=["pause_mode"])))
    site.stage("a", "b", "c")
    assert site.applying() == set(NAMES)


def test_one_that_fails_makes_room(site: Site) -> None:
    site.begin_move()
    site.stage("a", "b", "c")
    site.obey(site.plants["a"], site.order("a", server_pb2.Order.APPLY), fails=True)
    assert site.applying() == {"b", "c"}


def staged(id: str, **more: Any) -> Server:
    """Its one worker has joined a transfer of version 2."""
    install = Install(f"{id}-1", 2, resources_pb2.Install.STAGING, 100.0, 100.0)
    worker = Worker(0, resources_pb2.Worker.STAGED, 2, install.id, joined=True)
    known = Server(id, "policy", "fleet", "life", 100.0, world_size=1, controls=(Control("leader", "", 100.0),), opened=1)
    return replace(known, **{"install": install, "workers": {0: worker}, **more})


def waits(*servers: Server, at_once: int = 1) -> Set[str]:
    view = View({server.id: server for server in servers}, {1, 2}, 100.0, Settings(), at_once=at_once)
    return held_back(view)


def test_where_ranks_send_to_several_at_once_more_pause() -> None:
    five = [staged(id) for id in "abcde"]
    assert waits(*five) == {"c", "d", "e"}
    assert waits(*five, at_once=2) == {"e"}


def test_the_first_come_go_first_and_those_that_serve_nothing_before_them() -> None:
    assert waits(staged("a"), staged("b"), staged("c")) == {"c"}
    late = staged("a", install=Install("a-1", 2, resources_pb2.Install.STAGING, 101.0, 101.0))
    assert waits(late, staged("b"), staged("c")) == {"a"}
    assert waits(staged("a"), staged("b"), staged("c", opened=0)) == {"b"}


def test_who_cannot_pause_now_is_passed_over() -> None:
    busy = staged("a", controls=(Control("leader", "", 100.0, busy="another"),))
    assert waits(busy, staged("b"), staged("c")) == {"a"}
    assert waits(staged("a", controls=()), staged("b"), staged("c")) == {"a"}
    assert waits(staged("a", lost_at=99.0), staged("b"), staged("c")) == {"a"}


def test_who_has_staged_from_the_store_or_has_not_staged_takes_no_place() -> None:
    stored = staged("a", workers={0: Worker(0, resources_pb2.Worker.STAGED, 2, "a-1")})
    unready = staged("b", workers={0: Worker(0, resources_pb2.Worker.BOOTED, 1)})
    assert waits(stored, unready, staged("c"), staged("d")) == {"b"}
    assert waits(stored, unready, staged("c")) == set()


def test_servers_out_of_service_go_before_those_that_staged_earlier() -> None:
    late = staged("c", opened=0, install=Install("c-1", 2, resources_pb2.Install.STAGING, 109.0, 109.0))
    assert waits(staged("a"), staged("b"), late) == {"b"}


def test_a_pause_of_20_seconds_takes_no_place_any_longer() -> None:
    def pausing(id: str, began: float) -> Server:
        return staged(id, install=Install(f"{id}-1", 2, resources_pb2.Install.APPLYING, began, began))

    idle = staged("e", install=None, workers={})
    assert waits(pausing("a", 80.1), pausing("b", 80.1), staged("c"), idle) == {"c"}
    assert waits(pausing("a", 80.0), pausing("b", 80.1), staged("c"), staged("d"), idle) == {"d"}
