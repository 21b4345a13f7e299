"""The engine's fence: the engine accepts orders of the highest term only, and only while the order's lease lasts.

A control side may be stopped at any point, also between its last check of the lease and the call to the
engine. The engine therefore checks too: each call within `acting` carries a token, and the engine core
(`vllm/engine_core.py`), which takes calls one after the other, compares the token with its own state.

    term    of the order. The daemon raises it with each LEAD, and LEAD itself calls the engine: from then on
            the engine refuses every lower term
    until   the end of the lease on the monotonic clock; compared only by a process that shares this clock.
            An engine core on another host compares the term only

Calls outside `acting` (requests, vLLM's own routes, the program around an embedded engine) carry no token
and always pass.
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

FENCED = "resharder_fenced"  # name of the engine core's method
_REFUSED = "resharder: refused"

Wire = list[Any]
"""A token in its wire form: `[term, until or None, clock id]`."""


class Fenced(Exception):
    """An order lost its right to act. `term` is the engine's term; 0 if the engine did not refuse it."""

    def __init__(self, reason: str, term: int = 0) -> None:
        super().__init__(reason)
        self.term = term


@functools.cache
def clock_id() -> str:
    """Return an id of the clock behind `time.monotonic`; equal ids in two processes mean the same clock."""
    boot, offsets = "", ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        offsets = os.readlink("/proc/self/ns/time")
    return f"{boot} {offsets}" if boot else ""


@dataclass(frozen=True)
class OrderClaim:
    """The right on which an order acts: its term and its lease."""

    term: int
    until: Callable[[], float | None]
    """Returns the end of the lease (monotonic); `-inf` once its span has ended, `None` if the order needs none."""

    def token(self) -> Wire:
        """Return the token of a call.

        Raises:
            Fenced: The lease has ended.
        """
        if (until := self.until()) == float("-inf"):
            raise Fenced("its lease has ended")
        return [self.term, until, clock_id()]


_ACTING: ContextVar[OrderClaim | None] = ContextVar("resharder_acting", default=None)


@contextmanager
def acting(claim: OrderClaim) -> Iterator[None]:
    """Attach the claim's token to calls to a guarded engine inside the block. Tasks begun inside inherit it."""
    token = _ACTING.set(claim)
    try:
        yield
    finally:
        _ACTING.reset(token)


def claim_in_effect() -> OrderClaim | None:
    """Return the claim of the `acting` block around the caller."""
    return _ACTING.get()


def accepted(answer: Any) -> Any:
    """Return an engine core's answer.

    Raises:
        Fenced: The engine core refused the call.
    """
    if isinstance(answer, list) and answer[:1] == [_REFUSED]:
        raise Fenced(answer[1], answer[2])
    return answer


class Fence:
    """The engine core's side of the fence: the highest term, and the check of tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.term, self._clock = 0, clock

    def refuse(self, token: Wire) -> str:
        """Return why a call with this token is refused; empty if it is accepted. A higher term is recorded in both cases."""
        term, until, clock = token
        if 0 < term < self.term:  # 0: from a daemon that does not number leadership
            return f"expected an order of term {self.term} or later, got one of term {term}: another control side leads"
        self.term = max(self.term, term)
        if until is not None and clock and clock == clock_id() and (late := self._clock() - until) >= 0:
            return f"the lease of the order ended {late:.3f} s ago"
        return ""

    def refused(self, reason: str) -> Wire:
        """Return the answer to a refused caller. An exception instead would fill vLLM's log with a traceback."""
        return [_REFUSED, reason, self.term]
