"""Bound on the versions of a trainer that servers do not serve yet."""

from collections import deque
from contextlib import suppress

from resharder.client import tracing
from resharder.client.errors import NotFound, UsageError, VersionAborted
from resharder.client.trainer.handle import Handle


class Backpressure:
    """Block a publish while `max_ahead` earlier versions are not served yet; None is no bound."""

    def __init__(self, max_ahead: int | None, timeout: float) -> None:
        if max_ahead is not None and max_ahead < 1:
            raise UsageError(f"expected max_ahead of at least 1 or None, got {max_ahead}")
        self._max_ahead, self._timeout = max_ahead, timeout
        self._ahead: deque[Handle] = deque()

    def wait(self, timings: tracing.Timings) -> None:
        """Wait until the bound permits another version; append the wait to `timings`. Raises WaitTimeout."""
        while self._max_ahead is not None and len(self._ahead) >= self._max_ahead:
            with tracing.timed(timings, "wait"), suppress(VersionAborted, NotFound):
                self._ahead[0].wait_serving(self._timeout)
            self._ahead.popleft()

    def add(self, handle: Handle) -> None:
        """Count a published version."""
        if self._max_ahead is not None:
            self._ahead.append(handle)

    def clear(self) -> None:
        """Forget earlier versions, because servers serve the newest one."""
        self._ahead.clear()
