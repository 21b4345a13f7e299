"""The gate in front of an engine's routes: it admits requests only while a confirmed version is in service.

    OPEN   a confirmed version is in service                  requests pass             /health passes
    HELD   a version is being installed                       requests wait             /health passes
    late   HELD for longer than `hold_seconds`                503 at once               503
    SHUT   nothing confirmed, torn, drained or asleep         503 at once               503

An install holds the gate for tens of milliseconds, so requests wait instead of being refused. When the
gate becomes late, all waiting requests are answered 503. The gate decides on the start of a request
only; the engine keeps, finishes or aborts requests in flight. A 503 on /health means that the server must not
receive requests, not that it must restart: use it for readiness.

Every response that passes the gate has the header `X-Resharder-Version` (`labels.py`): the versions that
computed its tokens, as the workers recorded them on the page (`version_page.py`). The orders that this
process received do not affect the header. Responses from before the gate (401 by --api-key) have none.

If the fleet allows no server without a lease, an open gate closes when the lease ends and stays closed
until the next `open`, whether or not the lease is renewed. The lease is checked whenever the position is
read, so the gate needs no timer.

The gate takes no orders over HTTP. Everything except `ServerLease.renew` runs on one event loop.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.control.labels import UNCONFIRMED, Message, Send, Signed, header
from resharder.converters.signal import Signal

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_SECONDS = 1
LEASE_ENDED = "the lease has ended, and the fleet allows no server to answer without one"


class ServerLease:
    """The server's lease, written by the stream's thread and read on the event loop.

    A span is a period without a break in the lease or in the stream that renews it. An order acts only
    within the span in which it arrived.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.renewed: Signal[float] = Signal()
        """Emitted by the thread that renews, with the remaining seconds."""
        self.until = float("-inf")
        """End of the lease on the monotonic clock."""
        self.strict = False
        """Whether the gate may be open only while the lease lives."""
        self.lapses = 0
        """Number of times that a strict lease ended."""
        self.span = 0
        """Number of the current span."""
        self.term = 0
        """Highest term observed, in orders and in the engine's refusals."""

    def renew(self, until: float, *, strict: bool = False) -> None:
        """Extend the lease to `until` on the monotonic clock. A renewal after its end begins a new span."""
        if not self.alive:  # set before `until`, so that a reader of the renewed lease reads the new span and lapses
            self.span += self.until != float("-inf")
            self.lapses += self.strict
        self.until, self.strict = max(self.until, until), strict
        self.renewed.emit(self.until - self._clock())

    @property
    def alive(self) -> bool:
        """Whether the lease has not ended."""
        return self._clock() < self.until

    def end_span(self) -> None:
        """End the span because the stream has ended. The lease itself may continue."""
        self.span += 1

    def observe_term(self, term: int) -> None:
        """Record a term that an order or a refusal carried."""
        self.term = max(self.term, term)

    def until_in(self, span: int) -> float:
        """Return when an order that arrived in `span` loses the right to act; `-inf` if the span has ended."""
        until = self.until  # read before `span`, see `renew`
        return until if self.span == span else float("-inf")

    def permits(self, span: int) -> bool:
        """Return whether an order that arrived in `span` may act."""
        return self._clock() < self.until_in(span)

    def unbroken_since(self, lapses: int) -> bool:
        """Return whether a strict lease lives and did not end since `lapses` was read; true for a lease that is not strict."""
        return not self.strict or (self.alive and self.lapses == lapses)


class Position(Enum):
    """Position of the gate. Values are labels of metrics."""

    OPEN = "open"
    HELD = "held"
    SHUT = "shut"


@dataclass(frozen=True)
class Refusal:
    """Response to a request that the gate does not admit: 503, with this reason."""

    reason: str


