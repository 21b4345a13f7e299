"""Servers that end for a version of another config, to be started again: each in its turn, and the fleet waits for it."""

from dataclasses import replace

from resharder.server.fleets.explain import explain, state_of
from resharder.server.fleets.goals import goals
from resharder.server.fleets.reconciler.step import step
from resharder.server.fleets.updates import advance
from resharder.server.state.server import Goal, Server
from resharder.server.state.server_events import Attached, Claimed, Detached, Order, Reported, Ticked, VersionsChanged, Wanted
from resharder.v1 import resources_pb2, server_pb2

from tests.support.fleet_states import moving, server, view
from tests.support.reconciler_versions import SETTINGS, report_worker, serving, versions

WHY = "rope_theta is 500000.0 in the version, 10000.0 here"


def staging(boot: int | None = None) -> tuple[Server, Order]:
    """It serves version 1 and is to stage version 2; processes that start now boot version `boot`."""
    known, _ = step(serving(1), Wanted(Goal(version=1, boot=boot)), 1, SETTINGS)
    known, _ = step(known, VersionsChanged(versions(1, 2)), 1, SETTINGS)
    known, orders = step(known, Wanted(Goal(version=2, boot=boot)), 1, SETTINGS)
    (order,) = orders
    assert order.kind == server_pb2.Order.STAGE
    return known, order


def restarting() -> tuple[Server, tuple[Order, ...]]:
    known, order = staging()
    return step(known, Reported("a", order.install, server_pb2.Order.STAGE, ok=False, error=WHY, restarting=True), 2, SETTINGS)


def test_an_order_to_stage_says_whether_a_process_that_starts_now_boots_the_version() -> None:
    assert not staging()[1].boots_another
    assert not staging(boot=2)[1].boots_another
    assert staging(boot=1)[1].boots_another, "a canary's version, or one that all stage before any applies"


def test_a_server_that_restarts_is_closed_gets_no_orders_and_has_not_failed() -> None:
    ending, orders = restarting()
    assert [order.kind for order in orders] == [server_pb2.Order.RENEWED, server_pb2.Order.CLOSE]
    assert (ending.opened, ending.failures, ending.restarts) == (0, {}, True)
    assert ending.install is not None
    assert (ending.install.state, ending.install.error) == (resources_pb2.Install.FAILED, WHY)
    assert explain(ending, 3, SETTINGS) == f"not serving; it is ending, to start again with the version's config: {WHY}"
    for event in (Ticked(), Reported("a", leaving=True), Detached("a"), Ticked()):
        ending, orders = step(ending, event, 30, SETTINGS)
        assert [order for order in orders if order.kind not in (server_pb2.Order.RENEWED, server_pb2.Order.CLOSE)] == []
    assert (ending.left, ending.lost_at) == (False, None)
    assert state_of(ending) == resources_pb2.Server.BOOTING


def test_it_boots_the_version_and_restarts_until_it_serves() -> None:
    ending, _ = step(restarting()[0], Detached("a"), 3, SETTINGS)
    again, _ = step(ending, Claimed(boot=True, renews=True), 40, SETTINGS)
    assert (again.boot_version, again.restarts, again.ending) == (2, True, False)
    for rank in range(2):
        again = report_worker(again, rank, resources_pb2.Worker.BOOTED, 2, "", process=f"new {rank}")
    again, orders = step(again, Attached("b", 2), 50, SETTINGS)
    assert again.restarts
    (resume,) = (order for order in orders if order.kind == server_pb2.Order.RESUME)
    again, _ = step(again, Reported("b", resume.install, server_pb2.Order.RESUME), 51, SETTINGS)
    assert (again.serving, again.restarts) == (2, False)


def test_one_that_does_not_come_back_is_lost_and_no_longer_waited_for() -> None:
    ending, _ = step(restarting()[0], Detached("a"), 3, SETTINGS)
    lost, _ = step(ending, Ticked(), 3 + SETTINGS.boot, SETTINGS)
    assert (lost.lost_at, lost.restarts) == (3 + SETTINGS.boot, False)


def test_a_control_side_that_did_not_end_gets_its_orders_again() -> None:
    ending, _ = step(restarting()[0], Detached("a"), 3, SETTINGS)
    again, orders = step(ending, Attached("a", 2), 4, SETTINGS)
    assert not again.ending
    assert server_pb2.Order.STAGE in [order.kind for order in orders]


def test_a_rolling_move_waits_for_a_server_that_restarts_before_the_next_one() -> None:
    move = moving(resources_pb2.Move.MOVING, resources_pb2.UpdateStrategy.ROLLING, at_a_time=1, counted=frozenset("abc"))
    away = server("a", opened=0, resumed=False, controls=(), ending=True, restarts=True)
    seen = view([away, server("b"), server("c")])
    assert [goals(move, seen)[id].version for id in ("b", "c")] == [1, 1]
    assert advance(move, seen) == move
    arrived = view([server("a", 2), server("b"), server("c")])
    after = advance(move, arrived)
    assert [goals(after, arrived)[id].version for id in ("b", "c")] == [2, 1]
    last = view([server("a", 2), server("b", 2), replace(away, id="c")])
    known = advance(advance(move, last), last)
    assert known.move is not None
    assert known.move.state == resources_pb2.Move.MOVING, "the last one counts too"
