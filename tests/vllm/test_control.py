"""Every order, carried out on a fake engine: what is done, what is not, and what the daemon is told."""

import asyncio
from typing import Any

import pytest
from resharder.client.inference.control.gate import Position
from resharder.client.inference.control.orders import ControlOrder, Kind, Outcome, order_from_proto
from resharder.client.inference.power import STAY_PAUSED, PowerState
from resharder.client.inference.version_page import Journal
from resharder.v1 import resources_pb2, server_pb2

from tests.support.control_side import (
    FINE,
    LEAD,
    RESETS,
    TORN,
    Core,
    Side,
    apply,
    resume,
    run,
    serving,
    sleep,
    stage,
    wake,
)


def test_who_leads_learns_from_the_workers_how_awake_they_are_and_has_the_daemon_told() -> None:
    side = Side(leads=False)
    side.engine.slumber.begin(1)
    assert side.do(LEAD) is None
    assert side.told == [side.control.state.power] == [PowerState.ASLEEP_1]


@pytest.mark.parametrize("found", [2, 0])
def test_a_side_that_takes_the_lead_holds_its_gate_if_the_engine_has_another_version_than_it_is_open_on(found: int) -> None:
    side = serving(1)
    side.do(LEAD)
    assert side.gate.position is Position.OPEN
    side.engine.version = found
    side.do(LEAD)
    assert (side.gate.position, side.gate.serving) == (Position.HELD, 0)
    side.do(resume(2))
    assert side.gate.open_on == 2


@pytest.mark.parametrize("others", [{1: 3}, {0: 3}, {0: 3, 1: 3}, {0: 0, 1: 0}])
@pytest.mark.parametrize("paused", [False, True])
def test_no_side_opens_its_gate_on_a_version_that_a_worker_there_does_not_have(paused: bool, others: dict[int, int]) -> None:
    side = Side()
    side.engine.paused = paused
    side.journal = Journal(tuple(({0: 2, 1: 2} | others).items()))
    assert side.do(resume(2)) is None
    assert (side.engine.paused, side.gate.position, side.gate.version) == (paused, Position.SHUT, 0)
    assert side.reattached == [], "the next orders, such as to stage, are carried out"

    side.journal = Journal(((0, 2), (1, 2)))
    side.do(resume(2))
    assert (side.engine.paused, side.gate.open_on) == (False, 2)


def test_an_unreadable_page_or_none_keeps_no_gate_shut() -> None:
    for ranks in ((), ((-1, 0),), ((-1, 0), (0, 2))):
        side = Side()
        side.journal = Journal(ranks)
        side.do(resume(2))
        assert side.gate.open_on == 2


def test_the_boot_version_opens_the_gate_without_touching_an_engine_that_runs() -> None:
    side = Side()
    assert side.do(resume(1, "boot")) == Outcome(Kind.RESUME, "boot")
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 1, [])


def test_staging_goes_to_the_workers_by_the_versions_name_and_leaves_the_gate_open() -> None:
    side = serving()
    assert side.do(stage(2)) == Outcome(Kind.STAGE, "i1")
    assert side.engine.calls == [("resharder_stage", "i1", "models/policy/versions/2")]
    assert side.gate.position is Position.OPEN


def test_a_version_that_is_not_ready_is_staged_with_the_one_to_fall_back_on() -> None:
    side = serving()
    order = order_from_proto(server_pb2.Order(kind="STAGE", install="i1", version=2, ahead_of=1))
    assert side.do(order) == Outcome(Kind.STAGE, "i1")
    assert side.engine.calls == [("resharder_stage", "i1", "models/policy/versions/2", "models/policy/versions/1")]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_install_holds_the_gate_pauses_applies_resets_caches_and_stays_paused_until_resumed(mode: str) -> None:
    side = serving()
    assert side.do(apply(2, mode=mode)) == Outcome(Kind.APPLY, "i1")
    assert side.engine.calls == [
        ("pause", mode, False),
        ("resharder_apply", "i1"),
        *RESETS,
    ]
    assert side.engine.positions["pause"] is Position.HELD
    assert (side.gate.position, side.engine.paused) == (Position.HELD, True)
    side.now = 0.25
    assert side.do(resume(2)) == Outcome(Kind.RESUME, "i1", pause_seconds=0.25)
    assert side.engine.positions["resume"] is Position.HELD
    assert (side.gate.position, side.gate.version, side.engine.paused) == (Position.OPEN, 2, False)


