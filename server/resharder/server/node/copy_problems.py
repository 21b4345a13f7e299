"""Problems of a node with its versions: ones that cannot be created, and ones whose pieces do not arrive."""

import threading
from collections.abc import Callable

from resharder.server.node.copies import HeldVersion

_STUCK_SECONDS = 5.0  # without a piece, after which the reason of the last failure is reported
_RETRY_SECONDS = 2.0  # until a version that could not be created is tried again


class CopyProblems:
    """Problems with creating or enlarging versions, and the time of the next attempt; progress of the others. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._found: dict[str, tuple[str, float]] = {}
        self._progress: dict[str, tuple[int, float]] = {}  # pieces, and since when

    def all(self) -> dict[str, str]:
        """Return the problem of each version that has one."""
        with self._lock:
            return {name: problem for name, (problem, _) in self._found.items()}

    def waits(self, name: str) -> bool:
        """Return whether the next attempt is not due yet."""
        with self._lock:
            return self._found.get(name, ("", 0.0))[1] > self._clock()

    def add(self, name: str, problem: str) -> bool:
        """Record a problem, and return whether it is another one than before."""
        with self._lock:
            former, _ = self._found.get(name, ("", 0.0))
            self._found[name] = problem, self._clock() + _RETRY_SECONDS
            return former != problem

    def solved(self, name: str) -> None:
        """Forget the problem of a version."""
        with self._lock:
            self._found.pop(name, None)

    def forget(self, name: str) -> None:
        """Forget a version that was dropped."""
        self.solved(name)
        with self._lock:
            self._progress.pop(name, None)

    def stuck(self, version: HeldVersion, reason: str) -> str:
        """Return why no piece of a version has arrived for some seconds; empty while pieces arrive.

        `reason`: that of the last failed request; empty if it did not fail.
        """
        held, now = len(version.held()), self._clock()
        with self._lock:
            pieces, since = self._progress.get(version.name, (-1, now))
            if held != pieces:
                self._progress[version.name] = held, now
                return ""
        stuck = len(version.missing()) and now - since > _STUCK_SECONDS and reason
        return f"no piece for {now - since:.0f} s: {reason}" if stuck else ""
