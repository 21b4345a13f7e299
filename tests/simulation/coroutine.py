"""Functions that pause in the middle of a call, as threads do: one runs at a time, on the thread that resumes it."""

from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet


class Coroutine:
    """Call of `function` that runs in parts. What it raises, `resume` raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._greenlet = greenlet(function)

    def resume(self) -> None:
        """Run until the next pause or the end."""
        self._greenlet.parent = getcurrent()
        self._greenlet.switch()

    def pause(self) -> None:
        """Return to the caller of `resume`, in the middle of the call."""
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()
