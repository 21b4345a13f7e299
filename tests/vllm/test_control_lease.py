"""The lease thread against a scripted daemon: a real gRPC server in this process that sends what a test tells it to."""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc
import pytest
from resharder.client.inference.control.gate import ServerLease
from resharder.client.inference.control.lease import ControlIdentity, LeaseThread
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.rpc.channel import Channel
from resharder.v1 import server_pb2, server_pb2_grpc
from resharder.v1.resources_pb2 import Power
from resharder.v1.server_pb2 import Order

from tests.support.observing import wait_until
from tests.support.ports import free_port

LEASE, SHORT = 60.0, 1.0  # seconds: one that a busy machine does not cost, and one that ends while a test waits for it
PATIENCE = 60.0
APPLY = server_pb2.Order(kind="APPLY", install="i1", version=2)
STAGE = server_pb2.Order(kind="STAGE", install="i1", version=2)


class Stream:
    """One Attend call: reports that came, orders to send; None ends it."""

    def __init__(self, daemon: "ScriptedDaemon") -> None:
        self.reports: queue.Queue[server_pb2.ControlReport] = queue.Queue()
        self.orders: queue.Queue[server_pb2.Order | None] = queue.Queue()
        self.ended = threading.Event()
        self._daemon = daemon

    def read(self, reports: Iterator[server_pb2.ControlReport]) -> None:
        try:
            for report in reports:
                self.reports.put(report)
                if self._daemon.renews:
                    self.orders.put(server_pb2.Order(kind="RENEWED", lease_seconds=self._daemon.lease))
        except grpc.RpcError:
            pass
        self.orders.put(None)
        self.ended.set()

    def next_report(self) -> server_pb2.ControlReport:
        return self.reports.get(timeout=PATIENCE)

    def next_outcome(self) -> server_pb2.ControlReport:
        return self.next_that(lambda report: bool(report.done))

    def next_that(self, wanted: Callable[[server_pb2.ControlReport], bool]) -> server_pb2.ControlReport:
        """Renewals that lie before it are passed over."""
        while not wanted(report := self.next_report()):
            pass
        return report


class ScriptedDaemon(server_pb2_grpc.ServerServiceServicer):
    def __init__(self, port: int = 0, *, lease: float = LEASE, renews: bool = True) -> None:
        self.lease, self.renews = lease, renews
        self.claims: list[server_pb2.ClaimServerRequest] = []
        self.streams: queue.Queue[Stream] = queue.Queue()
        self.server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        server_pb2_grpc.add_ServerServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def ClaimServer(self, request: server_pb2.ClaimServerRequest, context: grpc.ServicerContext) -> server_pb2.Claim:
        self.claims.append(request)
        return server_pb2.Claim(server=f"servers/{request.server}", model="policy", lease_seconds=self.lease)

    def Attend(self, reports: Iterator[server_pb2.ControlReport], context: grpc.ServicerContext) -> Iterator[server_pb2.Order]:
        stream = Stream(self)
        threading.Thread(target=stream.read, args=(reports,), daemon=True).start()
        self.streams.put(stream)
        yield from iter(stream.orders.get, None)

    def next_stream(self) -> Stream:
        return self.streams.get(timeout=PATIENCE)

    def close(self) -> None:
        self.server.stop(0).wait()

    def __enter__(self) -> "ScriptedDaemon":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Side:
    """A lease thread with an event loop of its own in another thread, and orders that `answer` carries out."""

    def __init__(self, port: int, answer: Callable[[ControlOrder], Awaitable[Outcome | None]] | None = None) -> None:
        self.orders: list[ControlOrder] = []
        self.began = threading.Event()

        async def carry_out(order: ControlOrder) -> Outcome | None:
            self.orders.append(order)
            self.began.set()
            return await answer(order) if answer else Outcome(order.kind, order.install, True, "", 0.5)

        self.loop = asyncio.new_event_loop()
        self.runner = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.runner.start()
        self.lease = ServerLease()
        self.identity = ControlIdentity("s1", 2, "host:8000", passes_kv=True)
        self.about, self.failure = (Power.POWER_UNSPECIFIED, 0, 0), ""
        channel = Channel(f"127.0.0.1:{port}")
        self.thread = LeaseThread(
            channel, self.identity, self.lease, carry_out, lambda: self.about, self.loop, lambda: self.failure
        )
        self.thread.start()

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.thread.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.runner.join()


