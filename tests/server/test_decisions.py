"""Decisions about a fleet change what they name and nothing else, and are refused where there is nothing to decide."""

from dataclasses import replace

import pytest
from resharder.server.fleets.commands import decide, roll_back, set_drained, set_power
from resharder.server.fleets.updates import checked
from resharder.server.state.fleet import Fleet, VersionTarget, View
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.fleet_states import fleet, moving, server, view

LATEST, NUMBER, NONE = resources_pb2.VersionTarget.LATEST, resources_pb2.VersionTarget.NUMBER, resources_pb2.VersionTarget.NONE
CANARY, ROLLING = resources_pb2.UpdateStrategy.CANARY, resources_pb2.UpdateStrategy.ROLLING


def seen(*ready: int, **changes: object) -> View:
    return view([server("a"), server("b")], ready or (1, 2), **changes)


def test_a_power_state_of_named_servers_leaves_the_others_to_the_fleets() -> None:
    before = fleet(powers={"a": Power.ASLEEP_1, "c": Power.ASLEEP_2})
    assert set_power(before, Power.ASLEEP_2, ["a", "b"]) == replace(
        before, powers={"a": Power.ASLEEP_2, "b": Power.ASLEEP_2, "c": Power.ASLEEP_2}
    )
    assert set_power(before, Power.ASLEEP_2, iter(["b"])).powers["b"] == Power.ASLEEP_2


def test_a_power_state_without_names_is_that_of_all() -> None:
    before = fleet(powers={"a": Power.ASLEEP_1}, power=Power.AWAKE)
    assert set_power(before, Power.ASLEEP_2) == replace(before, power=Power.ASLEEP_2, powers={})


def test_servers_are_drained_and_resumed_beside_others() -> None:
    before = fleet(drained=frozenset({"a", "b"}))
    assert set_drained(before, True, ["b", "c"]) == replace(before, drained=frozenset({"a", "b", "c"}))
    assert set_drained(before, False, ["b", "c"]) == replace(before, drained=frozenset({"a"}))


def test_a_rollback_refuses_every_later_version_and_permits_its_own() -> None:
    before = fleet(refused={1: "slow", 2: "wrong", 4: "other", 9: "not there yet", 3: "deleted"})
    found = roll_back(before, 2, seen(1, 2, 4, 5, ahead={6}), "worse", "request 7")
    assert found.refused == {1: "slow", 4: "other", 5: "worse", 6: "worse", 9: "not there yet"}
    assert found == replace(before, refused=found.refused, rolled_back="request 7")


@pytest.mark.parametrize("target", [VersionTarget(NUMBER, 3), VersionTarget(NONE)])
def test_a_rollback_of_a_fixed_target_fixes_the_version(target: VersionTarget) -> None:
    assert roll_back(fleet(target=target), 1, seen(1, 2, 3), "worse", "").target == VersionTarget(NUMBER, 1)


def test_a_rollback_of_latest_keeps_the_target_with_its_pace() -> None:
    target = VersionTarget(LATEST, every_seconds=60)
    assert roll_back(fleet(target=target), 1, seen(), "worse", "").target == target


@pytest.mark.parametrize("known", [fleet(), moving(resources_pb2.Move.DONE), moving(resources_pb2.Move.FAILED)])
@pytest.mark.parametrize("go_on", [True, False])
def test_without_a_move_there_is_nothing_to_decide(known: Fleet, go_on: bool) -> None:
    with pytest.raises(ValueError, match="nothing to approve"):
        decide(known, go_on, "", seen())


@pytest.mark.parametrize(
    "state",
    [
        resources_pb2.Move.TRYING,
        resources_pb2.Move.HOLDING,
        resources_pb2.Move.MOVING,
        resources_pb2.Move.STAGING,
        resources_pb2.Move.STOPPED,
    ],
)
@pytest.mark.parametrize(("given", "reason"), [("too slow", "too slow"), ("", "an operator sent it back")])
def test_a_move_that_is_sent_back_refuses_its_version(state: resources_pb2.Move.State, given: str, reason: str) -> None:
    before = moving(state, CANARY)
    after = decide(before, False, given, seen())
    assert before.move is not None
    assert after == replace(before, move=replace(before.move, state=resources_pb2.Move.BACK, reason=reason), refused={2: reason})


def test_a_move_on_its_way_back_stays_on_it() -> None:
    before = moving(resources_pb2.Move.BACK, CANARY, reason="a canary failed")
    assert decide(before, False, "again", seen()) is before


def test_a_move_goes_back_only_to_a_version_that_is_ready() -> None:
    with pytest.raises(ValueError, match="no version to go back to"):
        decide(moving(resources_pb2.Move.HOLDING, CANARY), False, "", seen(2))


def test_an_approved_stopped_move_tries_its_failed_servers_again() -> None:
    before = moving(resources_pb2.Move.STOPPED, ROLLING, failed={"a": "no memory"}, tries=3)
    after = decide(before, True, "repaired", seen())
    assert before.move is not None
    assert after == replace(
        before, move=replace(before.move, state=resources_pb2.Move.MOVING, failed={}, tries=4, reason="repaired")
    )


@pytest.mark.parametrize("state", [resources_pb2.Move.TRYING, resources_pb2.Move.HOLDING])
def test_an_approved_canary_stays_in_its_phase(state: resources_pb2.Move.State) -> None:
    before = moving(state, CANARY)
    assert before.move is not None
    assert decide(before, True, "good", seen()) == replace(before, move=replace(before.move, approved=True, reason="good"))


@pytest.mark.parametrize(
    "state", [resources_pb2.Move.MOVING, resources_pb2.Move.STAGING, resources_pb2.Move.APPLYING, resources_pb2.Move.BACK]
)
def test_a_move_that_goes_on_by_itself_needs_no_approval(state: resources_pb2.Move.State) -> None:
    with pytest.raises(ValueError, match=f"{resources_pb2.Move.State.Name(state)} continues by itself"):
        decide(moving(state), True, "", seen())


def test_a_check_decides_about_the_canaries_of_its_own_move_alone() -> None:
    held = moving(resources_pb2.Move.HOLDING, CANARY, check="answers")
    assert held.move is not None
    assert checked(held, 7, True, "", seen()) == replace(held, move=replace(held.move, checked=True))
    reason = "check answers: ended with 1"
    assert checked(held, 7, False, "ended with 1", seen()) == replace(
        held, move=replace(held.move, state=resources_pb2.Move.BACK, reason=reason), refused={2: reason}
    )
    late = [
        (held, 6),
        (moving(resources_pb2.Move.HOLDING, CANARY, check="answers", checked=True), 7),
        (moving(resources_pb2.Move.HOLDING, CANARY), 7),
        (moving(resources_pb2.Move.TRYING, CANARY, check="answers"), 7),
        (moving(resources_pb2.Move.DONE, CANARY, check="answers"), 7),
        (fleet(), 7),
    ]
    for known, move in late:
        assert checked(known, move, False, "ended with 1", seen()) is known
        assert checked(known, move, True, "", seen()) is known
