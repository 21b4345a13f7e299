"""A control side that is stopped in the middle of an order, past its lease: the engine does not obey it when it goes on.

The engine core is simulated as vLLM's is built: one call after the other, each a message of a client with `_call_utility_async`.
"""

import asyncio
from typing import Any

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.control.fence import Fence, clock_id
from resharder.client.inference.control.gate import Position
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.vllm.engine_core import guard
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

from tests.support.fenced_engine import LEASE, NEXT_TERM, OWN_TERM, Server, Side


def paused_by_another() -> tuple[Server, Side]:
    """A side that has just taken over from one that paused the engine; RESUME comes next, and resets the caches first."""
    server = Server()
    server.core.paused = True
    return server, server.side()


LAPSES = ("past_its_lease", "past_its_lease_and_renewed", "cut_off")
RESUMING = ("is_scheduler_paused", "is_sleeping", "resharder_describe", "reset_prefix_cache", "reset_encoder_cache")


@pytest.mark.parametrize("lapse", LAPSES)
@pytest.mark.parametrize("at", RESUMING)
def test_a_side_stopped_before_it_resumes_does_not_resume_and_opens_nothing(at: str, lapse: str) -> None:
    async def play() -> None:
        server, side = paused_by_another()
        await side.do(Order.LEAD)
        side.engine.engine_core.meanwhile[at] = getattr(side, lapse)
        assert await side.do(Order.RESUME, 1) is None
        assert not side.engine.engine_core.meanwhile, "it was stopped"
        assert (server.core.paused, side.gate.position) == (True, Position.SHUT)
        assert len(side.reattached) == 1
        side.renew()
        await side.serve(1, NEXT_TERM)
        assert not server.core.paused

    asyncio.run(play())


def test_a_resumption_on_its_way_when_the_lease_ends_is_refused_by_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        server, side = paused_by_another()
        await side.do(Order.LEAD)
        side.engine.engine_core.meanwhile["resume_scheduler"] = side.past_its_lease
        assert await side.do(Order.RESUME, 1) is None
        assert (server.core.paused, side.gate.position) == (True, Position.SHUT)
        assert side.reattached == ["RESUME was refused: the lease of the order ended 1.000 s ago"]
        assert "RESUME of version 1 (i1) was refused: the lease of the order ended" in caplog.text

    asyncio.run(play())


@pytest.mark.parametrize("lapse", LAPSES)
@pytest.mark.parametrize("strict", [False, True])
def test_a_gate_does_not_open_on_a_lease_that_lapsed_while_the_engine_resumed(lapse: str, strict: bool) -> None:
    async def play() -> None:
        server, side = paused_by_another()
        side.lease.strict = strict
        await side.do(Order.LEAD)
        side.engine.engine_core.afterwards["resume_scheduler"] = getattr(side, lapse)
        assert await side.do(Order.RESUME, 1) is None
        assert (server.core.paused, side.gate.position, side.gate.version) == (False, Position.SHUT, 0)
        side.renew()
        await side.serve(1, NEXT_TERM)

    asyncio.run(play())


@pytest.mark.parametrize("at", [*RESUMING, "resume_scheduler"])
def test_a_stopped_leader_does_not_resume_what_the_next_one_has_paused(at: str) -> None:
    """Its stream is gone, its lease is not over yet."""

    async def play() -> None:
        server, old = paused_by_another()
        new = server.side()
        await old.do(Order.LEAD)

        async def the_next_one_leads() -> None:
            assert await new.do(Order.LEAD, term=NEXT_TERM) is None
            applied = await new.do(Order.APPLY, 2, term=NEXT_TERM)
            assert applied is not None
            assert applied.ok
            server.core.done.clear()

        old.engine.engine_core.meanwhile[at] = the_next_one_leads
        assert await old.do(Order.RESUME, 1) is None
        assert (server.core.paused, server.core.done, old.gate.position) == (True, [], Position.SHUT)
        assert "expected an order of term 2 or later, got one of term 1" in old.reattached[0]
        assert old.lease.term == NEXT_TERM, "which it tells the daemon"

        await new.do(Order.RESUME, 2, term=NEXT_TERM)
        assert (server.core.paused, new.gate.version) == (False, 2)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("at", "kind", "fields"),
    [
        ("pause_scheduler", Order.APPLY, {"version": 2}),
        ("resharder_apply", Order.APPLY, {"version": 2}),
        ("reset_prefix_cache", Order.APPLY, {"version": 2}),
        ("sleep", Order.SLEEP, {"power": Power.ASLEEP_1}),
        ("wake_up", Order.WAKE, {"power": Power.AWAKE}),
        ("resharder_stage", Order.STAGE, {"version": 2}),
        ("resharder_unstage", Order.UNSTAGE, {"version": 2}),
    ],
)
@pytest.mark.parametrize("leader", ["none", "another"])
def test_whatever_a_stopped_side_was_about_to_do_changes_nothing(
    at: str, kind: Order.Kind, fields: dict[str, Any], leader: str
) -> None:
    async def play() -> None:
        server = Server()
        old, new = server.side(), server.side()
        await old.serve(1)
        if kind == Order.WAKE:
            await old.do(Order.SLEEP, power=Power.ASLEEP_1, install="p1")

        async def stopped() -> None:
            server.now += 1 if another else 2 * LEASE
            if another:
                await new.do(Order.LEAD, term=NEXT_TERM)
            state[:] = [server.core.paused, set(server.core.slumber.tags), list(server.core.done)]

        state: list[Any] = []
        another, needs_no_lease = leader == "another", kind in (Order.STAGE, Order.UNSTAGE)
        old.engine.engine_core.meanwhile[at] = stopped
        outcome = await old.do(kind, **fields, install="x")
        if needs_no_lease and not another:
            assert outcome == Outcome(kind, "x")
            return
        assert outcome is None
        assert state == [server.core.paused, server.core.slumber.tags, server.core.done]
        assert len(old.reattached) == 1

    asyncio.run(play())


