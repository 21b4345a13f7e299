"""Goals of servers: one table for each phase of a move, then turns, gates and boots."""

from dataclasses import replace
from typing import Any

import pytest
from resharder.server.fleets.goals import boots, goals
from resharder.server.state.fleet import NOBODY, Fleet, VersionTarget, View
from resharder.server.state.server import Goal, Server, Worker
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import BaseBinding, PauseMode, Power

from tests.support.fleet_states import NOW, failed, fleet, install, moving, out_of_service, server, view

ALL, ROLLING, CANARY, ATOMIC = resources_pb2.UpdateStrategy.Kind.values()[1:]
STAGING, APPLYING, TRYING, HOLDING, MOVING, BACK, STOPPED, DONE, FAILED = resources_pb2.Move.State.values()[1:]
WAITS = "it waits for its turn"


def part(known: Fleet, seen: View, id: str = "a") -> tuple[int | None, bool, str]:
    goal = goals(known, seen)[id]
    assert (type(goal.version), type(goal.apply)) == (int, bool)  # 1 equals True
    return goal.version, goal.apply, goal.why


def test_a_goal_has_what_the_fleet_has_set_for_the_server() -> None:
    known = fleet(drained=frozenset({"b"}), powers={"a": Power.ASLEEP_2}, max_skew=3)
    found = goals(known, view([server("a"), server("b")]))
    first = Goal(1, 1, True, (-2, 4), True, Power.ASLEEP_2, True, (0, 0), "")
    assert found == {"a": first, "b": replace(first, open=False, power=Power.AWAKE)}
    moves = goals(moving(MOVING, tries=2), view([server("a")]))["a"]
    assert moves == Goal(2, 2, True, None, True, Power.AWAKE, False, (7, 2), "")
    assert goals(moving(DONE, tries=4), view([server("a")]))["a"].retry == (7, 4)


def test_a_settled_fleet_wants_its_version_everywhere() -> None:
    assert part(fleet(settled=2), view([server("a"), out_of_service("b", 0)])) == (2, True, "")


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (server("a"), (2, False, "all servers stage before any applies")),
        (out_of_service("a", 1), (2, False, "all servers stage before any applies")),
        (out_of_service("a", 0), (1, True, "")),
        (out_of_service("a", 3), (1, True, "")),
        (server("a", 3), (2, False, "all servers stage before any applies")),
        (out_of_service("a", 0, failures=failed(1), goal=Goal(retry=(7, 0))), (2, True, "")),
        (out_of_service("a", 0, failures=failed(1, count=1), goal=Goal(retry=(7, 0))), (1, True, "")),
        (server("a", failures=failed(1), goal=Goal(retry=(7, 0))), (2, False, "all servers stage before any applies")),
    ],
)
def test_all_servers_stage_together_once_those_out_of_service_have_the_previous_version(
    known: Server, expected: tuple[int, bool, str]
) -> None:
    assert part(moving(STAGING, ATOMIC), view([known])) == expected


def test_a_server_out_of_service_stages_with_the_others_without_a_previous_version() -> None:
    alone = out_of_service("a", 0)
    staged = (2, False, "all servers stage before any applies")
    assert part(moving(STAGING, ATOMIC), view([alone], ready=(2,))) == staged
    assert part(moving(STAGING, ATOMIC, refused={1: "wrong"}), view([alone])) == staged
    assert part(moving(STAGING, ATOMIC, back_to=0), view([alone])) == staged


@pytest.mark.parametrize("id", ["a", "b"])
def test_all_apply_together_and_go_back_together(id: str) -> None:
    seen = view([server("a"), server("b", 2)])
    assert part(moving(APPLYING, ATOMIC), seen, id) == (2, True, "no server serves it before all have applied it")
    assert part(moving(BACK, ATOMIC, reason="a: no memory"), seen, id) == (1, True, "the fleet goes back: a: no memory")


