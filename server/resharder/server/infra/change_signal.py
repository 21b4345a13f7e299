"""Waiting for changes without holding a lock over them, or a thread.

A function that waits is a generator, a `Waiting[T]`: it yields a `Pause` until a signal fires or a time has passed, and returns
its result. The RPC server drives it from its event loop and holds no thread meanwhile; `result_of` blocks.

    seen = changes.count        # before the condition is checked, so that no change is missed
    while not condition():
        yield changes.pause(seen, 1.0)
        seen = changes.count
"""

import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from resharder.converters.signal import Signal

T = TypeVar("T")


class ChangeSignal(Signal[()]):
    """Signal that counts its emissions, so that calls can wait for the next one.

    Thread-safe. No other lock is taken under its own, so `emit` may be called under any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._changed = threading.Condition()

    def emit(self) -> None:
        """Count a change, wake all waiters, then call every connected function on this thread."""
        with self._changed:
            self.count += 1
            self._changed.notify_all()
        super().emit()

    def wait(self, seen: int, seconds: float) -> None:
        """Block until a change after `seen`, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self.count != seen, seconds)

    def pause(self, seen: int, seconds: float) -> "Pause":
        """Return a `Pause` until a change after `seen`, for at most `seconds`."""
        return Pause(self, seen, seconds)


@dataclass(frozen=True)
class Pause:
    """Request to resume a generator once `signal` has changed after `seen`, or `seconds` have passed."""

    signal: ChangeSignal
    seen: int
    seconds: float


Waiting = Generator[Pause, None, T]


def result_of(waiting: Waiting[T]) -> T:
    """Run `waiting` to its end, blocking this thread during its pauses, and return its result."""
    while True:
        try:
            pause = next(waiting)
        except StopIteration as ended:
            result: T = ended.value
            return result
        pause.signal.wait(pause.seen, pause.seconds)