def test_the_same_orders_again_are_answered_as_before_and_do_nothing_twice() -> None:
    side = serving()
    for order in (stage(2), apply(2), resume(2)):
        side.now += 0.1
        first = side.do(order)
        before = list(side.engine.calls)
        side.now += 0.1
        assert side.do(order) == first
        assert side.engine.calls == before
    assert side.gate.version == 2


@pytest.mark.parametrize("order", [stage(2), apply(2)])
def test_a_side_that_does_not_lead_refuses_to_stage_and_to_apply(order: ControlOrder) -> None:
    side = Side(leads=False)
    outcome = side.do(order)
    assert outcome is not None
    assert (outcome.ok, outcome.error) == (
        False,
        f"expected the leading control side for {order.kind.name}, this one does not lead",
    )
    assert side.engine.calls == []


def test_a_side_that_does_not_lead_closes_and_opens_its_gate_and_leaves_the_engine_alone() -> None:
    side = Side(leads=False)
    side.engine.paused = True
    side.do(resume(1, "i0"))
    side.do(ControlOrder(Kind.CLOSE, "i1", 2))
    assert side.gate.position is Position.HELD
    side.do(resume(2))
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 2, [])


def test_a_close_without_an_install_shuts_the_gate_with_the_daemons_reason() -> None:
    side = serving()
    side.do(ControlOrder(Kind.CLOSE, reason="the workers do not hold one version"))
    refusal = run(side.gate.enter())
    assert refusal.reason == "the workers do not hold one version"


def test_a_worker_that_fails_to_apply_leaves_the_server_paused_and_shut_until_another_install_is_resumed() -> None:
    side = serving()
    side.engine.answers["resharder_apply"] = TORN
    failed = side.do(apply(2))
    assert failed == Outcome(Kind.APPLY, "i1", False, "worker 1: digest of lm_head.weight differs")
    assert (side.gate.position, side.engine.paused) == (Position.SHUT, True)
    assert side.do(apply(2)) == failed

    side.engine.answers["resharder_apply"] = FINE
    side.engine.calls.clear()
    side.do(stage(1, "i2"), apply(1, "i2"))
    assert "pause" not in [call[0] for call in side.engine.calls if isinstance(call, tuple)]
    assert side.gate.position is Position.SHUT
    side.do(resume(1, "i2"))
    assert (side.gate.position, side.gate.version, side.engine.paused) == (Position.OPEN, 1, False)


@pytest.mark.parametrize("call", ["pause", "resharder_apply", "reset prefix", "reset encoder"])
def test_an_engine_that_breaks_while_applying_is_reported_and_the_gate_is_shut(call: str) -> None:
    side = serving()
    side.engine.failing.add(call)
    outcome = side.do(apply(2))
    assert outcome is not None
    assert (outcome.ok, outcome.error) == (False, f"RuntimeError: {call} broke")
    assert side.gate.position is Position.SHUT


def test_a_prefix_cache_that_vllm_does_not_reset_fails_the_install() -> None:
    side = serving()
    side.engine.cache_resets = False
    outcome = side.do(apply(2))
    assert outcome is not None
    assert not outcome.ok
    assert "prefix cache" in outcome.error
    assert side.gate.position is Position.SHUT


def test_an_answer_that_is_not_a_workers_fails_the_order() -> None:
    side = serving()
    side.engine.answers["resharder_stage"] = [None]
    outcome = side.do(stage(2))
    assert outcome is not None
    assert outcome.error == "resharder_stage: expected a worker's answer with `ok`, got None"
    assert side.gate.position is Position.OPEN


