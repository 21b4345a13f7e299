"""Every order, carried out on a fake engine: what is done, what is not, and what the daemon is told."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest
from resharder.client.vllm.control import Control, Kind, Lease, Order, Outcome, order_from_proto
from resharder.client.vllm.gate import Gate, Position
from resharder.v1 import resources_pb2, server_pb2

LEAD = Order(Kind.LEAD)
FINE = [{"ok": True, "rank": 0}, {"ok": True, "rank": 1}]
TORN = [{"ok": True, "rank": 0}, {"ok": False, "rank": 1, "error": "digest of lm_head.weight differs"}]


class FakeEngine:
    """Writes down what is asked of it, together with where the gate stood."""

    def __init__(self, gate: Gate, lease: Lease) -> None:
        self.gate, self.lease = gate, lease
        self.calls: list[Any] = []
        self.positions: dict[str, Position] = {}
        self.answers: dict[str, Sequence[Any]] = {}
        self.failing: set[str] = set()
        self.paused = False
        self.cache_resets = True
        self.lease_ends_while_pausing = False

    def _note(self, name: str, *details: Any) -> None:
        self.calls.append((name, *details) if details else name)
        self.positions[name] = self.gate.position
        if name in self.failing:
            raise RuntimeError(f"{name} broke")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self._note("pause", mode, clear_cache)
        self.paused = True
        if self.lease_ends_while_pausing:
            self.lease.until = float("-inf")

    async def resume_generation(self) -> None:
        self._note("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Sequence[Any]:
        self._note(method, *args)
        return self.answers.get(method, FINE)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self._note("reset prefix", reset_running_requests, reset_connector)
        return self.cache_resets

    async def reset_mm_cache(self) -> None:
        self._note("reset mm")

    async def reset_encoder_cache(self) -> None:
        self._note("reset encoder")


class Side:
    """A control side at time `now`, with a lease of 10 s from 0."""

    def __init__(self, *, leads: bool = True) -> None:
        self.now = 0.0
        self.gate = Gate(clock=lambda: self.now)
        self.lease = Lease(lambda: self.now)
        self.lease.renew(10.0)
        self.engine = FakeEngine(self.gate, self.lease)
        self.reattached: list[str] = []
        self.control = Control(
            self.engine, self.gate, self.lease, self.reattached.append, lambda n: f"models/policy/versions/{n}", lambda: self.now
        )
        if leads:
            self.do(LEAD)
            self.engine.calls.clear()

    def do(self, *orders: Order) -> Outcome | None:
        """Carries them out; the last one's outcome."""
        return [run(self.control.carry_out(order)) for order in orders][-1]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def apply(version: int, install: str = "i1", mode: Any = "keep") -> Order:
    return Order(Kind.APPLY, install, version, mode)


def resume(version: int, install: str = "i1") -> Order:
    return Order(Kind.RESUME, install, version)


def stage(version: int, install: str = "i1") -> Order:
    return Order(Kind.STAGE, install, version)


def serving(version: int = 1) -> Side:
    side = Side()
    side.do(resume(version, "i0"))
    side.engine.calls.clear()
    return side


def test_who_leads_has_its_workers_tell_the_daemon_what_they_hold() -> None:
    side = Side(leads=False)
    assert side.do(LEAD) is None
    assert side.engine.calls == ["resharder_describe"]


def test_the_boot_version_opens_the_gate_without_touching_an_engine_that_runs() -> None:
    side = Side()
    assert side.do(resume(1, "boot")) == Outcome(Kind.RESUME, "boot")
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 1, [])


def test_staging_goes_to_the_workers_by_the_versions_name_and_leaves_the_gate_open() -> None:
    side = serving()
    assert side.do(stage(2)) == Outcome(Kind.STAGE, "i1")
    assert side.engine.calls == [("resharder_stage", "i1", "models/policy/versions/2")]
    assert side.gate.position is Position.OPEN


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_install_holds_the_gate_pauses_applies_resets_caches_and_stays_paused_until_resumed(mode: str) -> None:
    side = serving()
    assert side.do(apply(2, mode=mode)) == Outcome(Kind.APPLY, "i1")
    assert side.engine.calls == [
        ("pause", mode, True),
        ("resharder_apply", "i1"),
        ("reset prefix", True, True),
        "reset mm",
        "reset encoder",
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
def test_a_side_that_does_not_lead_refuses_to_stage_and_to_apply(order: Order) -> None:
    side = Side(leads=False)
    outcome = side.do(order)
    assert outcome is not None
    assert (outcome.ok, outcome.error) == (False, f"{order.kind.name} came to a control side that does not lead")
    assert side.engine.calls == []


def test_a_side_that_does_not_lead_closes_and_opens_its_gate_and_leaves_the_engine_alone() -> None:
    side = Side(leads=False)
    side.engine.paused = True
    side.do(resume(1, "i0"))
    side.do(Order(Kind.CLOSE, "i1", 2))
    assert side.gate.position is Position.HELD
    side.do(resume(2))
    assert (side.gate.position, side.gate.version, side.engine.calls) == (Position.OPEN, 2, [])


def test_a_close_without_an_install_shuts_the_gate_with_the_daemons_reason() -> None:
    side = serving()
    side.do(Order(Kind.CLOSE, reason="the workers do not hold one version"))
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
    assert side.engine.calls == [("pause", "wait", True)]
    assert side.reattached == ["the lease expired while pausing"]
    side.lease.renew(20.0)
    assert side.do(apply(2, mode="wait")) == Outcome(Kind.APPLY, "i1")
    assert side.engine.calls[1] == ("resharder_apply", "i1")


def test_a_side_that_takes_the_lead_from_one_that_paused_the_engine_resumes_it() -> None:
    side = Side()
    side.engine.paused = True
    side.do(resume(1))
    assert (side.engine.calls, side.engine.paused) == (["resume"], False)


def test_a_resumption_without_a_version_is_refused() -> None:
    side = Side()
    outcome = side.do(resume(0))
    assert outcome is not None
    assert (outcome.ok, outcome.error, side.gate.position) == (False, "expected a version to resume on, got 0", Position.SHUT)


def test_orders_are_read_from_the_wire_and_unknown_ones_are_refused() -> None:
    message = server_pb2.Order(kind="APPLY", install="i", version=3, pause_mode=resources_pb2.WAIT, reason="r")
    assert order_from_proto(message) == Order(Kind.APPLY, "i", 3, "wait", "r")
    assert order_from_proto(server_pb2.Order(kind="STAGE")).mode == "keep"
    with pytest.raises(ValueError, match="99 is not a valid Kind"):
        order_from_proto(server_pb2.Order(kind=99))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a pause mode"):
        order_from_proto(server_pb2.Order(kind="APPLY", pause_mode=9))  # type: ignore[arg-type]
