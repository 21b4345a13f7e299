"""The control side's stream to the daemon: renews the server's lease, receives orders and reports their outcomes.

The stream has its own thread, so that the lease survives an event loop that is busy for longer than the
lease. Orders are executed on the loop. When the stream breaks, orders that have not begun are dropped
(the daemon sends them again), and the first report of the next stream names the order in progress. A
broken stream does not change the gate: while the daemon is away, the server serves its version.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace

import grpc
from resharder.client.errors import ResharderError
from resharder.client.inference.control.gate import ServerLease
from resharder.client.inference.control.orders import ControlOrder, Outcome, order_from_proto
from resharder.client.rpc.channel import Channel
from resharder.converters.failpoints import failpoint
from resharder.v1 import server_pb2, server_pb2_grpc
from resharder.v1.resources_pb2 import Power

logger = logging.getLogger("resharder.inference.lease")

FIRST_LEASE_SECONDS = 15.0  # assumed until the daemon's first answer
LONGEST_PAUSE_SECONDS = 5.0  # between attempts to reach the daemon
LEAVE_SECONDS = 5.0  # for the daemon to receive the last report, on a busy host too


@dataclass(frozen=True)
class ControlIdentity:
    """Claim of an API server's control side: a server of a size, at an address, for a model and a fleet."""

    server: str
    """The server's id, shared by all of its API servers."""
    world_size: int
    """Number of workers, over all data parallel replicas."""
    address: str = ""
    model: str = ""
    """The model to follow; empty selects the daemon's only model."""
    fleet: str = ""
    passes_kv: bool = False
    """Whether the engine exchanges KV cache with other servers."""
    base_server: str = ""
    """For an adapter: the server that it is loaded into."""
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique for each lifetime of an API server."""


class LeaseThread:
    """The thread of the stream.

    Args:
        channel: Channel to the daemon. `close` closes it.
        identity: Identity of this control side.
        lease: The lease to renew.
        carry_out: Executes an order; runs on `loop`, one order at a time.
        status: Returns the contents of a report: the power state, the number of requests in flight, and
            the version that the gate is open on. Called on the thread.
        loop: The engine's event loop.
        failure: Returns why the engine has ended without an order; empty while it has not. Called on any thread.
    """

    def __init__(
        self,
        channel: Channel,
        identity: ControlIdentity,
        lease: ServerLease,
        carry_out: Callable[[ControlOrder], Awaitable[Outcome | None]],
        status: Callable[[], tuple[Power, int, int]],
        loop: asyncio.AbstractEventLoop,
        failure: Callable[[], str] = lambda: "",
    ) -> None:
        self._channel, self._identity, self._lease = channel, identity, lease
        self._carry_out, self._status, self._loop, self._failure = carry_out, status, loop, failure
        self.model = identity.model
        """The model's id; the daemon's answer to the first claim fills an empty one."""
        self._stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
        self._one_at_a_time = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="resharder-lease", daemon=True)
        self._closing, self._leaving = threading.Event(), False
        # `_changed` guards the following attributes and is notified when one of them changes.
        self._changed = threading.Condition()
        self._stream = 0  # number of the stream; orders and reports of earlier streams are dropped
        self._call: grpc.Call | None = None
        self._busy = ""  # install of the order in progress
        self._report_due = False  # a report without an outcome must be sent at once
        self._outcomes: deque[Outcome] = deque()
        self._sent_at: deque[float] = deque()  # monotonic times of reports without an answer RENEWED
        self._lease_seconds = FIRST_LEASE_SECONDS

    def start(self) -> None:
        """Start the thread. Returns at once; the daemon may be away."""
        self._thread.start()

    def close(self) -> None:
        """End the stream and the thread. The daemon takes this as the release of the lease."""
        self._closing.set()
        self.reattach("closed")
        if self._thread.is_alive():
            self._thread.join(5)
        self._channel.close()

    def leave(self) -> None:
        """Announce the end of this process, and close.

        The daemon removes a server whose control sides have all left. If the engine has failed, the server is LOST instead.
        """
        with self._changed:
            self._leaving = self._report_due = True
            attending = self._call is not None
            self._changed.notify_all()
        self._closing.set()
        if attending and self._thread.is_alive():
            self._thread.join(LEAVE_SECONDS)  # the daemon ends the stream
        self.close()

    def reattach(self, reason: str) -> None:
        """End the stream; another follows."""
        with self._changed:
            call = self._call
        if call is not None:
            logger.info("ending the stream to the daemon: %s", reason)
            call.cancel()

    def report_now(self) -> None:
        """Send a report at once."""
        with self._changed:
            self._report_due = True
            self._changed.notify_all()

    # Called on the thread

    def _run(self) -> None:
        pause, last = 0.1, ""
        while not self._closing.is_set() and not self._failure():
            renewed = self._lease.until
            problem = self._attend()
            if self._closing.is_set():
                return
            if problem != last:
                logger.warning("no orders from the daemon at %s: %s", self._channel.endpoint, problem)
            last = problem
            pause = 0.1 if self._lease.until > renewed else min(2 * pause, LONGEST_PAUSE_SECONDS)
            self._closing.wait(pause)

    def _attend(self) -> str:
        """Run one stream and return why it ended."""
        number = self._begin_stream()
        try:
            self._claim()
            failpoint("control.attend")
            with self._changed:  # the first report waits for it: `leave` finds the call of every report that the daemon has
                call = self._call = self._channel.begin(self._stub.Attend, self._reports(number))
            if self._closing.is_set():  # `close` may have run before `_call` was set
                call.cancel()
            for message in self._channel.stream(call):
                self._take(number, message)
            return "the daemon ended the stream"
        except ResharderError as error:
            return str(error)
        except Exception as error:  # the next stream may do better, and without one the server is lost
            logger.exception("the stream of orders from the daemon failed")
            return f"{type(error).__name__}: {error}"
        finally:
            self._end_stream()

    def _claim(self) -> None:
        """Register the server with a daemon that has no record of it: one that it did not boot from, or that was restarted."""
        identity = self._identity
        request = server_pb2.ClaimServerRequest(
            server=identity.server,
            model=identity.model,
            fleet=identity.fleet,
            base_server=identity.base_server,
            boot=False,
            renews=True,
        )
        failpoint("control.claim")
        claim = self._channel.call(self._stub.ClaimServer, request, patience=0)
        self.model = claim.model.removeprefix("models/")

    def _begin_stream(self) -> int:
        with self._changed:
            self._stream += 1
            self._sent_at.clear()
            return self._stream

    def _end_stream(self) -> None:
        with self._changed:
            self._stream += 1
            call, self._call = self._call, None
            self._changed.notify_all()
        self._lease.end_span()
        if call is not None:
            call.cancel()

    def _reports(self, number: int) -> Iterator[server_pb2.ControlReport]:
        """Yield the reports of one stream: the identity, then outcomes, and a renewal at least every third of the lease."""
        message = server_pb2.ControlReport(install=self._busy)
        while True:
            yield self._report(message)
            if message.leaving or message.failure:
                return
            with self._changed:
                outcome = self._next_outcome(number, time.monotonic())
                if self._stream != number:
                    return
                # The connection may be dead without an error.
                unanswered = bool(self._sent_at) and time.monotonic() - self._sent_at[0] > self._lease_seconds
            if unanswered:
                self.reattach(f"the daemon did not answer within {self._lease_seconds:g} s")
                return
            message = server_pb2.ControlReport() if outcome is None else _outcome_to_proto(outcome)

    def _next_outcome(self, number: int, last: float) -> Outcome | None:
        """Wait for an outcome; `None` if a renewal or another report is due, or the stream has ended. Callers hold `_changed`."""
        while not self._outcomes and not self._report_due and self._stream == number:
            # Computed after each wake-up, because the daemon's first answer changes `_lease_seconds`.
            if (left := last + self._lease_seconds / 3 - time.monotonic()) <= 0:
                return None
            self._changed.wait(left)
        self._report_due = False
        return self._outcomes.popleft() if self._outcomes and self._stream == number else None

    def _report(self, message: server_pb2.ControlReport) -> server_pb2.ControlReport:
        failpoint("control.report")
        identity = self._identity
        message.server, message.control = identity.server, identity.nonce
        message.world_size, message.address, message.passes_kv = identity.world_size, identity.address, identity.passes_kv
        message.failure = self._failure()
        message.leaving = self._leaving and not message.failure
        power, message.in_flight, message.serving = self._status()
        message.power, message.term = power, self._lease.term
        with self._changed:
            self._sent_at.append(time.monotonic())
        return message

    def _take(self, number: int, message: server_pb2.Order) -> None:
        self._lease.observe_term(message.term)
        if message.kind == server_pb2.Order.RENEWED:
            self._renewed(message.lease_seconds, strict=message.strict_lease)
            return
        try:
            order = replace(order_from_proto(message), span=self._lease.span)
        except ValueError as error:
            logger.error("ignoring an order that this release does not support: %s", error)
            return
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._execute(number, order), self._loop)

    def _renewed(self, lease_seconds: float, *, strict: bool) -> None:
        with self._changed:
            self._lease_seconds = lease_seconds or self._lease_seconds
            # The lease counts from the report's departure: if this process was stopped, an answer may be old.
            since = self._sent_at.popleft() if self._sent_at else None
            self._changed.notify_all()
        if since is not None:
            self._lease.renew(since + self._lease_seconds, strict=strict)

    # Called on the loop

    async def _execute(self, number: int, order: ControlOrder) -> None:
        async with self._one_at_a_time:
            with self._changed:
                if self._stream != number:
                    return
                self._busy = order.install
            outcome = None
            try:
                outcome = await self._carry_out(order)
            finally:
                with self._changed:
                    # A later stream may have reported the order as in progress; the daemon would wait for its outcome.
                    reported_as_busy = outcome is None and self._stream != number and bool(self._busy)
                    self._busy = ""
                    if outcome is not None:
                        self._outcomes.append(outcome)
                    self._changed.notify_all()
                if reported_as_busy:
                    self.reattach("an order ended without an outcome")


def _outcome_to_proto(outcome: Outcome) -> server_pb2.ControlReport:
    done = server_pb2.Order.Kind.Name(outcome.kind)
    return server_pb2.ControlReport(
        install=outcome.install,
        done=done,
        ok=outcome.ok,
        error=outcome.error,
        pause_seconds=outcome.pause_seconds,
        timings=outcome.timings,
        restarting=outcome.restarting,
        workers_failed=outcome.workers_failed,
    )