def test_it_claims_its_server_says_who_it_is_and_learns_its_model() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        first = daemon.next_stream().next_report()
        assert (daemon.claims[0].server, daemon.claims[0].boot) == ("s1", False)
        assert (first.server, first.control, first.world_size, first.address) == ("s1", side.identity.nonce, 2, "host:8000")
        assert (first.install, first.done) == ("", 0)
        assert side.thread.model == "policy"


def test_an_order_is_carried_out_on_the_loop_and_reported() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        stream.orders.put(APPLY)
        report = stream.next_outcome()
        assert side.orders == [ControlOrder(Order.APPLY, "i1", 2)]
        assert (report.install, report.done, report.ok, report.pause_seconds) == ("i1", server_pb2.Order.APPLY, True, 0.5)


def test_every_report_says_how_awake_the_engine_is_and_how_many_requests_it_answers_and_news_are_told_at_once() -> None:
    with ScriptedDaemon(renews=False) as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        first = stream.next_report()
        assert (first.power, first.in_flight, first.passes_kv) == (0, 0, True)
        stream.orders.put(server_pb2.Order(kind="RENEWED", lease_seconds=1800))  # the next renewal is ten minutes away
        wait_until(lambda: side.lease.alive, "the lease is taken")
        side.about = (Power.ASLEEP_2, 3, 7)
        side.thread.report_now()
        report = stream.next_that(lambda report: bool(report.power))
        assert (report.power, report.in_flight, report.serving, report.done) == (Power.ASLEEP_2, 3, 7, 0)
        stream.orders.put(STAGE)
        outcome = stream.next_outcome()
        assert (outcome.power, outcome.in_flight) == (Power.ASLEEP_2, 3)


def test_a_daemon_that_allows_no_server_without_a_lease_says_so_with_each_renewal() -> None:
    with ScriptedDaemon(renews=False) as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        for strict in (True, False):
            stream.next_report()
            stream.orders.put(server_pb2.Order(kind="RENEWED", lease_seconds=LEASE, strict_lease=strict))
            wait_until(lambda strict=strict: side.lease.strict == strict, f"the lease is strict: {strict}")  # type: ignore[misc]
            side.thread.report_now()


def test_the_lease_is_renewed_while_the_event_loop_is_blocked_for_longer() -> None:
    release = threading.Event()

    async def block(order: ControlOrder) -> None:
        release.wait(PATIENCE)

    with ScriptedDaemon(lease=SHORT) as daemon, Side(daemon.port, block) as side:
        daemon.next_stream().orders.put(STAGE)
        assert side.began.wait(PATIENCE)
        blocked = time.monotonic()
        wait_until(lambda: side.lease.until > blocked + 2 * SHORT, "it is renewed a whole lease after the loop was blocked")
        assert not release.is_set()
        release.set()


def test_a_renewal_counts_from_when_the_report_left() -> None:
    with ScriptedDaemon(renews=False) as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        stream.next_report()
        left = time.monotonic()
        time.sleep(0.3)
        stream.orders.put(server_pb2.Order(kind="RENEWED", lease_seconds=LEASE))
        wait_until(lambda: side.lease.alive, "the lease is taken")
        assert side.lease.until <= left + LEASE


def test_a_daemon_that_stops_answering_costs_the_lease_and_gets_another_stream() -> None:
    with ScriptedDaemon(lease=SHORT) as daemon, Side(daemon.port) as side:
        wait_until(lambda: side.lease.alive, "the lease is taken")
        daemon.renews = False
        wait_until(lambda: not side.lease.alive, "the lease ends")
        claims = len(daemon.claims)
        wait_until(lambda: len(daemon.claims) > claims, "it claims its server anew")
        daemon.renews = True
        wait_until(lambda: side.lease.alive, "the lease is taken again")


def test_one_order_at_a_time_and_those_not_begun_are_dropped_when_the_stream_breaks() -> None:
    release = threading.Event()

    async def wait(order: ControlOrder) -> Outcome:
        while not release.is_set():
            await asyncio.sleep(0.01)
        return Outcome(order.kind, order.install)

    with ScriptedDaemon() as daemon, Side(daemon.port, wait) as side:
        first = daemon.next_stream()
        first.orders.put(APPLY)
        first.orders.put(server_pb2.Order(kind="RESUME", install="i1", version=2))
        assert side.began.wait(PATIENCE)
        first.orders.put(None)
        second = daemon.next_stream()
        assert second.next_report().install == "i1", "the first report has to name the install that is being carried out"
        release.set()
        assert second.next_outcome().done == server_pb2.Order.APPLY
        assert [order.kind for order in side.orders] == [Order.APPLY]
        second.orders.put(server_pb2.Order(kind="RESUME", install="i1", version=2))
        assert second.next_outcome().done == server_pb2.Order.RESUME