def test_an_engine_that_cannot_resume_is_reported_and_the_gate_stays_closed_and_the_order_can_be_repeated() -> None:
    side = serving()
    side.do(apply(2))
    side.engine.failing.add("resume")
    outcome = side.do(resume(2))
    assert outcome is not None
    assert (outcome.ok, side.gate.position) == (False, Position.HELD)
    side.engine.failing.clear()
    assert side.do(resume(2)) == Outcome(Kind.RESUME, "i1")
    assert side.gate.position is Position.OPEN


def test_on_an_expired_lease_nothing_is_applied_or_resumed_and_the_stream_is_ended() -> None:
    side = serving()
    side.now = 10.0
    assert side.do(apply(2)) is None
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)
    assert side.reattached == ["the lease expired before APPLY"]

    side.lease.renew(20.0)
    side.do(apply(2))
    side.now = 20.0
    assert side.do(resume(2)) is None
    assert (side.engine.paused, side.gate.position) == (True, Position.HELD)
    assert side.reattached[1:] == ["the lease expired before RESUME"]

    side.lease.renew(30.0)
    side.do(resume(2))
    assert (side.engine.paused, side.gate.position) == (False, Position.OPEN)


def test_a_lease_that_ends_while_requests_drain_keeps_the_workers_untouched_and_the_server_paused() -> None:
    side = serving()
    side.engine.lease_ends_while_pausing = True
    assert side.do(apply(2, mode="wait")) is None
    assert side.engine.calls == [("pause", "wait", False)]
    assert side.reattached == ["APPLY was refused: its lease has ended"]
    side.lease.renew(20.0)
    assert side.do(apply(2, mode="wait")) == Outcome(Kind.APPLY, "i1")
    assert side.engine.calls[1] == ("resharder_apply", "i1")


def test_a_side_that_takes_the_lead_from_one_that_paused_the_engine_resumes_it() -> None:
    side = Side()
    side.engine.paused = True
    side.do(resume(1))
    assert (side.engine.calls, side.engine.paused) == ([*RESETS, "resume"], False)


def test_nothing_is_resumed_on_caches_that_the_weights_before_have_made() -> None:
    side = serving()
    side.engine.cache_resets = False
    side.do(apply(2))
    assert side.control.state.stale
    refused = side.do(resume(2))
    assert refused is not None
    assert "prefix cache" in refused.error
    assert (side.engine.paused, side.gate.position) == (True, Position.SHUT)
    side.engine.cache_resets = True
    side.engine.calls.clear()
    side.do(resume(2))
    assert side.engine.calls == [*RESETS, "resume"]
    assert (side.engine.paused, side.gate.position) == (False, Position.OPEN)


def test_an_engine_core_is_asked_to_pause_without_what_vllm_waits_for_besides() -> None:
    side = serving()
    side.engine.engine_core = Core(side.engine)
    side.do(apply(2, mode="abort"))
    assert side.engine.calls[0] == ("pause at once", "abort", False)


def test_a_resumption_without_a_version_is_refused() -> None:
    side = Side()
    outcome = side.do(resume(0))
    assert outcome is not None
    assert (outcome.ok, outcome.error, side.gate.position) == (False, "expected a version to resume on, got 0", Position.SHUT)


def test_orders_are_read_from_the_wire_and_unknown_ones_are_refused() -> None:
    message = server_pb2.Order(kind="APPLY", install="i", version=3, pause_mode=resources_pb2.WAIT, reason="r")
    assert order_from_proto(message) == ControlOrder(Kind.APPLY, "i", 3, "wait", "r")
    assert order_from_proto(server_pb2.Order(kind="STAGE")).mode == "keep"
    message = server_pb2.Order(kind="SLEEP", install="a-p1", power=resources_pb2.ASLEEP_2)
    assert order_from_proto(message) == sleep(2, "a-p1")
    with pytest.raises(ValueError, match="99 is not a valid Kind"):
        order_from_proto(server_pb2.Order(kind=99))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a pause mode"):
        order_from_proto(server_pb2.Order(kind="APPLY", pause_mode=9))  # type: ignore[arg-type]


