"""Derived state of servers and fleets: what clients get, what is needed, and how long to wait."""

import math
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from resharder.server.state import timing
from resharder.server.state.errors import listed, unknown_server
from resharder.server.state.fleet import Fleet, Move, UpdateStrategy, VersionTarget, View
from resharder.server.state.server import (
    ASLEEP,
    Ahead,
    Change,
    Control,
    Failure,
    Goal,
    Install,
    Reach,
    Server,
    Settings,
    Worker,
    in_use,
)
from resharder.server.state.server_events import Attached, Claimed, Order, Reported
from resharder.server.state.timing import Timing, possible, timed, timings_from_proto, timings_to_proto
from resharder.server.state.version import ABORTED, LAST_NUMBER, READY, RETIRED, UPLOADING, VersionRecord
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import BaseBinding, PauseMode, Power

from tests.support.fleet_states import NOW, fleet, install, moving, out_of_service, server, view

ALL, ROLLING, CANARY, ATOMIC = resources_pb2.UpdateStrategy.Kind.values()[1:]
SETTINGS = Settings(lease=10, boot=100, grace=5)


def workers(*holds: int, **changes: Any) -> dict[int, Worker]:
    return {
        rank: replace(Worker(rank, resources_pb2.Worker.BOOTED, version, holds=version), **changes)
        for rank, version in enumerate(holds)
    }


@pytest.mark.parametrize(
    ("known", "agreed"),
    [
        (server("a", 3), 3),
        (server("a", workers=workers(3, 4)), 0),
        (server("a", workers=workers(3)), 0),
        (server("a", workers={1: Worker(1, resources_pb2.Worker.BOOTED, holds=3)}), 0),
        (server("a", 3, torn=frozenset({1})), 0),
        (server("a", 3, world_size=0), 0),
        (server("a", 3, world_size=3), 0),
    ],
)
def test_workers_agree_when_all_have_verified_one_version(known: Server, agreed: int) -> None:
    assert known.agreed == agreed


def test_a_server_is_complete_with_a_report_of_every_rank() -> None:
    assert server("a").complete
    assert not server("a", workers=workers(1)).complete
    assert not server("a", workers={}, world_size=0).complete


def test_clients_get_the_version_of_an_open_gate_and_may_get_that_of_a_closing_one() -> None:
    assert (server("a", 3).serving, server("a", 3).shown) == (3, {3})
    assert (server("a", 3, resumed=False).serving, server("a", 3, resumed=False).shown) == (0, {3})
    assert server("a", 3, lost_at=NOW).serving == 0
    assert out_of_service("a", 3, lingers=2).shown == {2}
    assert server("a", 3, lingers=2).shown == {2, 3}
    assert out_of_service("a", 3).shown == frozenset()


@pytest.mark.parametrize(
    ("report", "state", "version"),
    [
        ({}, resources_pb2.Install.STAGING, 2),
        ({}, resources_pb2.Install.APPLYING, 0),
        ({"install": "another"}, resources_pb2.Install.STAGING, 0),
        ({"state": resources_pb2.Worker.APPLIED}, resources_pb2.Install.STAGING, 0),
    ],
)
def test_a_server_has_staged_when_every_worker_has(
    report: dict[str, Any], state: resources_pb2.Install.State, version: int
) -> None:
    staged = workers(1, 1, state=resources_pb2.Worker.STAGED, install="install of 2")
    known = server("a", install=install(2, state), workers=staged | {1: replace(staged[1], **report)})
    assert known.staged == version
    assert server("a").staged == 0
    assert replace(known, workers={0: staged[0]}).staged == 0
    assert replace(known, workers={0: staged[0], 2: staged[1]}).staged == 0


def test_an_install_has_joined_the_direct_path_with_one_of_its_workers() -> None:
    joined = workers(1, 1, install="install of 2")
    joined[1] = replace(joined[1], joined=True)
    assert server("a", install=install(2), workers=joined).joined
    assert server("a", install=install(2, resources_pb2.Install.APPLYING), workers=joined).joined
    assert not server("a", install=install(2, resources_pb2.Install.COMMITTED), workers=joined).joined
    assert not server("a", install=install(3), workers=joined).joined
    assert not server("a", install=install(2), workers=workers(1, 1, install="install of 2")).joined
    assert not server("a", workers=joined).joined


def test_a_control_side_is_busy_elsewhere_with_orders_that_are_not_the_servers() -> None:
    change = Change("change", Power.ASLEEP_1, NOW)
    known = server("a", install=install(2), change=change)
    busy = [known.busy_elsewhere(Control("leader", "", NOW, busy=order)) for order in ("", "install of 2", "change", "another")]
    assert busy == [False, False, False, True]
    assert server("a", install=install(2, resources_pb2.Install.FAILED)).busy_elsewhere(
        Control("leader", "", NOW, busy="install of 2")
    )
    assert server("a").busy_elsewhere(Control("leader", "", NOW, busy="change"))
    assert not server("a").busy_elsewhere(Control("leader", "", NOW))


