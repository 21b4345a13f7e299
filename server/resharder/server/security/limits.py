"""Bounds of one caller: rate of calls, and open calls."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resharder.server.state.errors import ResourceExhausted

BURST_SECONDS = 10.0
_MOST_CALLERS = 4096


class Limits:
    """Limits of all callers. Thread-safe.

    Renewals are counted separately, so that a caller that makes too many other calls keeps its lease.

    Args:
        rate: Calls per second, with bursts of ten seconds' calls; 0: no bound.
        calls: Open long calls of one caller.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, rate: float, calls: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._calls, self._clock = rate, calls, clock
        self._lock = threading.Lock()
        self._left: dict[tuple[str, bool], tuple[float, float]] = {}  # calls left, and the time of that count
        self._open: Counter[str] = Counter()

    def begin(self, caller: str, renewal: bool = False) -> None:
        """Count a call that begins. Raises ResourceExhausted (TOO_FAST)."""
        if not self._rate:
            return
        now, most = self._clock(), max(1.0, self._rate * BURST_SECONDS)
        with self._lock:
            left, then = self._left.get((caller, renewal), (most, now))
            left = min(most, left + (now - then) * self._rate)
            if left < 1:
                raise ResourceExhausted("TOO_FAST", f"{caller} makes more than {self._rate:g} calls a second: try again later")
            self._left[caller, renewal] = left - 1, now
            if len(self._left) > _MOST_CALLERS:
                self._forget(now, most)

    def _forget(self, now: float, most: float) -> None:
        """Remove callers whose allowance is full again."""
        self._left = {key: (left, then) for key, (left, then) in self._left.items() if left + (now - then) * self._rate < most}

    @contextmanager
    def open(self, caller: str) -> Iterator[None]:
        """Count a long call while the context lasts. Raises ResourceExhausted (TOO_MANY_CALLS)."""
        with self._lock:
            if self._open[caller] >= self._calls:
                raise ResourceExhausted(
                    "TOO_MANY_CALLS", f"{caller} has {self._calls} open calls, the most that it may have: try again later"
                )
            self._open[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[caller] -= 1
                if not self._open[caller]:
                    del self._open[caller]