# Sleep and wake


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_shuts_the_gate_first_and_a_wake_leaves_it_shut_and_the_engine_paused(level: int) -> None:
    side = serving()
    assert side.do(sleep(level, mode="abort")) == Outcome(Kind.SLEEP, "p1")
    assert side.engine.calls == [("sleep", level, "abort")]
    assert side.engine.positions["sleep"] is Position.SHUT
    assert run(side.gate.enter()).reason == "an operator put the server to sleep"

    assert side.do(wake(PowerState.WEIGHTS_AWAKE, "p2")) == Outcome(Kind.WAKE, "p2")
    assert side.engine.slumber.tags == {"kv_cache"}
    assert side.do(wake(change="p3")) == Outcome(Kind.WAKE, "p3")
    assert side.engine.calls[1:] == [("wake", "weights", STAY_PAUSED), ("wake", "kv_cache", STAY_PAUSED)]
    assert (side.gate.position, side.engine.paused) == (Position.SHUT, True)
    assert side.told == [
        PowerState.AWAKE,
        PowerState.ASLEEP_2 if level == 2 else PowerState.ASLEEP_1,
        PowerState.WEIGHTS_AWAKE,
        PowerState.AWAKE,
    ]


def test_after_a_sleep_at_level_1_the_same_version_is_resumed() -> None:
    side = serving()
    side.do(sleep(1), wake(), resume(1, "i2"))
    assert (side.gate.position, side.gate.version, side.engine.paused) == (Position.OPEN, 1, False)


def test_after_a_sleep_at_level_2_nothing_is_resumed_before_a_version_is_installed() -> None:
    side = serving()
    side.do(sleep(2), wake())
    refused = side.do(resume(1, "i2"))
    assert refused is not None
    assert (refused.ok, side.gate.position, side.engine.paused) == (False, Position.SHUT, True)
    assert refused.error == "expected a version to be installed first: a sleep at level 2 dropped the weights"
    side.do(stage(1, "i3"), apply(1, "i3"))
    assert side.gate.position is Position.SHUT
    assert side.do(resume(1, "i3")) == Outcome(Kind.RESUME, "i3")
    assert (side.gate.position, side.engine.paused) == (Position.OPEN, False)


def test_an_install_with_the_weights_awake_and_the_kv_cache_asleep_asks_for_no_pause_and_resets_caches() -> None:
    side = serving()
    side.do(sleep(2), wake(PowerState.WEIGHTS_AWAKE), stage(2))
    side.engine.calls.clear()
    assert side.do(apply(2)) == Outcome(Kind.APPLY, "i1")
    assert side.engine.calls == [("resharder_apply", "i1"), *RESETS]
    too_early = side.do(resume(2))
    assert too_early is not None
    assert (too_early.ok, too_early.error) == (False, "expected the engine to be awake, it is WEIGHTS_AWAKE")
    side.do(wake(change="p3"), resume(2))
    assert (side.gate.position, side.gate.version, side.engine.paused) == (Position.OPEN, 2, False)


@pytest.mark.parametrize("level", [1, 2])
def test_while_the_weights_sleep_a_version_is_staged_but_neither_applied_nor_resumed_on(level: int) -> None:
    side = serving()
    side.do(sleep(level))
    assert side.do(stage(2)) == Outcome(Kind.STAGE, "i1")
    for order in (apply(2), resume(1)):
        outcome = side.do(order)
        assert outcome is not None
        assert not outcome.ok
        assert f"ASLEEP_{level}" in outcome.error
    assert ("resharder_apply", "i1") not in side.engine.calls
    assert side.gate.position is Position.SHUT
    side.do(wake(PowerState.WEIGHTS_AWAKE))
    assert side.do(apply(2)) == Outcome(Kind.APPLY, "i1"), "the same install is not refused for having come too early"


def test_an_install_that_was_applied_before_a_sleep_at_level_2_is_not_taken_for_applied_afterwards() -> None:
    side = serving()
    side.do(stage(2), apply(2), resume(2), sleep(2), wake())
    side.engine.calls.clear()
    side.do(apply(2))
    assert ("resharder_apply", "i1") in side.engine.calls