@pytest.mark.parametrize("state", [TRYING, HOLDING])
def test_canaries_try_a_version_that_others_do_not_have(state: resources_pb2.Move.State) -> None:
    known = moving(state, CANARY, servers=("a", "b"), canaries=1)
    seen = view([server("a"), server("b"), out_of_service("c", 0), server("d", 3), out_of_service("e", 1)])
    tried = "version 2 goes to the canaries first"
    assert part(known, seen) == (2, True, "")
    assert [part(known, seen, id) for id in "bcde"] == [(1, True, tried), (1, True, tried), (3, True, tried), (1, True, tried)]
    assert part(moving(state, CANARY, servers=("a",), back_to=0), view([out_of_service("b", 0)]), "b") == (2, True, tried)


def test_a_stopped_move_keeps_the_version_where_it_has_arrived() -> None:
    known = moving(STOPPED, ROLLING, servers=("a",), reason="it failed on b")
    seen = view([out_of_service("a", 0), server("b"), out_of_service("c", 0)])
    why = "the move stopped: it failed on b"
    assert [part(known, seen, id) for id in "abc"] == [(2, True, why), (1, True, why), (1, True, why)]


def test_a_failed_server_stays_where_it_is_unless_all_move_at_once() -> None:
    seen = view([server("a"), server("b")])
    why = "version 2 failed here: no memory"
    assert part(moving(MOVING, ROLLING, failed={"a": "no memory"}, at_a_time=2), seen) == (1, True, why)
    assert part(moving(MOVING, ROLLING, failed={"a": "no memory"}, at_a_time=2), seen, "b") == (2, True, "")
    assert part(moving(MOVING, failed={"a": "no memory"}), seen) == (2, True, "")


ARRIVING = server("a", install=install(3))
NUMBER = VersionTarget(resources_pb2.VersionTarget.NUMBER, 2)


@pytest.mark.parametrize(
    ("known", "seen", "version"),
    [
        (moving(MOVING), view([ARRIVING], (1, 2, 3)), 3),
        (moving(MOVING), view([ARRIVING], (1, 2), ahead={3}), 3),
        (moving(MOVING), view([server("a", install=install(3, resources_pb2.Install.APPLYING))], (1, 2, 3)), 3),
        (moving(MOVING), view([server("a", install=install(3, resources_pb2.Install.COMMITTED))], (1, 2, 3)), 2),
        (moving(MOVING), view([server("a", install=install(3, resources_pb2.Install.FAILED))], (1, 2, 3)), 2),
        (moving(MOVING), view([server("a")], (1, 2, 3)), 2),
        (moving(MOVING), view([ARRIVING], (1, 2)), 2),
        (moving(MOVING, refused={3: "wrong"}), view([ARRIVING], (1, 2, 3)), 2),
        (moving(MOVING), view([server("a", 3, install=install(3))], (1, 2, 3)), 2),
        (moving(MOVING), view([server("a", 4, install=install(3))], (1, 2, 3, 4)), 2),
        (moving(MOVING, target=NUMBER), view([ARRIVING], (1, 2, 3)), 2),
        (moving(MOVING, max_skew=5), view([ARRIVING], (1, 2, 3)), 2),
        (moving(MOVING, ROLLING, at_a_time=1), view([ARRIVING], (1, 2, 3)), 2),
    ],
)
def test_an_install_in_progress_ends_before_the_next_version_begins(known: Fleet, seen: View, version: int) -> None:
    assert part(known, seen)[:2] == (version, True)


def turns(known: Fleet, *servers: Server, **changes: Any) -> set[str]:
    """Servers of a rolling move that may go to its version now."""
    found = goals(known, view(servers, **changes))
    for goal in found.values():
        assert (goal.why == WAITS) == (goal.version != 2)
    return {id for id, goal in found.items() if goal.version == 2}


@pytest.mark.parametrize(("at_a_time", "expected"), [(1, {"a"}), (2, {"a", "b"}), (3, {"a", "b", "c"}), (0, {"a", "b", "c"})])
def test_as_many_servers_move_as_the_strategy_allows(at_a_time: int, expected: set[str]) -> None:
    servers = [server(id) for id in "cab"]
    assert turns(moving(MOVING, ROLLING, at_a_time=at_a_time), *servers) == expected
    settled = fleet(ROLLING, at_a_time=at_a_time, settled=2)
    assert turns(settled, *servers) == expected


