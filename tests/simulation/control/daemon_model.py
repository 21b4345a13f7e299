"""The daemon as a simulated process: its own fleets and `Attend` streams, on a store and files in memory.

Connections deliver in order, late, or not at all; unary calls may arrive twice. `Link` is the connection of one client
process, `Stream` one `Attend` call over it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import grpc
from resharder.client.rpc.channel import Channel
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.infra.change_signal import Pause
from resharder.server.rpc.server_service import Attendance
from resharder.server.state.errors import DaemonError
from resharder.server.state.server import Server, Settings
from resharder.v1 import server_pb2

from tests.simulation.control.schedule import Process, Schedule
from tests.simulation.control.threads import SimulatedThread, Waiters, each
from tests.support.simulated_store import MODEL, SimulatedFiles, SimulatedVersions
from tests.support.waits import completed

LEASE = 2.0
FLEET = "fleet"
SETTINGS = Settings(lease=LEASE, grace=LEASE, boot=60, install_step=15, attempts=3, first_retry=0.5, last_retry=2)
_TICK = 0.5
_DEADLINE = 10.0  # of a call, in seconds, as workers set it

Answer = Callable[[Any], None]


class RpcError(grpc.RpcError):
    """A failed call, as gRPC reports it."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        return ()


def unavailable(details: str) -> RpcError:
    return RpcError(grpc.StatusCode.UNAVAILABLE, details)