@pytest.mark.parametrize("lapse", LAPSES)
def test_a_lease_that_ends_while_requests_drain_leaves_the_engine_awake(lapse: str) -> None:
    async def play() -> None:
        server = Server()
        side = server.side()
        await side.serve(1)
        side.engine.engine_core.afterwards["pause_scheduler"] = getattr(side, lapse)
        assert await side.do(Order.SLEEP, power=Power.ASLEEP_2, mode="wait") is None
        assert (server.core.done, side.gate.position) == (["pause"], Position.SHUT)
        side.renew()
        await side.serve(1, NEXT_TERM)
        assert not server.core.paused

    asyncio.run(play())


def test_a_side_that_led_before_leaves_the_engine_to_the_one_that_leads_now() -> None:
    async def play() -> None:
        server = Server()
        old, new = server.side(), server.side()
        await old.serve(1)
        await old.do(Order.APPLY, 2)
        await new.do(Order.LEAD, term=NEXT_TERM)
        server.core.done.clear()
        refused = await old.do(Order.STAGE, 3, term=NEXT_TERM)
        assert refused is not None
        assert refused.error == "STAGE is for the leading control side, and this one does not lead"
        assert await old.do(Order.RESUME, 2, term=NEXT_TERM) == Outcome(Order.RESUME, "i2", pause_seconds=0.0)
        assert (server.core.paused, server.core.done) == (True, [])
        assert (old.gate.position, old.gate.version) == (Position.OPEN, 2)
        await new.do(Order.RESUME, 2, term=NEXT_TERM)
        assert not server.core.paused

    asyncio.run(play())


def test_the_next_leader_resumes_the_engine_though_its_gate_was_open_already() -> None:
    """The one before ended between two RESUMEs: the gate of the others had opened, the engine had not gone on."""

    async def play() -> None:
        server = Server()
        old, new = server.side(), server.side()
        await old.serve(1)
        await old.do(Order.APPLY, 2)
        server.core.version = 2
        await new.do(Order.RESUME, 2)
        assert (new.gate.position, server.core.paused) == (Position.OPEN, True)
        await new.do(Order.LEAD, term=NEXT_TERM)
        await new.do(Order.RESUME, 2, term=NEXT_TERM)
        assert (new.gate.position, server.core.paused) == (Position.OPEN, False)

    asyncio.run(play())


def test_a_side_that_leads_again_pauses_anew_what_another_has_resumed_meanwhile() -> None:
    async def play() -> None:
        server = Server()
        old, new = server.side(), server.side()
        await old.serve(1)
        await old.do(Order.APPLY, 2)
        await new.serve(2, NEXT_TERM)
        assert not server.core.paused
        await old.do(Order.LEAD, term=NEXT_TERM + 1)
        server.core.done.clear()
        await old.do(Order.APPLY, 3, term=NEXT_TERM + 1)
        assert server.core.done == ["pause", "resharder_apply", "reset"]

    asyncio.run(play())


def test_an_order_received_before_the_stream_broke_is_not_begun_after_it() -> None:
    async def play() -> None:
        server, side = paused_by_another()
        await side.do(Order.LEAD)
        before = ControlOrder(Order.RESUME, "i1", 1, term=OWN_TERM, span=side.lease.span)
        await side.cut_off()
        assert await side.control.carry_out(before) is None
        assert (server.core.paused, side.gate.position) == (True, Position.SHUT)

    asyncio.run(play())


def test_a_leader_of_a_lower_term_learns_the_engines_and_leads_once_the_daemon_counts_from_there() -> None:
    """A daemon on a new store, while servers live on."""

    async def play() -> None:
        server = Server()
        side = server.side()
        await side.serve(1, term=100)
        assert await side.do(Order.LEAD, term=7) is None
        assert side.reattached == [
            "LEAD was refused: expected an order of term 100 or later, got one of term 7: another control side leads"
        ]
        assert side.lease.term == 100
        await side.serve(2, term=101)

    asyncio.run(play())


@pytest.mark.parametrize(("clock", "refused"), [(clock_id(), True), ("another host's", False), ("", False)])
def test_deadlines_are_compared_on_one_clock_alone_and_terms_everywhere(clock: str, refused: bool) -> None:
    assert clock_id()
    fence = Fence(lambda: 100.0)
    assert bool(fence.refuse([5, 99.0, clock])) == refused
    assert not fence.refuse([5, 101.0, clock])
    assert not fence.refuse([5, None, clock])
    assert "term 4" in fence.refuse([4, 101.0, clock])
    assert not fence.refuse([0, 101.0, clock]), "of a daemon that does not number leadership"
    assert "term 4" in fence.refuse([4, 101.0, clock])


def test_an_engine_that_cannot_be_fenced_is_refused() -> None:
    with pytest.raises(UsageError, match="expected an AsyncLLM with its engine core in another process, got a NoneType"):
        guard(None)


def test_without_terms_an_older_daemons_orders_are_carried_out() -> None:
    async def play() -> None:
        server, side = paused_by_another()
        await side.serve(1, term=0)
        assert not server.core.paused

    asyncio.run(play())
