"""The fence around an engine: it obeys the newest leadership alone, and only while the lease behind an order lasts.

A control side may be stopped at any point, also between its last look at the lease and the call to the engine. So the engine
itself looks: each call made within `acting` travels with a token, and the engine core (vllm/engine_core.py), which takes calls
one after the other, compares it with what it has seen.

    term    of the order. The daemon raises it with each LEAD, and LEAD itself goes to the engine: from then on the engine
            refuses every lower term
    until   the end of the lease, on the monotonic clock; compared only by a process that shares this clock. An engine core on
            another host has the term alone

Calls outside `acting` (requests, vLLM's own routes, the program around an embedded engine) pass as they are.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FENCED = "resharder_fenced"  # the engine core's method
_REFUSED = "resharder: refused"

Wire = list[Any]  # [term, until or None, clock]


class Fenced(Exception):
    """An order that must not act any more. `term`: the engine's, or 0."""

    def __init__(self, reason: str, term: int = 0) -> None:
        super().__init__(reason)
        self.term = term


@functools.cache
def clock_id() -> str:
    """Names the clock that `time.monotonic` reads: equal in two processes only if they read the same one."""
    boot, offsets = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        offsets = os.readlink("/proc/self/ns/time")
    return f"{boot} {offsets}" if boot else ""


@dataclass(frozen=True)
class OrderClaim:
    """What an order acts on: its term, and when its lease ends (None: it needs none)."""

    term: int
    until: Callable[[], float | None]

    def token(self) -> Wire:
        """Raises Fenced where the lease is known to have ended."""
        if (until := self.until()) == float("-inf"):
            raise Fenced("its lease has ended")
        return [self.term, until, clock_id()]


_ACTING: ContextVar[OrderClaim | None] = ContextVar("resharder_acting", default=None)


@contextmanager
def acting(claim: OrderClaim) -> Iterator[None]:
    """Inside, calls to an engine whose client is guarded carry the claim's token; tasks begun inside inherit it."""
    token = _ACTING.set(claim)
    try:
        yield
    finally:
        _ACTING.reset(token)


def claim_in_effect() -> OrderClaim | None:
    """The claim of the `acting` block around the caller."""
    return _ACTING.get()


def accepted(answer: Any) -> Any:
    """Return the answer of an engine core's fence. Raises Fenced where the call was refused."""
    if isinstance(answer, list) and answer[:1] == [_REFUSED]:
        raise Fenced(answer[1], answer[2])
    return answer


class Fence:
    """The engine's side."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.term, self._clock = 0, clock

    def refuse(self, token: Wire) -> str:
        """Why a call with this token must not be carried out; empty if it may be. Its term is remembered either way."""
        term, until, clock = token
        if 0 < term < self.term:  # 0: of a daemon that does not number leadership
            return f"expected an order of term {self.term} or later, got one of term {term}: another control side leads"
        self.term = max(self.term, term)
        if until is not None and clock and clock == clock_id() and (late := self._clock() - until) >= 0:
            return f"expected an order on a living lease, got one whose lease ended {late:.3f} s ago"
        return ""

    def refused(self, reason: str) -> Wire:
        """The answer to the caller: an exception would fill vLLM's log with a traceback."""
        return [_REFUSED, reason, self.term]
