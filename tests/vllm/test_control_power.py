"""Sleep and wake, by orders and by other hands, carried out on a fake engine."""

import asyncio
from typing import Any

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.control.attach import AttachedEngine
from resharder.client.inference.control.gate import Position
from resharder.client.inference.control.lease import ControlIdentity, LeaseThread
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.engine import STAY_PAUSED
from resharder.client.rpc.channel import Channel
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

from tests.support.control_side import (
    RESETS,
    Side,
    apply,
    resume,
    run,
    serving,
    sleep,
    stage,
    wake,
)


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_shuts_the_gate_first_and_a_wake_leaves_it_shut_and_the_engine_paused(level: int) -> None:
    side = serving()
    assert side.do(sleep(level, mode="abort")) == Outcome(Order.SLEEP, "p1")
    assert side.engine.calls == [("sleep", level, "abort")]
    assert side.engine.positions["sleep"] is Position.SHUT
    assert run(side.gate.enter()).reason == "an operator put the server to sleep"

    assert side.do(wake(Power.WEIGHTS_AWAKE, "p2")) == Outcome(Order.WAKE, "p2")
    assert side.engine.slumber.tags == {"kv_cache"}
    assert side.do(wake(change="p3")) == Outcome(Order.WAKE, "p3")
    assert side.engine.calls[1:] == [("wake", "weights", STAY_PAUSED), ("wake", "kv_cache", STAY_PAUSED)]
    assert (side.gate.position, side.engine.paused) == (Position.SHUT, True)
    assert side.reported_power == [
        Power.AWAKE,
        Power.ASLEEP_2 if level == 2 else Power.ASLEEP_1,
        Power.WEIGHTS_AWAKE,
        Power.AWAKE,
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
    assert refused.error == "a sleep at level 2 dropped the weights: install a version first"
    side.do(stage(1, "i3"), apply(1, "i3"))
    assert side.gate.position is Position.SHUT
    assert side.do(resume(1, "i3")) == Outcome(Order.RESUME, "i3")
    assert (side.gate.position, side.engine.paused) == (Position.OPEN, False)


def test_an_install_with_the_weights_awake_and_the_kv_cache_asleep_asks_for_no_pause_and_resets_caches() -> None:
    side = serving()
    side.do(sleep(2), wake(Power.WEIGHTS_AWAKE), stage(2))
    side.engine.calls.clear()
    assert side.do(apply(2)) == Outcome(Order.APPLY, "i1")
    assert side.engine.calls == [("resharder_apply", "i1"), *RESETS]
    too_early = side.do(resume(2))
    assert too_early is not None
    assert (too_early.ok, too_early.error) == (False, "the engine is not awake: it is WEIGHTS_AWAKE")
    side.do(wake(change="p3"), resume(2))
    assert (side.gate.position, side.gate.version, side.engine.paused) == (Position.OPEN, 2, False)


@pytest.mark.parametrize("level", [1, 2])
def test_while_the_weights_sleep_a_version_is_staged_but_neither_applied_nor_resumed_on(level: int) -> None:
    side = serving()
    side.do(sleep(level))
    assert side.do(stage(2)) == Outcome(Order.STAGE, "i1")
    for order in (apply(2), resume(1)):
        outcome = side.do(order)
        assert outcome is not None
        assert not outcome.ok
        assert f"ASLEEP_{level}" in outcome.error
    assert ("resharder_apply", "i1") not in side.engine.calls
    assert side.gate.position is Position.SHUT
    side.do(wake(Power.WEIGHTS_AWAKE))
    assert side.do(apply(2)) == Outcome(Order.APPLY, "i1"), "the same install is not refused for having come too early"


def test_an_install_that_was_applied_before_a_sleep_at_level_2_is_not_taken_for_applied_afterwards() -> None:
    side = serving()
    side.do(stage(2), apply(2), resume(2), sleep(2), wake())
    side.engine.calls.clear()
    side.do(apply(2))
    assert ("resharder_apply", "i1") in side.engine.calls


def test_orders_about_power_that_hold_already_or_come_again_are_answered_and_do_nothing() -> None:
    side = serving()
    assert side.do(wake(change="p0")) == Outcome(Order.WAKE, "p0")
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)
    for order in (sleep(1, "p1"), sleep(1, "p1"), sleep(1, "p2")):
        assert side.do(order) == Outcome(Order.SLEEP, order.install)
    assert side.engine.calls == [("sleep", 1, "keep")]
    for order in (wake(change="p3"), wake(change="p3"), wake(Power.WEIGHTS_AWAKE, "p4")):
        assert side.do(order) == Outcome(Order.WAKE, order.install)
    assert side.engine.calls[1:] == [("wake", "kv_cache", "weights", STAY_PAUSED)]