def test_a_server_waits_on_the_version_that_it_serves() -> None:
    servers = [server(id, 3) for id in "ab"]
    assert part(fleet(ROLLING, at_a_time=1, settled=2), view(servers), "b") == (3, True, WAITS)
    assert part(moving(MOVING, ROLLING, at_a_time=1), view(servers), "b") == (3, True, WAITS)


def test_servers_out_of_service_take_a_place_and_move_beside_it() -> None:
    known = moving(MOVING, ROLLING, at_a_time=2)
    away = out_of_service("a", 0)
    assert turns(known, away, server("b"), server("c")) == {"a", "b"}
    assert turns(known, server("a", install=install(2)), server("b"), server("c")) == {"a", "b"}
    assert turns(known, server("c", resumed=False), server("b"), server("a")) == {"c"}
    assert turns(known, away, out_of_service("b", 0), out_of_service("c", 0), server("d")) == {"a", "b", "c"}
    arrived = server("a", 2, install=install(2, resources_pb2.Install.COMMITTED))
    assert turns(known, arrived, server("b"), server("c"), server("d")) == {"a", "b", "c"}


def test_a_server_that_has_given_up_takes_no_place_and_goes_last() -> None:
    known = moving(MOVING, ROLLING, at_a_time=1, failed={"a": "no memory"})
    broken = server("a", resumed=False, failures=failed(2))
    found = goals(known, view([broken, server("b"), server("c")]))
    assert {id: goal.version for id, goal in found.items()} == {"a": 1, "b": 2, "c": 1}
    retried = server("a", failures=failed(2, count=1))
    assert turns(moving(MOVING, ROLLING, at_a_time=1), retried, server("b")) == {"b"}
    assert turns(moving(MOVING, ROLLING, at_a_time=1), server("a", 3), server("b", 0, opened=1, resumed=True)) == {"b"}


def test_servers_closed_with_an_earlier_version_go_before_those_that_serve_one() -> None:
    known = moving(MOVING, ROLLING, at_a_time=2)
    ready = out_of_service("c", 1)
    assert turns(known, server("a"), server("b"), ready) == {"c"}
    assert turns(moving(MOVING, ROLLING, at_a_time=3), server("a"), server("b"), ready, server("d")) == {"a", "c"}


def test_absent_servers_have_no_turn_and_take_no_place() -> None:
    known = moving(MOVING, ROLLING, at_a_time=1)
    for absent in (out_of_service("a", 0, lost_at=NOW), out_of_service("a", 0, controls=())):
        assert turns(known, absent, server("b"), server("c")) == {"b"}
    asleep = replace(known, powers={"a": Power.ASLEEP_1})
    assert turns(asleep, out_of_service("a", 0), server("b"), server("c")) == {"a", "b"}


def test_no_server_has_a_turn_while_others_may_return() -> None:
    servers = [server("a"), out_of_service("b", 0)]
    assert turns(moving(MOVING, ROLLING), *servers, settling=True) == set()
    assert turns(moving(MOVING), *servers, settling=True) == {"a", "b"}


def gates(known: Fleet, *servers: Server) -> list[tuple[int, int] | None]:
    return [goal.serves for goal in goals(known, view(servers, (1, 2, 3))).values()]


@pytest.mark.parametrize(
    ("known", "range_"),
    [
        (fleet(), None),
        (moving(MOVING), None),
        (moving(APPLYING, ATOMIC), NOBODY),
        (moving(STAGING, ATOMIC), (1, 1)),
        (moving(BACK, ATOMIC), (1, 1)),
        (moving(BACK, ROLLING), None),
        (moving(MOVING, ATOMIC), (2, 2)),
        (fleet(ATOMIC), (1, 1)),
        (moving(DONE, ATOMIC, settled=2), (2, 2)),
        (fleet(max_skew=2), (-1, 3)),
        (moving(MOVING, ROLLING, max_skew=2, to=3), (-1, 5)),
    ],
)
def test_gates_open_on_the_versions_of_the_phase(known: Fleet, range_: tuple[int, int] | None) -> None:
    assert gates(known, server("a", 0, opened=0)) == [range_]


