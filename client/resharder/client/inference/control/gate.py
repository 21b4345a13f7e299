"""The gate in front of vLLM's routes: no request starts on a version that is not confirmed, and every answer names its versions.

    OPEN   a confirmed version is served                      requests pass             /health passes
    HELD   a version is being installed                       requests wait             /health passes
    late   HELD for longer than `hold_seconds`                503 at once               503
    SHUT   nothing confirmed, torn, drained or asleep         503 at once               503

An install closes the gate for tens of milliseconds, so requests wait for it instead of being turned away; all that wait are
answered 503 when the gate becomes late. Requests in flight are vLLM's to keep, finish or abort: the gate judges only their start.
/health under 503 means "send no requests", not "restart me": use it for readiness.

Every response has the header `X-Resharder-Version` (labels.py): the versions that made its tokens, as the workers noted them when
they were installed (page.py), never as this process was told of them. vLLM's answers from before the gate (401 by --api-key) have
no such header.

Where the fleet allows no server without a lease, an open gate is SHUT by itself as soon as the lease ends, and stays so until it
is opened anew, whether the lease is renewed or not. That is looked up whenever somebody asks where the gate stands, so no timer
can be late.

The gate takes no orders over HTTP. All of it but `ServerLease.renew` runs on one event loop.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.control.labels import UNCONFIRMED, Message, Send, Signed, header

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

RETRY_AFTER_SECONDS = 1
# These never ask the model for anything. Every other route is gated, those of other plugins and of later vLLMs too.
UNGATED = frozenset(
    {
        "/metrics",
        "/metrics/",
        "/version",
        "/load",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/is_paused",
        "/is_sleeping",
        "/server_info",
    }
)
HEALTH = frozenset({"/health", "/ping"})
STORED = "/v1/responses/"  # answers that were made earlier, by their id
LEASE_ENDED = "the lease ended and the fleet allows no server without one"


class ServerLease:
    """Written by the thread of the stream, read on the event loop; `until` is of the monotonic clock. `strict`: without it the
    gate may not stand open. `lapses`: how often it ended while it was. `renewed` hears for how many seconds it lasts.

    `span` numbers the stretches of time over which the lease, and the stream that renews it, last without a break. An order acts
    only within the span in which it was received. `term`: the highest term seen, in orders and in refusals by the engine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.renewed: Callable[[float], None] = lambda seconds: None
        self.until = float("-inf")
        self.strict = False
        self.lapses = 0
        self.span = 0
        self.term = 0

    def renew(self, until: float, *, strict: bool = False) -> None:
        if not self.alive:  # before `until`: a reader that sees the lease alive again sees the new span and lapse too
            self.span += self.until != float("-inf")
            self.lapses += self.strict
        self.until, self.strict = max(self.until, until), strict
        self.renewed(self.until - self._clock())

    @property
    def alive(self) -> bool:
        return self._clock() < self.until

    def break_off(self) -> None:
        """End the span, though the lease may live on: the stream has ended."""
        self.span += 1

    def saw(self, term: int) -> None:
        self.term = max(self.term, term)

    def until_in(self, span: int) -> float:
        """When an order received in `span` loses the right to act; -inf if it has lost it."""
        until = self.until  # read before `span`, see `renew`
        return until if self.span == span else float("-inf")

    def permits(self, span: int) -> bool:
        """Whether an order received in `span` may act."""
        return self._clock() < self.until_in(span)

    def unbroken_since(self, lapses: int) -> bool:
        """Whether it lives, and always has since there were so many lapses; always so where it is not strict."""
        return not self.strict or (self.alive and self.lapses == lapses)


class Position(Enum):
    OPEN = "open"
    HELD = "held"
    SHUT = "shut"


class Watcher:
    """Hears what a gate does. `reason`: late, lease_ended or shut."""

    def moved(self, position: Position, version: int) -> None: ...
    def refused(self, reason: str) -> None: ...
    def waited(self, seconds: float) -> None: ...


@dataclass(frozen=True)
class Refusal:
    reason: str