def test_versions_are_ready_or_ahead_of_it() -> None:
    known = server("a", 1, ahead={1: Ahead("x", True), 2: Ahead("y", True), 3: Ahead("z", False)})
    assert [known.is_ahead(version) for version in (1, 2, 3, 4)] == [False, True, False, False]
    assert [known.serves(version) for version in (1, 2, 3, 4)] == [True, True, False, False]


def test_a_server_without_a_goal_follows_the_newest_version() -> None:
    known = server("a", ready={2: "", 5: ""})
    assert (known.newest, known.wanted, known.boots) == (5, 5, 5)
    assert (replace(known, ready={}).newest, server("a", ready={}).wanted) == (0, 0)
    ordered = replace(known, goal=Goal(version=0, boot=2))
    assert (ordered.wanted, ordered.boots) == (0, 2)
    assert server("a", failures={2: Failure(3, "", 0.0)}).attempts(2) == 3
    assert server("a").attempts(2) == 0


def test_weights_are_unproven_until_the_store_has_the_same() -> None:
    proven = workers(1, 1, held_as="print 1")
    assert not server("a", 1, workers=proven).unproven
    assert server("a", 1, workers=proven | {1: replace(proven[1], held_as="ahead-1")}).unproven
    assert server("a", 1, workers=proven, ready={}).unproven
    assert not server("a", 1, workers=workers(0, 0)).unproven
    assert server("a", workers={1: replace(proven[1], differs="b"), 0: replace(proven[0], differs="a")}).differs == "a"
    assert server("a", workers={0: proven[0], 1: replace(proven[1], differs="b")}).differs == "b"
    assert server("a").differs == ""


def test_servers_have_the_documented_times_and_attempts() -> None:
    assert Settings() == Settings(15, 15, 1800, 600, 3, 2, 60, 86400)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (Ahead, {"remote": True, "reach": Reach()}),
        (Attached, {}),
        (Claimed, {}),
        (Control, {}),
        (
            Fleet,
            {
                "pause_mode": PauseMode.KEEP,
                "target": VersionTarget(resources_pb2.VersionTarget.LATEST, 0, 0.0),
                "strategy": UpdateStrategy(ALL, 0, 0, 0, 0.0, False, ""),
                "power": Power.AWAKE,
                "base_binding": BaseBinding.HOLD,
            },
        ),
        (UpdateStrategy, {"kind": ALL}),
        (VersionTarget, {"kind": resources_pb2.VersionTarget.LATEST}),
        (Goal, {"apply": True, "open": True, "power": Power.AWAKE, "retry": (0, 0)}),
        (Install, {}),
        (Move, {}),
        (Order, {}),
        (Reported, {"ok": True}),
        (Server, {"booting": True, "goal": Goal(), "power": Power.AWAKE}),
        (VersionRecord, {}),
        (View, {"at_once": 1}),
        (Worker, {}),
    ],
)
def test_values_without_a_report_are_zero_empty_or_unknown(kind: type, others: dict[str, object]) -> None:
    defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    assert {name: value for name, value in defaults.items() if value} == others


def test_a_starting_server_is_lost_later_than_one_that_renews() -> None:
    starting = server("a", attached=False)
    assert [known.lease(SETTINGS) for known in (starting, replace(starting, renews=True), server("a"))] == [100, 10, 10]


def test_a_server_needs_the_versions_in_its_memory_and_on_their_way() -> None:
    known = server("a", ready=dict.fromkeys(range(1, 9), ""), confirmed=1, opened=2, workers=workers(3, 4), boot_version=5)
    assert in_use(known, NOW, SETTINGS) == {1, 2, 3, 4}
    assert in_use(replace(known, booting=True), NOW, SETTINGS) == {1, 2, 3, 4, 5}
    assert in_use(replace(known, install=install(6)), NOW, SETTINGS) == {1, 2, 3, 4, 6}
    assert in_use(replace(known, install=install(6, resources_pb2.Install.FAILED)), NOW, SETTINGS) == {1, 2, 3, 4}
    assert in_use(replace(known, ready={2: ""}), NOW, SETTINGS) == {2}
    lost = replace(known, lost_at=NOW)
    assert in_use(lost, NOW + 4.9, SETTINGS) == {1, 2, 3, 4}
    assert in_use(lost, NOW + 5, SETTINGS) == frozenset()


@pytest.mark.parametrize("power", Power.values())
def test_only_the_levels_of_sleep_are_asleep(power: Power) -> None:
    assert (power in ASLEEP) == Power.Name(power).startswith("ASLEEP_")
    assert Goal(power=power).in_service == (power == Power.AWAKE)
    assert not Goal(power=power, open=False).in_service