def test_a_move_that_is_atomic_by_itself_goes_back_as_one() -> None:
    known = moving(BACK, ATOMIC)
    assert gates(replace(known, strategy=fleet().strategy, max_skew=4), server("a"), server("b", 2)) == [(1, 1), (1, 1)]


def test_a_gate_opens_only_within_the_bound_of_what_other_servers_show() -> None:
    known = moving(MOVING, ROLLING, max_skew=1)
    assert gates(known, server("a", 1), out_of_service("b", 0)) == [(0, 3), (0, 2)]
    assert gates(known, server("a", 1), server("b", 2)) == [(1, 3), (0, 2)]
    assert gates(known, server("a", 2), server("b", 2), server("c", 1)) == [(1, 2), (1, 2), (1, 3)]
    wide = moving(MOVING, ROLLING, max_skew=2, to=4, settled=3, back_to=3)
    assert gates(wide, server("a", 3), server("b", 4)) == [(2, 6), (1, 5)]
    assert gates(fleet(max_skew=1, settled=2), server("a", 1, lingers=3), out_of_service("b", 2)) == [(1, 3), (2, 2)]


def test_a_server_returns_to_the_version_it_may_open_on_while_it_waits() -> None:
    known = moving(MOVING, ROLLING, at_a_time=1, max_skew=1, back_to=1)
    first = out_of_service("a", 0)
    seen = [first, server("b", 2), out_of_service("c", 1), server("d", 1)]
    assert [goal.version for goal in goals(known, view(seen)).values()] == [2, 2, 1, 1]
    retired = out_of_service("c", 1, ready={2: "print 2"})
    assert goals(known, view([first, server("b", 2), retired, server("d", 1)]))["c"].version == 2
    beyond = out_of_service("c", 4)
    assert goals(known, view([first, server("b", 2), beyond, server("d", 1)]))["c"].version == 2


@pytest.mark.parametrize(
    ("known", "ready", "expected"),
    [
        (fleet(), (1, 2), 1),
        (fleet(settled=0), (1, 2), 2),
        (fleet(), (2, 3), 3),
        (fleet(refused={1: "wrong"}), (1, 2), 2),
        (moving(MOVING), (1, 2, 3), 2),
        (moving(APPLYING, ATOMIC), (1, 2, 3), 2),
        (moving(STAGING, ATOMIC), (1, 2), 1),
        (moving(TRYING, CANARY), (1, 2), 1),
        (moving(HOLDING, CANARY), (1, 2), 1),
        (moving(BACK, ROLLING), (1, 2), 1),
        (moving(STOPPED, ROLLING), (1, 2), 1),
        (moving(DONE, settled=2), (1, 2), 2),
        (moving(MOVING, refused={2: "wrong"}), (1, 2), 1),
        (moving(STAGING, ATOMIC), (2, 3), 3),
        (moving(STAGING, ATOMIC, target=VersionTarget(resources_pb2.VersionTarget.NUMBER, 9)), (2, 3), 2),
    ],
)
def test_servers_boot_from_a_version_that_is_ready_and_not_refused(known: Fleet, ready: tuple[int, ...], expected: int) -> None:
    assert boots(known, view([server("a")], ready)) == expected


def test_servers_boot_from_nothing_that_is_only_ahead_or_gone() -> None:
    known = moving(MOVING, serve_ahead=True)
    assert boots(known, view([server("a")], (1,), ahead={2})) == 1
    assert boots(known, view([server("a")], (), ahead={2})) == 0
    assert boots(fleet(settled=5, target=VersionTarget(resources_pb2.VersionTarget.NONE)), view([server("a")], ())) == 0


def staged(id: str) -> Server:
    """A server that has staged version 2 over the direct path."""
    workers = {rank: Worker(rank, resources_pb2.Worker.STAGED, 2, "install of 2", holds=1, joined=True) for rank in range(2)}
    return server(id, install=install(2), workers=workers)