@pytest.mark.parametrize("begin", [(sleep(1, "p0"),), (sleep(2, "p0"), wake(Power.WEIGHTS_AWAKE, "p00"))])
def test_from_another_sleep_or_half_awake_it_is_woken_and_put_to_sleep_anew_with_no_request_in_between(begin: Any) -> None:
    side = serving()
    side.do(*begin)
    side.engine.calls.clear()
    assert side.do(sleep(2)) == Outcome(Order.SLEEP, "p1")
    woken, slept = side.engine.calls
    assert (woken[0], woken[-1], slept) == ("wake", STAY_PAUSED, ("sleep", 2, "keep"))
    assert (side.control.state.power, side.engine.dropped) == (Power.ASLEEP_2, True)


def test_a_side_that_does_not_lead_refuses_to_put_to_sleep_to_wake_and_to_unstage() -> None:
    side = Side(leads=False)
    for order in (sleep(1), wake(), ControlOrder(Order.UNSTAGE, "i1", 2)):
        outcome = side.do(order)
        assert outcome is not None
        assert outcome.error == f"{Order.Kind.Name(order.kind)} is for the leading control side, and this one does not lead"
    assert side.engine.calls == []


def test_an_engine_that_cannot_sleep_goes_on_serving() -> None:
    side = serving(cannot_sleep="start vLLM with --enable-sleep-mode")
    assert side.do(sleep(2)) == Outcome(Order.SLEEP, "p1", False, "start vLLM with --enable-sleep-mode")
    assert (side.engine.calls, side.gate.position) == ([], Position.OPEN)


@pytest.mark.parametrize("order", [wake(Power.ASLEEP_1), ControlOrder(Order.SLEEP, "p1", power=Power.AWAKE)])
def test_an_order_to_wake_to_a_sleep_or_to_sleep_awake_is_refused(order: ControlOrder) -> None:
    outcome = serving().do(order)
    assert outcome is not None
    assert not outcome.ok
    assert outcome.error.endswith(f"got {Power.Name(order.power)}")


def test_a_worker_that_does_not_wake_fails_the_order_and_the_next_one_tries_again() -> None:
    side = serving()
    side.do(sleep(1))
    side.engine.others = [{"ok": True, "power": Power.ASLEEP_1, "asleep": ["weights"], "dropped": False}]
    failed = side.do(wake())
    assert failed == Outcome(Order.WAKE, "p2", False, "the engine is ASLEEP_1, not AWAKE")
    assert side.do(wake()) == failed
    side.engine.others = []
    assert side.do(wake(change="p3")) == Outcome(Order.WAKE, "p3")


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
    assert side.do(ControlOrder(Order.UNSTAGE, "i1", 2)) == Outcome(Order.UNSTAGE, "i1")
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
    assert (side.gate.position, side.engine.paused, side.control.state.power) == (Position.SHUT, True, Power.AWAKE)
    assert Power.ASLEEP_2 in side.reported_power
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
        begun = asyncio.Event()

        async def pausing(*, mode: Any, clear_cache: bool) -> None:
            order.append("pause")
            begun.set()
            await asyncio.sleep(0.05)  # in which the other hand comes
            await plain(mode=mode, clear_cache=clear_cache)

        side.engine.pause_generation = pausing  # type: ignore[method-assign]
        applying = asyncio.create_task(side.control.carry_out(apply(2)))
        await begun.wait()
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
    assert side.do(resume(2, "i5")) == Outcome(Order.RESUME, "i5")
    assert side.gate.position is Position.OPEN


@pytest.mark.parametrize("caller", ["resume", "wake"])
def test_a_closed_handle_leaves_the_engine_to_its_program(caller: str) -> None:
    """Also when it was closed between APPLY and RESUME."""
    side = serving()
    side.do(stage(2), apply(2))
    handle = attached(side)
    for _ in range(2):
        handle.close()
    handle.leave()
    run(side.engine.resume_generation() if caller == "resume" else side.engine.wake_up(["scheduling"]))
    assert not side.engine.paused


def test_an_engine_that_is_attached_again_is_resumed_by_its_new_control_side() -> None:
    side = serving()
    side.do(stage(2), apply(2))
    attached(side).close()
    again = Side(engine=side.engine, gate=side.gate)
    again.do(resume(2))
    assert (again.gate.open_on, side.engine.paused) == (2, False)


def test_a_wait_of_a_handle_that_is_closed_meanwhile_ends() -> None:
    side = serving()

    async def wait() -> None:
        handle = attached(side)
        assert await handle.wait(1) == 1
        waiting = asyncio.create_task(handle.wait(2))
        await asyncio.sleep(0)
        handle.close()
        assert await handle.wait(1) == 1
        with pytest.raises(UsageError, match="cannot wait for version 2: the engine is detached"):
            await asyncio.wait_for(waiting, 30)

    run(wait())


def attached(side: Side) -> AttachedEngine:
    """A handle of an engine whose daemon is away."""
    loop = asyncio.new_event_loop()
    identity = ControlIdentity("s", 2)

    def status() -> tuple[Power, int, int]:
        return side.control.state.power, 0, 0

    thread = LeaseThread(Channel("127.0.0.1:1"), identity, side.lease, side.control.carry_out, status, loop)
    loop.close()
    return AttachedEngine(side.gate, thread, side.control)