def test_orders_about_power_that_hold_already_or_come_again_are_answered_and_do_nothing() -> None:
    side = serving()
    assert side.do(wake(change="p0")) == Outcome(Kind.WAKE, "p0")
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)
    for order in (sleep(1, "p1"), sleep(1, "p1"), sleep(1, "p2")):
        assert side.do(order) == Outcome(Kind.SLEEP, order.install)
    assert side.engine.calls == [("sleep", 1, "keep")]
    for order in (wake(change="p3"), wake(change="p3"), wake(PowerState.WEIGHTS_AWAKE, "p4")):
        assert side.do(order) == Outcome(Kind.WAKE, order.install)
    assert side.engine.calls[1:] == [("wake", "kv_cache", "weights", STAY_PAUSED)]


@pytest.mark.parametrize("begin", [(sleep(1, "p0"),), (sleep(2, "p0"), wake(PowerState.WEIGHTS_AWAKE, "p00"))])
def test_from_another_sleep_or_half_awake_it_is_woken_and_put_to_sleep_anew_with_no_request_in_between(begin: Any) -> None:
    side = serving()
    side.do(*begin)
    side.engine.calls.clear()
    assert side.do(sleep(2)) == Outcome(Kind.SLEEP, "p1")
    woken, slept = side.engine.calls
    assert (woken[0], woken[-1], slept) == ("wake", STAY_PAUSED, ("sleep", 2, "keep"))
    assert (side.control.state.power, side.engine.dropped) == (PowerState.ASLEEP_2, True)


def test_a_side_that_does_not_lead_refuses_to_put_to_sleep_to_wake_and_to_unstage() -> None:
    side = Side(leads=False)
    for order in (sleep(1), wake(), ControlOrder(Kind.UNSTAGE, "i1", 2)):
        outcome = side.do(order)
        assert outcome is not None
        assert outcome.error == f"expected the leading control side for {order.kind.name}, this one does not lead"
    assert side.engine.calls == []


def test_an_engine_that_cannot_sleep_goes_on_serving() -> None:
    side = serving(cannot_sleep="start vLLM with --enable-sleep-mode")
    assert side.do(sleep(2)) == Outcome(Kind.SLEEP, "p1", False, "start vLLM with --enable-sleep-mode")
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)


@pytest.mark.parametrize("order", [wake(PowerState.ASLEEP_1), ControlOrder(Kind.SLEEP, "p1", power=PowerState.AWAKE)])
def test_an_order_to_wake_to_a_sleep_or_to_sleep_awake_is_refused(order: ControlOrder) -> None:
    outcome = serving().do(order)
    assert outcome is not None
    assert not outcome.ok
    assert outcome.error.endswith(f"got {order.power.name}")


def test_a_worker_that_does_not_wake_fails_the_order_and_the_next_one_tries_again() -> None:
    side = serving()
    side.do(sleep(1))
    side.engine.others = [{"ok": True, "power": PowerState.ASLEEP_1, "asleep": ["weights"], "dropped": False}]
    failed = side.do(wake())
    assert failed == Outcome(Kind.WAKE, "p2", False, "expected the engine to be AWAKE, it is ASLEEP_1")
    assert side.do(wake()) == failed
    side.engine.others = []
    assert side.do(wake(change="p3")) == Outcome(Kind.WAKE, "p3")


def test_on_an_expired_lease_nobody_is_put_to_sleep_or_woken() -> None:
    side = serving()
    side.now = 10.0
    assert side.do(sleep(2)) is None
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)
    assert side.do(wake()) is None
    assert side.reattached == ["the lease expired before SLEEP", "the lease expired before WAKE"]


def test_what_was_staged_is_dropped_on_order_and_can_be_staged_again() -> None:
    side = serving()
    side.do(stage(2))
    assert side.do(ControlOrder(Kind.UNSTAGE, "i1", 2)) == Outcome(Kind.UNSTAGE, "i1")
    side.do(stage(2))
    assert [call[0] for call in side.engine.calls] == ["resharder_stage", "resharder_unstage", "resharder_stage"]