@pytest.mark.parametrize(
    ("known", "late"),
    [
        (moving(MOVING), ["c"]),
        (moving(MOVING, pause_mode=PauseMode.ABORT), ["c"]),
        (moving(MOVING, pause_mode=PauseMode.WAIT), []),
        (moving(APPLYING, ATOMIC), []),
        (fleet(settled=2), ["c"]),
    ],
)
def test_servers_on_the_direct_path_pause_when_their_turn_is_near(known: Fleet, late: list[str]) -> None:
    found = goals(known, view([staged(id) for id in "abc"]))
    waits = "it waits for its turn on the direct path"
    assert [id for id, goal in found.items() if not goal.apply] == late
    assert [id for id, goal in found.items() if goal.why == waits] == late


def test_a_server_that_may_not_apply_yet_keeps_its_own_reason() -> None:
    found = goals(moving(STAGING, ATOMIC), view([staged(id) for id in "abc"]))
    assert {(goal.apply, goal.why) for goal in found.values()} == {(False, "all servers stage before any applies")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 4),
        ({"refused": {4: "wrong"}}, 3),
        ({"skipped": {4, 3}}, 2),
        ({"serving": 4}, 5),
        ({"serving": 3, "refused": {4: "wrong"}}, 5),
        ({"installs": 5}, 5),
        ({"installs": 4}, 4),
    ],
)
def test_a_server_that_waits_for_a_version_to_be_ready_gets_the_newest_ready_one_after_its_own(
    given: dict[str, Any], expected: int
) -> None:
    one = server("a", given.get("serving", 1))
    if number := given.get("installs"):
        one = replace(one, install=install(number))
    seen = replace(view([one], ready=(1, 2, 3, 4), ahead={5}), skipped=given.get("skipped", set()))
    assert goals(moving(MOVING, to=5, refused=given.get("refused", {})), seen)["a"].version == expected


def test_the_range_of_no_version_permits_none() -> None:
    assert not [version for version in range(4) if Goal(serves=NOBODY).permits(version)]


# Adapters


def of_adapter(base: int, **changes: Any) -> Goal:
    """The goal of a server of an adapter whose version 1 was trained on version 7 of its base, and version 2 on version 8."""
    known = server("one.lora", base_server="one")
    there = view([known], bases={"one.lora": base}, base_versions={1: 7, 2: 8})
    return goals(moving(resources_pb2.Move.MOVING, **changes), there)["one.lora"]


def test_an_adapter_waits_for_the_version_of_its_base() -> None:
    goal = of_adapter(base=7)
    assert (goal.version, goal.apply, goal.permits(1)) == (2, False, True)
    assert goal.why == "version 2 was trained on version 8 of its base, which is at 7"
    assert goal.bound == {1: 7, 2: 8}


def test_an_adapter_leaves_service_when_its_base_moves_on() -> None:
    goal = of_adapter(base=8)
    assert (goal.version, goal.apply, goal.permits(1), goal.permits(2)) == (2, True, False, False)
    assert goal.why == "version 1 was trained on version 7 of its base, which is at 8"


def test_a_fleet_that_only_warns_serves_an_adapter_beside_any_version_of_its_base() -> None:
    goal = of_adapter(base=9, base_binding=BaseBinding.WARN)
    assert (goal.apply, goal.permits(1), goal.bound) == (True, True, {})
    assert goal.warning == "version 1 was trained on version 7 of its base, which is at 9"


def test_an_adapter_that_turns_out_to_be_of_another_base_is_not_installed() -> None:
    known = server("one.lora", 0, base_server="one")
    there = replace(view([known], bases={"one.lora": 7}), misplaced={"one.lora": "it is of another base"})
    goal = goals(moving(resources_pb2.Move.MOVING), there)["one.lora"]
    assert (goal.version, goal.apply, goal.permits(1)) == (0, False, False)
    assert goal.why == "it is of another base"


def test_an_adapter_that_is_bound_is_not_served_beside_weights_of_no_version() -> None:
    goal = of_adapter(base=0)
    assert (goal.apply, goal.leaves) == (False, "version 1 was trained on version 7 of its base, which is at none")