class Daemon:
    """The daemon, over all of its lives. `slow` is the mean latency of a message in seconds, `keep` that of its store."""

    def __init__(self, schedule: Schedule, slow: float, keep: int) -> None:
        self.schedule, self.slow = schedule, slow
        self.versions, self.files = SimulatedVersions(keep), SimulatedFiles()
        self.lives = 0
        self.doubled = 0.0
        self.lost: set[str] = set()
        """Servers that were LOST in their current boot."""
        self.start()

    def start(self) -> None:
        """Start the daemon, again after `kill`."""
        self.lives += 1
        self.started_at = self.schedule.now
        self.process = Process(f"daemon{self.lives}")
        self.streams: list[Stream] = []
        self._pending: dict[object, Answer] = {}
        self.versions.restart()
        self.fleets = Fleets(
            self.versions,
            self.versions,
            offers=self.versions,
            settings=SETTINGS,
            clock=lambda: self.schedule.now,
            wall=self.schedule.wall,
            files=self.files,  # type: ignore[arg-type]
            tick_seconds=0,
        )
        self.fleets.server_stepped.connect(self._note_lost)
        self.operations = Operations(self.fleets)
        self._tick(self.process)

    def _note_lost(self, before: Server, after: Server) -> None:
        """Record the servers that were LOST since the world discarded their ids."""
        if after.lost_at is not None:
            self.lost.add(after.id)

    def kill(self, silent: bool) -> None:
        """Kill the daemon; clients see broken connections, or nothing if it is `silent`."""
        self.schedule.kill(self.process)
        if not silent:
            for stream in self.streams:
                self.schedule.after(self.latency(), None, stream.broken)
            for answer in self._pending.values():
                self.schedule.after(self.latency(), None, lambda answer=answer: answer(unavailable("killed")))  # type: ignore[misc]

    def latency(self) -> float:
        """Draw the latency of a message; one of some dozens takes long."""
        random = self.schedule.random
        long = 30 if self.schedule.hazard and random.random() < 0.03 else 1
        return self.slow * random.random() * 2 * long

    def call(self, link: "Link", act: Callable[[], Any], answer: Answer) -> None:
        """Call the daemon. `answer` gets the result, a `DaemonError` or an `RpcError`, in the process of `link`."""
        key, random = object(), self.schedule.random

        over = False

        def answered(result: Any) -> None:
            nonlocal over
            if not over:
                over = True
                self._pending.pop(key, None)
                link.deliver(lambda: answer(result))

        def arrive() -> None:
            daemon = self.process
            if link.process.killed_at <= self.started_at:
                return  # this daemon never had a connection to it
            if not daemon.alive:
                answered(unavailable("no daemon"))
                return
            self._pending[key] = answered
            self.schedule.after(0, daemon, lambda: answered(self._result(act)), "calls")

        self.schedule.after(self._delay(link), None, arrive)
        late = RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        self.schedule.after(_DEADLINE, None, lambda: answered(late), "deadlines")
        if random.random() < self.doubled:
            again = self.process
            self.schedule.after(self._delay(link) * 3, again, lambda: self._result(act) and None)

    def _result(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except DaemonError as error:
            return error
        finally:
            self.drain()

    def _delay(self, link: "Link") -> float:
        return max(link.held_until - self.schedule.now, 0.0) + self.latency()

    def claim(self, server: str, *, boot: bool) -> server_pb2.Claim:
        """Execute `ClaimServer`."""
        found = completed(self.fleets.claim, server, MODEL, FLEET, wait_seconds=0, boot=boot, renews=True)
        return server_pb2.Claim(
            server=f"servers/{found.id}",
            model=f"models/{found.model}",
            fleet=found.fleet,
            boot_version=found.boot_version,
            lease_seconds=SETTINGS.lease,
            attached=found.attached,
        )

    def check_boot_version(self, server: str, version: int) -> None:
        """Check that a version is READY from which a server boots that has not lost its lease."""
        found = self.fleets.by_id.get(server)
        boots = found is not None and found.booting and found.boot_version == version and server not in self.lost
        if self.process.alive and boots and version not in self.versions.ready:
            self.schedule.fail(f"version {version} has retired, from which server {server} boots")

    def drain(self) -> None:
        """Send the orders that are due on all streams."""
        for stream in list(self.streams):
            stream.pump()

    def tick(self) -> None:
        """Let the fleets see the store and the time."""
        self.fleets.tick()
        self.drain()

    def _tick(self, process: Process) -> None:
        self.tick()
        self.schedule.after(_TICK, process, lambda: self._tick(process), "ticker")


class Link:
    """The connection of a client process to the daemon. `granted` gets the end of each lease that the daemon grants."""

    def __init__(self, daemon: Daemon, process: Process, granted: Callable[[float], None] = lambda until: None) -> None:
        self.daemon, self.process, self.granted = daemon, process, granted
        self.held_until = 0.0
        self.streams: list[Stream] = []
        self.delivered: dict[tuple[int, str, int, int], Stream] = {}
        """Streams that last delivered an order of a kind, install, version and term."""

    def deliver(self, act: Callable[[], None], lane: str = "") -> None:
        """Run `act` in the client's process when a message from the daemon arrives."""
        delay = max(self.held_until - self.daemon.schedule.now, 0.0) + self.daemon.latency()
        self.daemon.schedule.after(delay, self.process, act, lane)

    def hold(self, seconds: float) -> None:
        """Hold back all messages for a time."""
        self.held_until = self.daemon.schedule.now + seconds

    def cut(self) -> None:
        """Break the connection. Messages under way are lost."""
        for stream in list(self.streams):
            stream.lost = True
            self.daemon.schedule.after(self.daemon.latency(), self.process, stream.broken)
            self.daemon.schedule.after(self.daemon.latency(), stream.daemon_process, stream.close)


class Stream:
    """One `Attend` call: the call object of the client, and the daemon's session."""

    def __init__(self, link: Link) -> None:
        self.link, self.daemon, self.schedule = link, link.daemon, link.daemon.schedule
        self.daemon_process = self.daemon.process
        self.lost = False
        self._inbox: deque[Any] = deque()
        self._readers = Waiters(self.schedule)
        self._over: Exception | None = None  # at the client
        self._session: Attendance | None = None
        self._responses: Iterator[Any] | None = None
        self._closed = False  # at the daemon
        self._up = self._down = 0.0
        self._reported_at: deque[float] = deque()
        link.streams.append(self)
        if not self.daemon_process.alive:
            self.schedule.after(self.daemon.latency(), link.process, self.broken)

    # The client's side

    def send(self, report: server_pb2.ControlReport | None) -> None:
        """Send a report, or with None the end of the reports."""
        sent = self.schedule.now
        process, link = self.daemon_process, self.link
        self._up = max(self._up + 1e-6, sent + max(link.held_until - sent, 0.0) + self.daemon.latency())
        self.schedule.at(self._up, process, lambda: self._arrived(report, sent), f"up {id(self)}")

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> server_pb2.Order:
        while not self._inbox:
            if self._over is not None:
                raise self._over
            self._readers.wait()
        order = self._inbox.popleft()
        if order is None:
            raise StopIteration
        return order  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """Cancel the call."""
        self._end(RpcError(grpc.StatusCode.CANCELLED, "cancelled"))
        self.schedule.after(self.daemon.latency(), self.daemon_process, self.close)

    def broken(self) -> None:
        """Let the client see that the connection is gone."""
        self._end(unavailable("the connection broke"))

    def _end(self, error: Exception) -> None:
        if self._over is None:
            self._over = error
            self._readers.wake()
        if self in self.link.streams:
            self.link.streams.remove(self)

    def _delivered(self, order: server_pb2.Order | None) -> None:
        if self.lost or self._over is not None:
            return
        if order is not None and order.kind != server_pb2.Order.RENEWED:
            self.schedule.trace(f"order {_text(order)}")
        if order is not None:
            self.link.delivered[order.kind, order.install, order.version, order.term] = self
        self._inbox.append(order)
        self._readers.wake()
        self.schedule.hazard_point(0.01)

    # The daemon's side

    def _arrived(self, report: server_pb2.ControlReport | None, sent: float) -> None:
        if self.lost or self._closed:
            return
        if report is None:
            if self._session is not None:
                self._session.end()
            self.daemon.drain()
            return
        self._reported_at.append(sent)
        if report.install or report.done:
            done = server_pb2.Order.Kind.Name(report.done) if report.done else "busy with"
            ok = "" if report.ok or not report.done else f": {report.error}"
            self.schedule.trace(f"{self.link.process.name} reports {done} {_number(report.install)}{ok}")
        try:
            if self._session is None:
                self._session = Attendance(self.daemon.fleets)
                self._session.receive(report)
                self._responses = self._session.responses()
                self.daemon.streams.append(self)
            else:
                self._session.receive(report)
        except DaemonError as error:
            self.schedule.trace(f"refused a report: {error}")
            self._down_with(RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(error)))
            self.close()
        self.daemon.drain()

    def pump(self) -> None:
        """Send the orders that are due."""
        if self._closed or self._responses is None:
            return
        for item in self._responses:
            if isinstance(item, Pause):
                return
            self._ordered(item)
        self._down_with(None)
        self.close()

    def close(self) -> None:
        """End the session at the daemon."""
        if not self._closed:
            self._closed = True
            if self in self.daemon.streams:
                self.daemon.streams.remove(self)
            if self._session is not None:
                self._session.close()
                self.daemon.drain()

    def _ordered(self, order: server_pb2.Order) -> None:
        if order.kind == server_pb2.Order.RENEWED:
            self.link.granted(self._reported_at.popleft() + order.lease_seconds)
        self._down_with(order)
        if order.kind != server_pb2.Order.RENEWED and self.schedule.random.random() < self.daemon.doubled:
            self._down_with(order)

    def _down_with(self, message: server_pb2.Order | Exception | None) -> None:
        now = self.schedule.now
        self._down = max(self._down + 1e-6, now + max(self.link.held_until - now, 0.0) + self.daemon.latency())
        act = (lambda: self._end(message)) if isinstance(message, Exception) else (lambda: self._delivered(message))
        self.schedule.at(self._down, self.link.process, act, f"down {id(self)}")