def test_an_error_of_any_kind_costs_the_stream_and_not_the_lease_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [KeyError("first")]

    def claim(self: LeaseThread, claim: Callable[[LeaseThread], None] = LeaseThread._claim) -> None:
        claim(self)
        if failures:
            raise failures.pop()

    monkeypatch.setattr(LeaseThread, "_claim", claim)
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        assert daemon.next_stream().next_report().control == side.identity.nonce
    assert failures == []


def test_it_comes_back_to_a_daemon_that_was_restarted() -> None:
    daemon = ScriptedDaemon(free_port(), lease=SHORT)
    with Side(daemon.port) as side:
        daemon.next_stream().next_report()
        daemon.close()
        wait_until(lambda: not side.lease.alive, "the lease ends")
        with ScriptedDaemon(daemon.port) as again:
            again.next_stream().next_report()
            assert {claim.server for claim in again.claims} == {"s1"}
            wait_until(lambda: side.lease.alive, "the lease is taken again")


def test_an_order_of_a_later_release_is_left_out_and_the_next_one_is_carried_out() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        stream.orders.put(server_pb2.Order(kind=77))  # type: ignore[arg-type]
        stream.orders.put(STAGE)
        assert stream.next_outcome().done == server_pb2.Order.STAGE
        assert [order.kind for order in side.orders] == [Order.STAGE]


def test_closing_ends_the_stream_and_no_other_follows() -> None:
    with ScriptedDaemon() as daemon:
        side = Side(daemon.port)
        stream = daemon.next_stream()
        stream.next_report()
        with side:
            pass
        assert stream.ended.wait(PATIENCE)
        wait_until(lambda: not side.thread._thread.is_alive(), "the thread ends")
        assert daemon.streams.empty()


def test_it_says_which_term_it_has_seen_and_an_order_knows_the_span_it_came_in() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        assert stream.next_report().term == 0
        stream.orders.put(server_pb2.Order(kind="STAGE", install="i1", term=7))
        stream.next_outcome()
        stream.orders.put(None)
        second = daemon.next_stream()
        assert second.next_report().term == 7
        second.orders.put(server_pb2.Order(kind="STAGE", install="i2", term=8))
        second.next_outcome()
        assert [order.term for order in side.orders] == [7, 8]
        assert not side.lease.permits(side.orders[0].span)
        assert side.lease.permits(side.orders[1].span)


def test_a_later_stream_that_named_an_order_which_is_given_up_is_ended_too() -> None:
    """The daemon waits for the outcome of what a first report names, and there is none."""
    release = threading.Event()

    async def give_up(order: ControlOrder) -> None:
        while not release.is_set():
            await asyncio.sleep(0.01)

    with ScriptedDaemon() as daemon, Side(daemon.port, give_up) as side:
        first = daemon.next_stream()
        first.orders.put(APPLY)
        assert side.began.wait(PATIENCE)
        first.orders.put(None)
        assert daemon.next_stream().next_report().install == "i1"
        release.set()
        assert daemon.next_stream().next_report().install == ""


def test_a_lease_that_lapsed_begins_a_new_span_and_the_first_renewal_does_not() -> None:
    now = 0.0
    lease = ServerLease(lambda: now)
    span = lease.span
    lease.renew(10.0)
    assert lease.permits(span)
    now = 9.0
    lease.renew(19.0)
    assert lease.permits(span)
    now = 19.0
    assert not lease.permits(span)
    lease.renew(30.0)
    assert (lease.alive, lease.permits(span), lease.permits(lease.span)) == (True, False, True)


def test_an_engine_that_failed_is_the_last_thing_that_is_reported() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        assert stream.next_report().failure == ""
        side.failure = "its engine died"
        side.thread.report_now()
        last = stream.next_that(lambda report: bool(report.failure))
        assert (last.failure, last.leaving) == ("its engine died", False)
        side.thread._thread.join(PATIENCE)
        assert not side.thread._thread.is_alive(), "no stream follows"


def test_a_process_that_ends_after_its_engine_failed_does_not_leave() -> None:
    with ScriptedDaemon() as daemon, Side(daemon.port) as side:
        stream = daemon.next_stream()
        stream.next_report()
        side.failure = "its engine died"
        side.thread.leave()
        last = stream.next_that(lambda report: bool(report.failure) or report.leaving)
        assert (last.failure, last.leaving) == ("its engine died", False)