class Gate:
    """`prefer`: stand open on vLLM's own weights until the first version comes. `hold_seconds`: how long requests wait."""

    def __init__(
        self,
        *,
        prefer: bool = False,
        hold_seconds: float = 30.0,
        lease: ServerLease | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._position = Position.OPEN if prefer else Position.SHUT
        self.version = 0  # the last one it was opened on
        self.in_flight = 0  # requests that were let through and are not answered yet
        self.when_empty: Callable[[], None] = lambda: None  # the gate is closed, and the last request is answered
        self.lease = lease or ServerLease()
        self._lapses = self.lease.lapses  # when it was opened
        self._reason = "no version is confirmed yet"
        self._hold_seconds, self._clock = hold_seconds, clock
        self._held_at = 0.0
        self._changed = asyncio.Event()
        self._watcher = Watcher()

    def watch(self, watcher: Watcher) -> None:
        """Has it hear of everything from here on, and where the gate stands."""
        self._watcher = watcher
        watcher.moved(self.position, self.version)

    @property
    def position(self) -> Position:
        if self._position is Position.OPEN and not self.lease.unbroken_since(self._lapses):
            self.shut(LEASE_ENDED)
        return self._position

    @property
    def open_on(self) -> int | None:
        """The version that it is open on, 0 for vLLM's own weights; `None` while it is closed."""
        return self.version if self.position is Position.OPEN else None

    @property
    def shown(self) -> int:
        """The version that it was opened on and not closed since; 0: none. For any thread."""
        return self.version if self._position is Position.OPEN else 0

    def open(self, version: int, lapses: int | None = None) -> None:
        """`lapses`: those of the lease when it was last seen to hold; a strict lease that lapsed since shuts the gate at once."""
        self.version, self._lapses = version, self.lease.lapses if lapses is None else lapses
        self._move(Position.OPEN)

    def hold(self, reason: str) -> None:
        """A version is being installed. A gate that is shut stays shut."""
        if self.position is Position.OPEN:
            self._reason, self._held_at = reason, self._clock()
            self._move(Position.HELD)

    def shut(self, reason: str) -> None:
        self._reason = reason
        self._move(Position.SHUT)

    async def enter(self) -> Refusal | None:
        """None lets the request through. Waits while the gate is held, not longer than until it is late."""
        came = self._clock() if self.position is Position.HELD else None
        while self.position is Position.HELD and not self._late():
            await self.changed(self._held_at + self._hold_seconds - self._clock())
        if came is not None:
            self._watcher.waited(self._clock() - came)
        if self.position is Position.OPEN:
            return None
        ended = "lease_ended" if self._reason == LEASE_ENDED else "shut"
        self._watcher.refused("late" if self.position is Position.HELD else ended)
        return Refusal(self._why())

    def look(self) -> Refusal | None:
        """The same for a health check, which never waits."""
        closed = self.position is Position.SHUT or (self.position is Position.HELD and self._late())
        return Refusal(self._why()) if closed else None

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around a request that was let through, from then to the end of its answer."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight and self.position is not Position.OPEN:
                self.when_empty()

    async def changed(self, timeout: float | None) -> None:
        """Returns when the gate moved, or after `timeout` seconds."""
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout)
        except TimeoutError:
            return

    def _move(self, position: Position) -> None:
        self._position = position
        self._watcher.moved(position, self.version)
        self._changed.set()
        self._changed = asyncio.Event()

    def _late(self) -> bool:
        return self._clock() >= self._held_at + self._hold_seconds

    def _why(self) -> str:
        late = f", for more than {self._hold_seconds:g} s" if self.position is Position.HELD else ""
        return self._reason + late


class GateMiddleware:
    """ASGI middleware, innermost: authentication comes before it. `installed`: the version that the engine has installed now."""

    def __init__(self, app: App, gate: Gate, installed: Callable[[], int]) -> None:
        self._app, self._gate, self._installed = app, gate, installed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        asks_nothing = path in UNGATED or scope.get("method") == "OPTIONS"
        if asks_nothing or path in HEALTH:
            refusal = None if asks_nothing else self._gate.look()
            counted: AbstractContextManager[None] = nullcontext()
        else:
            refusal, counted = await self._gate.enter(), self._gate.answering()
        if refusal is not None:
            await _refuse(scope, receive, send, refusal)
            return
        installed = _unknown if path.startswith(STORED) else self._installed
        with counted, labels.answering() as answer:
            await self._app(scope, receive, Signed(send, answer, installed))


def _unknown() -> int:
    return 0


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
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