def test_whoever_drops_the_weights_nothing_is_served_from_what_the_memory_then_holds() -> None:
    """vLLM's own routes, or the program around it."""
    side = serving()

    async def by_others() -> None:
        await side.engine.sleep(2, "keep")
        await side.engine.wake_up(None)  # type: ignore[arg-type]

    run(by_others())
    assert side.engine.positions["sleep"] is Position.SHUT
    assert (side.gate.position, side.engine.paused, side.control.state.power) == (Position.SHUT, True, PowerState.AWAKE)
    assert PowerState.ASLEEP_2 in side.told
    refused = side.do(resume(1, "i2"))
    assert refused is not None
    assert not refused.ok
    side.do(stage(1, "i3"), apply(1, "i3"), resume(1, "i3"))
    assert (side.gate.position, side.engine.paused) == (Position.OPEN, False)


@pytest.mark.parametrize("hand", ["resume", "wake", "wake scheduling"])
def test_no_other_hand_ends_the_pause_of_an_install(hand: str) -> None:
    """Between APPLY and RESUME, through vLLM's own client."""
    side = serving()
    side.do(stage(2), apply(2))
    assert side.engine.paused
    tags = {"wake": None, "wake scheduling": ["scheduling"]}
    run(side.engine.resume_generation() if hand == "resume" else side.engine.wake_up(tags[hand]))  # type: ignore[arg-type]
    assert side.engine.paused
    side.do(resume(2))
    assert (side.gate.position, side.engine.paused) == (Position.OPEN, False)


def test_another_hands_sleep_waits_for_the_order_that_is_being_carried_out() -> None:
    side = serving()
    side.do(stage(2))
    plain, order = side.engine.pause_generation, []

    async def both() -> None:
        async def pausing(*, mode: Any, clear_cache: bool) -> None:
            order.append("pause")
            await asyncio.sleep(0.05)
            await plain(mode=mode, clear_cache=clear_cache)

        side.engine.pause_generation = pausing  # type: ignore[method-assign]
        applying = asyncio.create_task(side.control.carry_out(apply(2)))
        await asyncio.sleep(0.01)
        await side.engine.sleep(1, "abort")
        order.append("asleep")
        outcome = await applying
        assert outcome is not None
        assert outcome.ok, outcome.error

    run(both())
    names = [call[0] for call in side.engine.calls]
    assert names.index("resharder_apply") < names.index("sleep"), names
    assert order == ["pause", "asleep"]


def test_an_engine_that_others_put_to_sleep_at_level_1_keeps_its_gate_and_is_seen_before_an_install() -> None:
    side = serving()
    run(side.engine.sleep(1, "abort"))
    assert side.gate.position is Position.OPEN
    outcome = side.do(apply(2))
    assert outcome is not None
    assert "ASLEEP_1" in outcome.error


def test_a_side_that_led_while_the_engine_slept_opens_its_gate_once_another_has_woken_it() -> None:
    side = serving()
    side.do(sleep(2))
    side.engine.slumber.end(None)  # through another client
    side.engine.dropped = side.engine.paused = False
    assert side.do(resume(2, "i5")) == Outcome(Kind.RESUME, "i5")
    assert side.gate.position is Position.OPEN


@pytest.mark.parametrize("torn", [False, True])
def test_an_engine_that_is_paused_already_does_not_step_its_frozen_requests_to_wait_for_them(torn: bool) -> None:
    """vLLM's `wait` runs requests to their end, also those that a pause froze between two versions."""
    side = Side()
    side.engine.paused = True  # by a leader that ended, perhaps half-way
    side.do(apply(2, mode="wait"))
    assert [call for call in side.engine.calls if call[0] == "pause"] == [("pause", "keep", False)]
    if torn:
        side.engine.answers["resharder_apply"] = TORN
        side.do(apply(3, "i2", mode="wait"))
    side.engine.calls.clear()
    side.do(sleep(1, mode="wait"))
    assert ("sleep", 1, "keep") in side.engine.calls
    assert not [call for call in side.engine.calls if "wait" in call]


def test_an_engine_that_runs_is_waited_for() -> None:
    side = serving()
    side.do(apply(2, mode="wait"))
    assert ("pause", "wait", False) in side.engine.calls
