"""The control side's stream to the daemon: holds the server's lease, takes orders, tells how they went.

It has a thread of its own, so that an event loop which is busy for longer than the lease cannot lose it; orders are carried out
on the loop. When the stream breaks, orders not begun are dropped (the daemon gives them again) and the one being carried out is
named in the first report of the next stream. The gate is not touched: while the daemon is away, a server serves what it has.
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
from resharder.client.inference.power import PowerState
from resharder.client.rpc.channel import Channel
from resharder.v1 import server_pb2, server_pb2_grpc

logger = logging.getLogger("vllm.resharder.lease")

FIRST_LEASE_SECONDS = 15.0  # assumed until the daemon has said how long leases are
LONGEST_PAUSE_SECONDS = 5.0  # between attempts to reach the daemon


@dataclass(frozen=True)
class ControlIdentity:
    """One control side. `server` is shared by all API servers of one server, `nonce` is this one's lifetime."""

    server: str
    world_size: int  # workers, over all data parallel replicas
    address: str = ""
    model: str = ""  # empty: the daemon's only model
    fleet: str = ""
    passes_kv: bool = False  # its engine gives KV cache to other servers, or takes theirs
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)


class LeaseThread:
    """`carry_out` runs on `loop`, one order at a time. `about` is what every report says of this side, and is asked on the
    thread: how awake the engine is, how many requests are being answered, and the version that the gate is open on. `start`
    returns at once; the daemon need not be there."""

    def __init__(
        self,
        channel: Channel,
        identity: ControlIdentity,
        lease: ServerLease,
        carry_out: Callable[[ControlOrder], Awaitable[Outcome | None]],
        about: Callable[[], tuple[PowerState, int, int]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._channel, self._identity, self._lease = channel, identity, lease
        self._carry_out, self._about, self._loop = carry_out, about, loop
        self.model = identity.model  # as the daemon calls it, once it has answered
        self._stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
        self._one_at_a_time = asyncio.Lock()
        self._thread = threading.Thread(target=self._run, name="resharder-lease", daemon=True)
        self._closing = threading.Event()
        # Guarded by `_moved`, which is notified when any of them changes.
        self._moved = threading.Condition()
        self._stream = 0  # its number; what belongs to an earlier one has no say any more
        self._call: grpc.Call | None = None
        self._busy = ""  # the install of the order being carried out
        self._report_due = False  # there is something to report at once, though no order was carried out
        self._outcomes: deque[Outcome] = deque()
        self._sent_at: deque[float] = deque()  # of reports that were not answered by RENEWED yet
        self._lease_seconds = FIRST_LEASE_SECONDS

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the stream and the thread; the daemon takes the lease as given back."""
        self._closing.set()
        self.reattach("closed")
        if self._thread.is_alive():
            self._thread.join(5)
        self._channel.close()

    def reattach(self, reason: str) -> None:
        """Ends the stream; another follows."""
        with self._moved:
            call = self._call
        if call is not None:
            logger.info("ending the stream to the daemon: %s", reason)
            call.cancel()

    def report_now(self) -> None:
        """Has a report sent at once."""
        with self._moved:
            self._report_due = True
            self._moved.notify_all()

    # On the thread

    def _run(self) -> None:
        pause, last = 0.1, ""
        while not self._closing.is_set():
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
        """One stream, from its start to its end; why it ended."""
        number = self._begin_stream()
        try:
            self._claim()
            call = self._stub.Attend(self._reports(number))
            with self._moved:
                self._call = call
            if self._closing.is_set():  # close() may have looked for the call before it was there
                call.cancel()
            for message in self._channel.stream(call):
                self._take(number, message)
            return "the daemon ended the stream"
        except ResharderError as error:
            return str(error)
        finally:
            self._end_stream()

    def _claim(self) -> None:
        """Makes the server known to a daemon that it was not booted from, or whose memory of it is gone."""
        identity = self._identity
        request = server_pb2.ClaimServerRequest(
            server=identity.server, model=identity.model, fleet=identity.fleet, boot=False, renews=True
        )
        claim = self._channel.call(self._stub.ClaimServer, request, patience=0)
        self.model = claim.model.removeprefix("models/")

    def _begin_stream(self) -> int:
        with self._moved:
            self._stream += 1
            self._sent_at.clear()
            return self._stream

    def _end_stream(self) -> None:
        with self._moved:
            self._stream += 1
            call, self._call = self._call, None
            self._moved.notify_all()
        self._lease.break_off()
        if call is not None:
            call.cancel()

    def _reports(self, number: int) -> Iterator[server_pb2.ControlReport]:
        """What this side has to say: who it is, then how orders went, and a renewal at least every third of the lease."""
        message = server_pb2.ControlReport(install=self._busy)
        while True:
            yield self._report(message)
            with self._moved:
                outcome = self._next_outcome(number, time.monotonic())
                if self._stream != number:
                    return
                # No answer for a whole lease: the connection may be dead without saying so.
                stuck = bool(self._sent_at) and time.monotonic() - self._sent_at[0] > self._lease_seconds
            if stuck:
                self.reattach("no answer for a whole lease")
                return
            message = server_pb2.ControlReport() if outcome is None else _outcome_to_proto(outcome)

    def _next_outcome(self, number: int, last: float) -> Outcome | None:
        """None when it is time for a renewal, there is other news, or the stream has ended."""
        while not self._outcomes and not self._report_due and self._stream == number:
            # Looked at anew after each wake-up: the first answer says how long leases are.
            if (left := last + self._lease_seconds / 3 - time.monotonic()) <= 0:
                return None
            self._moved.wait(left)
        self._report_due = False
        return self._outcomes.popleft() if self._outcomes and self._stream == number else None

    def _report(self, message: server_pb2.ControlReport) -> server_pb2.ControlReport:
        identity = self._identity
        message.server, message.control = identity.server, identity.nonce
        message.world_size, message.address, message.passes_kv = identity.world_size, identity.address, identity.passes_kv
        power, message.in_flight, message.serving = self._about()
        message.power, message.term = power.value, self._lease.term
        with self._moved:
            self._sent_at.append(time.monotonic())
        return message

    def _take(self, number: int, message: server_pb2.Order) -> None:
        self._lease.saw(message.term)
        if message.kind == server_pb2.Order.RENEWED:
            self._renewed(message.lease_seconds, strict=message.strict_lease)
            return
        try:
            order = replace(order_from_proto(message), span=self._lease.span)
        except ValueError as error:
            logger.error("an order that this release does not know was left out: %s", error)
            return
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._in_turn(number, order), self._loop)

    def _renewed(self, lease_seconds: float, *, strict: bool) -> None:
        with self._moved:
            self._lease_seconds = lease_seconds or self._lease_seconds
            # Counted from when the report left: an answer may lie in a buffer for long if this process was stopped.
            since = self._sent_at.popleft() if self._sent_at else None
            self._moved.notify_all()
        if since is not None:
            self._lease.renew(since + self._lease_seconds, strict=strict)

    # On the loop

    async def _in_turn(self, number: int, order: ControlOrder) -> None:
        async with self._one_at_a_time:
            with self._moved:
                if self._stream != number:
                    return
                self._busy = order.install
            outcome = None
            try:
                outcome = await self._carry_out(order)
            finally:
                with self._moved:
                    named_in_vain = outcome is None and self._stream != number and bool(self._busy)
                    self._busy = ""
                    if outcome is not None:
                        self._outcomes.append(outcome)
                    self._moved.notify_all()
                if named_in_vain:  # a later stream may have named it as busy, and the daemon would wait for its outcome
                    self.reattach("an order was given up")


def _outcome_to_proto(outcome: Outcome) -> server_pb2.ControlReport:
    done = server_pb2.Order.Kind.Name(outcome.kind)
    return server_pb2.ControlReport(
        install=outcome.install,
        done=done,
        ok=outcome.ok,
        error=outcome.error,
        pause_seconds=outcome.pause_seconds,
        timings=outcome.timings,
    )