def test_a_goal_permits_the_versions_of_its_range() -> None:
    assert Goal().permits(7)
    assert not Goal(open=False).permits(7)
    assert [Goal(serves=(2, 4)).permits(version) for version in range(1, 6)] == [False, True, True, True, False]


@pytest.mark.parametrize("state", resources_pb2.Move.State.values()[1:])
def test_moves_end_done_or_failed(state: resources_pb2.Move.State) -> None:
    known = moving(state, CANARY, check="answers", hold_seconds=20, held=NOW - 5)
    move = known.move
    assert move is not None
    assert move.active == (state not in (resources_pb2.Move.DONE, resources_pb2.Move.FAILED))
    assert known.moving == (move if move.active else None)
    assert move.hold_left(NOW) == (15 if state == resources_pb2.Move.HOLDING else 0)
    assert move.hold_left(NOW + 60) == 0
    assert move.checking == (state == resources_pb2.Move.HOLDING)
    assert not replace(move, checked=True).checking
    assert not replace(move, strategy=fleet(CANARY).strategy).checking


@pytest.mark.parametrize(("canaries", "chosen"), [(0, ("a",)), (1, ("a",)), (2, ("a", "b")), (9, ("a", "b", "c"))])
def test_the_first_servers_of_a_move_are_its_canaries(canaries: int, chosen: tuple[str, ...]) -> None:
    move = moving(resources_pb2.Move.TRYING, CANARY, canaries=canaries, servers=("a", "b", "c")).move
    assert move is not None
    assert move.canaries == chosen


@pytest.mark.parametrize(
    ("known", "mixes"),
    [
        (fleet(), [False, False, False, False]),
        (fleet(max_skew=1), [False, False, True, False]),
        (fleet(ATOMIC), [False, True, True, False]),
        (fleet(ATOMIC, max_skew=5), [False, True, True, False]),
    ],
)
def test_versions_mix_where_they_differ_by_more_than_the_bound(known: Fleet, mixes: list[bool]) -> None:
    assert [known.mixes(3, shown) for shown in ([3], [3, 4], [1, 3], [])] == mixes
    assert known.strict == (known.max_skew > 0 or known.strategy.kind == ATOMIC)


def test_a_fleet_rests_between_moves() -> None:
    paced = moving(resources_pb2.Move.DONE, target=VersionTarget(every_seconds=30))
    assert (paced.rest_left(NOW), paced.rest_left(NOW + 50)) == (20, 0)
    assert fleet(target=VersionTarget(every_seconds=30)).rest_left(NOW) == 0
    assert fleet(power=Power.ASLEEP_1, powers={"a": Power.AWAKE}).power_of("a") == Power.AWAKE
    assert fleet(power=Power.ASLEEP_1, powers={"a": Power.AWAKE}).power_of("b") == Power.ASLEEP_1


@pytest.mark.parametrize(
    ("known", "needed"),
    [
        (fleet(), {1}),
        (fleet(settled=0), set()),
        (fleet(target=VersionTarget(resources_pb2.VersionTarget.NUMBER, 5)), {1, 5}),
        (fleet(target=VersionTarget(resources_pb2.VersionTarget.NONE, 5)), {1}),
        (moving(resources_pb2.Move.MOVING), {2}),
        (moving(resources_pb2.Move.BACK), {1, 2}),
        (moving(resources_pb2.Move.MOVING, ROLLING), {1, 2}),
        (moving(resources_pb2.Move.MOVING, ROLLING, back_to=0), {2}),
        (moving(resources_pb2.Move.DONE, settled=2), {2}),
    ],
)
def test_a_fleet_needs_its_version_and_those_of_its_move(known: Fleet, needed: set[int]) -> None:
    assert known.needs() == needed


def test_a_view_has_the_versions_that_are_shown_and_usable() -> None:
    seen = view([server("a", 1), server("b", 2, lingers=1), out_of_service("c", 3)], (1, 2), ahead={3})
    assert seen.shown == {1: {"a", "b"}, 2: {"b"}}
    assert seen.usable == {1, 2, 3}