class Gate:
    """The gate of one API server.

    Args:
        prefer: Start open, on the engine's own weights, until the first version arrives.
        hold_seconds: Time for which requests wait while the gate is held.
        lease: The server's lease; by default a new one, which does not affect the gate until it is renewed as strict.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        prefer: bool = False,
        hold_seconds: float = 30.0,
        lease: ServerLease | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._position = Position.OPEN if prefer else Position.SHUT
        self.version = 0
        """The version that the gate was last opened on."""
        self.in_flight = 0
        """Number of admitted requests that are not completely answered."""
        self.lease = lease or ServerLease()
        self._lapses = self.lease.lapses  # at the time of `open`
        self._reason = "no version is confirmed yet"
        self._hold_seconds, self._clock = hold_seconds, clock
        self._held_at = 0.0
        self._changed = asyncio.Event()
        self.moved: Signal[Position, int] = Signal()
        """A change of position, with the version that the gate was last opened on. Like the others, emitted on the event loop."""
        self.refused: Signal[str] = Signal()
        """A refused request, with the reason: `late`, `lease_ended` or `shut`."""
        self.waited: Signal[float] = Signal()
        """A request that waited at the gate, with the seconds."""
        self.emptied: Signal[()] = Signal()
        """The last request in flight is complete while the gate is not open."""

    @property
    def position(self) -> Position:
        """The current position. Closes the gate if its lease has ended."""
        if self._position is Position.OPEN and not self.lease.unbroken_since(self._lapses):
            self.shut(LEASE_ENDED)
        return self._position

    @property
    def open_on(self) -> int | None:
        """The version that the gate is open on, 0 for the engine's own weights; `None` while it is held or closed."""
        return self.version if self.position is Position.OPEN else None

    @property
    def serving(self) -> int:
        """The version that the gate is open on, without a check of the lease; 0 for none. Thread-safe."""
        return self.version if self._position is Position.OPEN else 0

    def open(self, version: int, lapses: int | None = None) -> None:
        """Open the gate on `version`.

        Args:
            version: The version in service.
            lapses: `lease.lapses` at the last check of the lease, by default now. If a strict lease
                ended since then, the gate closes at the next read of its position.
        """
        self.version, self._lapses = version, self.lease.lapses if lapses is None else lapses
        self._move(Position.OPEN)

    def hold(self, reason: str) -> None:
        """Hold the gate while a version is installed. A closed gate stays closed."""
        if self.position is Position.OPEN:
            self._reason, self._held_at = reason, self._clock()
            self._move(Position.HELD)

    def shut(self, reason: str) -> None:
        """Close the gate; requests are answered 503 with `reason`."""
        self._reason = reason
        self._move(Position.SHUT)

    async def enter(self) -> Refusal | None:
        """Wait while the gate is held, at most until it is late.

        Returns:
            `None` if the request is admitted, else the refusal.
        """
        arrived = self._clock() if self.position is Position.HELD else None
        while self.position is Position.HELD and not self._late():
            await self.changed(self._held_at + self._hold_seconds - self._clock())
        if arrived is not None:
            self.waited.emit(self._clock() - arrived)
        if self.position is Position.OPEN:
            return None
        closed = "lease_ended" if self._reason == LEASE_ENDED else "shut"
        self.refused.emit("late" if self.position is Position.HELD else closed)
        return Refusal(self._full_reason())

    def check_health(self) -> Refusal | None:
        """Return the refusal of a health check, which does not wait; `None` if the gate is open, or held and not late."""
        closed = self.position is Position.SHUT or (self.position is Position.HELD and self._late())
        return Refusal(self._full_reason()) if closed else None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count an admitted request as in flight, until the end of its answer."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight and self.position is not Position.OPEN:
                self.emptied.emit()

    async def changed(self, timeout: float | None) -> None:
        """Wait until the gate changes its position, at most `timeout` seconds."""
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return

    def _move(self, position: Position) -> None:
        self._position = position
        self.moved.emit(position, self.version)
        self._changed.set()
        self._changed = asyncio.Event()

    def _late(self) -> bool:
        return self._clock() >= self._held_at + self._hold_seconds

    def _full_reason(self) -> str:
        late = f", for more than {self._hold_seconds:g} s" if self.position is Position.HELD else ""
        return self._reason + late


@dataclass(frozen=True)
class Routes:
    """The routes of an engine's server that are not gated, or not like others. All further ones are gated."""

    ungated: frozenset[str]
    """Routes that do not use the model."""
    health: frozenset[str]
    """Health checks, which are refused while the gate is closed and do not wait."""
    stored: str = ""
    """Prefix of routes that return stored answers by id; empty for none."""


class GateMiddleware:
    """ASGI middleware that applies the gate. It is the innermost one, so authentication precedes it.

    Args:
        app: The application behind the gate.
        gate: The gate.
        routes: The engine's routes.
        installed: Returns the version that the engine has installed now; 0 for none.
        passing: Further paths that are not gated; read at each request.
    """

    def __init__(self, app: App, gate: Gate, routes: Routes, installed: Callable[[], int], passing: Collection[str] = ()) -> None:
        self._app, self._gate, self._routes, self._installed, self._passing = app, gate, routes, installed, passing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        ungated = path in self._routes.ungated or path in self._passing or scope.get("method") == "OPTIONS"
        if ungated or path in self._routes.health:
            refusal = None if ungated else self._gate.check_health()
            counted: AbstractContextManager[None] = nullcontext()
        else:
            refusal, counted = await self._gate.enter(), self._gate.answering()
        if refusal is not None:
            await refuse(scope, receive, send, refusal)
            return
        stored = self._routes.stored and path.startswith(self._routes.stored)
        installed = _no_version if stored else self._installed
        with counted, labels.answering() as answer:
            await self._app(scope, receive, Signed(send, answer, installed))


def _no_version() -> int:
    return 0


async def refuse(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    """Answer 503 with the reason of a refusal, or close a websocket with it."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1013, "reason": refusal.reason})  # 1013: try again later
        return
    error = {"message": f"not serving: {refusal.reason}", "type": "ServiceUnavailableError", "param": None, "code": 503}
    headers = [
        (b"content-type", b"application/json"),
        (b"retry-after", str(RETRY_AFTER_SECONDS).encode()),
        header(UNCONFIRMED),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})