def _text(order: server_pb2.Order) -> str:
    version = f" version {order.version}" if order.version else ""
    return f"{server_pb2.Order.Kind.Name(order.kind)} {_number(order.install)}{version} term {order.term & 0xFFFF}"


def _number(install: str) -> str:
    """Return the part of an install's id that the seed determines."""
    return install.rpartition("-")[2]


class SimulatedChannel(Channel):
    """The client's channel over a link."""

    def __init__(self, link: Link) -> None:
        self.endpoint, self.patience = "daemon:1", 0.0
        self.grpc = _Methods(link)  # type: ignore[assignment]


class _Methods:
    """The part of a gRPC channel that stubs use."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def unary_unary(self, path: str, *_: Any, **__: Any) -> Callable[..., Any]:
        return self._claim if path.endswith("/ClaimServer") else _unused

    def stream_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., Any]:
        return self._attend

    def unary_stream(self, path: str, *_: Any, **__: Any) -> Callable[..., Any]:
        return _unused

    stream_unary = unary_stream

    def close(self) -> None:
        pass

    def _claim(self, request: server_pb2.ClaimServerRequest, timeout: float) -> server_pb2.Claim:
        daemon = self._link.daemon
        thread: SimulatedThread = daemon.schedule.thread
        answers: list[Any] = []
        waits = True

        def answer(result: Any) -> None:
            answers.append(result)
            if waits:
                thread.wake()

        daemon.call(self._link, lambda: daemon.claim(request.server, boot=request.boot), answer)
        thread.wait(timeout)
        waits = False
        if not answers:
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        if isinstance(answers[0], DaemonError):
            raise RpcError(grpc.StatusCode.FAILED_PRECONDITION, str(answers[0]))
        if isinstance(answers[0], grpc.RpcError):
            raise answers[0]
        claim: server_pb2.Claim = answers[0]
        return claim

    def _attend(self, reports: Iterator[server_pb2.ControlReport]) -> Stream:
        stream = Stream(self._link)
        read = partial(each, reports, stream.send, partial(stream.send, None))
        reader = SimulatedThread(self._link.daemon.schedule, self._link.process, read)
        reader.start()
        return stream


def _unused(*_: Any, **__: Any) -> Any:
    raise NotImplementedError