def test_impossible_timings_are_dropped_and_long_reports_cut() -> None:
    def message(phase: str = "stage", start: float = 5.25, seconds: float = 1.5) -> resources_pb2.Timing:
        time = Timestamp(seconds=int(start), nanos=int(start % 1 * 1e9))
        return resources_pb2.Timing(phase=phase, start_time=time, seconds=seconds)

    kept = Timing("stage", 5.25, 1.5)
    assert (kept.end, timings_from_proto([message()])) == (6.75, (kept,))
    assert timings_from_proto([message(seconds=0.0), message(phase="x" * 65)]) == (
        Timing("stage", 5.25, 0.0),
        Timing("x" * 64, 5.25, 1.5),
    )
    wrong = [message(phase=""), message(start=0.0), message(start=float(1 << 33)), message(seconds=-1.0)]
    wrong += [message(seconds=number) for number in (math.inf, math.nan, float(1 << 33))]
    assert timings_from_proto([*wrong, message()]) == (kept,)
    for start in (1.0, float((1 << 33) - 1)):
        assert timings_from_proto([message(start=start)]) != ()
    assert len(timings_from_proto([message()] * 40)) == 32
    assert timings_to_proto([kept]) == [message()]
    assert [possible(number) for number in (0.5, 0.0, -1.0, math.inf, math.nan, float(1 << 33))] == [0.5, 0, 0, 0, 0, 0]


def test_a_phase_is_timed_from_its_wall_clock_start_by_the_monotonic_clock_and_also_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = iter((7.0, 9.5, 20.0, 21.0))
    monkeypatch.setattr(timing, "time", lambda: 1000.0)
    monkeypatch.setattr(timing, "monotonic", lambda: next(passed))
    found: list[Timing] = []
    with timed(found, "stage"):
        assert found == []
    with pytest.raises(OSError, match="full"), timed(found, "apply"):
        raise OSError("full")
    assert found == [Timing("stage", 1000.0, 2.5), Timing("apply", 1000.0, 1.0)]


STORED = {
    "model": "policy",
    "number": 3,
    "state": READY,
    "epoch": 1,
    "step": 2,
    "job": "j",
    "size_bytes": 4,
    "tensor_count": 5,
}


def test_a_record_ignores_later_fields_and_names_its_version() -> None:
    record = VersionRecord.of(STORED | {"tensor_count": 5, "create_time": 6.0, "added_later": 1})
    assert (record.name, record.state, record.skipped) == ("models/policy/versions/3", "READY", False)
    assert VersionRecord.of(STORED | {"create_time": 6.0, "set_aside": True}).skipped, "earlier builds stored it by that name"
    with pytest.raises(TypeError):
        VersionRecord.of(STORED)
    with pytest.raises(TypeError, match="expected the fields of a version, got a list"):
        VersionRecord.of([1])  # type: ignore[arg-type]
    others = [replace(record, **change) for change in ({"job": "k"}, {"epoch": 2}, {"number": 4}, {"create_time": 7.0})]  # type: ignore[arg-type]
    prints = {each.ahead_fingerprint for each in (record, *others)}
    assert len(prints) == 5
    assert all(len(each) == len("ahead-") + 32 and each.startswith("ahead-") for each in prints)


@pytest.mark.parametrize("state", [UPLOADING, READY, RETIRED, ABORTED])
def test_a_version_is_lost_once_it_is_retired_for_that_reason(state: str) -> None:
    record = VersionRecord.of(STORED | {"state": state, "create_time": 6.0})
    assert replace(record, reason="LOST: neither the daemon nor a node holds 4 of 6 pieces").is_lost == (state == RETIRED)
    assert not replace(record, reason="kept 3").is_lost
    assert not replace(record, reason="it was LOST: no").is_lost


@pytest.mark.parametrize("name", ["number", "epoch"])
def test_a_record_has_numbers_whose_successors_fit_into_the_protocol(name: str) -> None:
    assert LAST_NUMBER == 4_611_686_018_427_387_903
    record = STORED | {"create_time": 6.0}
    assert getattr(VersionRecord.of(record | {name: LAST_NUMBER}), name) == LAST_NUMBER
    with pytest.raises(ValueError, match=f"at most {LAST_NUMBER}, got"):
        VersionRecord.of(record | {name: LAST_NUMBER + 1})
    with pytest.raises(ValueError, match=f"expected {name} as"):
        VersionRecord.of(record | {name: "3"})


def test_stored_states_have_the_names_of_the_protocol() -> None:
    states = resources_pb2.Version.State.Name
    assert [states(number) for number in (1, 2, 3, 4)] == [UPLOADING, READY, RETIRED, ABORTED]


def test_an_unknown_server_has_a_reason_and_a_message() -> None:
    error = unknown_server("a")
    assert (error.reason, str(error)) == ("SERVER_UNKNOWN", "server 'a' is unknown: it has to claim its id first")


@pytest.mark.parametrize(
    ("values", "most", "text"),
    [((), 2, "none"), ((1,), 2, "1"), ((1, 2), 2, "1, 2"), ((1, 2, 3), 2, "1, 2 and 1 more"), (range(25), 20, None)],
)
def test_long_lists_end_with_the_number_of_the_others(values: Any, most: int, text: str | None) -> None:
    assert listed(values, most) == (text or ", ".join(map(str, range(20))) + " and 5 more")
    assert most != 20 or listed(values) == listed(values, 20)
