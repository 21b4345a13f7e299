"""Orders about versions, carried out on a fake engine: what is done, what is not, and what the daemon is told."""

from dataclasses import replace

import pytest
from resharder.client.inference.control.gate import Position
from resharder.client.inference.control.orders import ControlOrder, Outcome, order_from_proto
from resharder.client.inference.version_page import Journal
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

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
)


def test_who_leads_learns_from_the_workers_how_awake_they_are_and_has_the_daemon_told() -> None:
    side = Side(leads=False)
    side.engine.slumber.begin(1)
    assert side.do(LEAD) is None
    assert side.reported_power == [side.control.state.power] == [Power.ASLEEP_1]


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
    assert side.do(resume(1, "boot")) == Outcome(Order.RESUME, "boot")
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 1, [])


def test_staging_goes_to_the_workers_by_the_versions_name_and_leaves_the_gate_open() -> None:
    side = serving()
    assert side.do(stage(2)) == Outcome(Order.STAGE, "i1")
    assert side.engine.calls == [("resharder_stage", "i1", "models/policy/versions/2")]
    assert side.gate.position is Position.OPEN


def test_a_version_that_is_not_ready_is_staged_with_the_one_to_fall_back_on() -> None:
    side = serving()
    order = order_from_proto(server_pb2.Order(kind="STAGE", install="i1", version=2, ahead_of=1))
    assert side.do(order) == Outcome(Order.STAGE, "i1")
    assert side.engine.calls == [("resharder_stage", "i1", "models/policy/versions/2", "models/policy/versions/1")]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_install_holds_the_gate_pauses_applies_resets_caches_and_stays_paused_until_resumed(mode: str) -> None:
    side = serving()
    assert side.do(apply(2, mode=mode)) == Outcome(Order.APPLY, "i1")
    assert side.engine.calls == [
        ("pause", mode, False),
        ("resharder_apply", "i1"),
        *RESETS,
    ]
    assert side.engine.positions["pause"] is Position.HELD
    assert (side.gate.position, side.engine.paused) == (Position.HELD, True)
    side.now = 0.25
    assert side.do(resume(2)) == Outcome(Order.RESUME, "i1", pause_seconds=0.25)
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
        f"{Order.Kind.Name(order.kind)} is for the leading control side, and this one does not lead",
    )
    assert side.engine.calls == []


def test_a_side_that_does_not_lead_closes_and_opens_its_gate_and_leaves_the_engine_alone() -> None:
    side = Side(leads=False)
    side.engine.paused = True
    side.do(resume(1, "i0"))
    side.do(ControlOrder(Order.CLOSE, "i1", 2))
    assert side.gate.position is Position.HELD
    side.do(resume(2))
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 2, [])


def test_a_close_without_an_install_shuts_the_gate_with_the_daemons_reason() -> None:
    side = serving()
    side.do(ControlOrder(Order.CLOSE, reason="the workers do not hold one version"))
    refusal = run(side.gate.enter())
    assert refusal.reason == "the workers do not hold one version"


def test_a_worker_that_fails_to_apply_leaves_the_server_paused_and_shut_until_another_install_is_resumed() -> None:
    side = serving()
    side.engine.answers["resharder_apply"] = TORN
    failed = side.do(apply(2))
    assert failed == Outcome(Order.APPLY, "i1", False, "worker 1: digest of lm_head.weight differs", workers_failed=True)
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
    assert not outcome.workers_failed, "no worker reports it"
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
    assert side.do(resume(2)) == Outcome(Order.RESUME, "i1")
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
    assert side.do(apply(2, mode="wait")) == Outcome(Order.APPLY, "i1")
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
    assert order_from_proto(message) == ControlOrder(Order.APPLY, "i", 3, "wait", "r")
    assert order_from_proto(server_pb2.Order(kind="STAGE")).mode == "keep"
    message = server_pb2.Order(kind="SLEEP", install="a-p1", power=resources_pb2.ASLEEP_2)
    assert order_from_proto(message) == sleep(2, "a-p1")
    with pytest.raises(ValueError, match=r"expected .*APPLY, .* as the kind of an order, got 99"):
        order_from_proto(server_pb2.Order(kind=99))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected KEEP, WAIT, ABORT as the pause mode, got 9"):
        order_from_proto(server_pb2.Order(kind="APPLY", pause_mode=9))  # type: ignore[arg-type]


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


def test_a_side_that_may_end_for_another_config_says_so_instead_of_staging_and_no_more_than_that() -> None:
    asked: list[str] = []

    def why(version: str) -> str:
        asked.append(version)
        return "rope_theta differs" if version.endswith("/2") else ""

    side = Side(why_restart=why)
    ends = Outcome(Order.STAGE, "i1", False, "rope_theta differs", restarting=True)
    assert [side.do(stage(2)), side.do(stage(2))] == [ends, ends]
    assert (side.engine.calls, asked) == ([], ["models/policy/versions/2"])
    assert side.do(stage(3, "i2")) == Outcome(Order.STAGE, "i2")
    side.engine.calls.clear()
    for order in (replace(stage(2, "i3"), boots_another=True), replace(stage(2, "i4"), profile=True)):
        assert side.do(order) == Outcome(Order.STAGE, order.install), "the workers refuse it"
    assert len(asked) == 2
