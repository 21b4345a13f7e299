"""A supervisor for one process, as systemd or Kubernetes is one: whatever ends is started again, and every end is recorded."""

import threading
import time
from typing import Any, Protocol

from tests.chaos.history import History

_POLL = 0.1
_STARTS = 3
"""Failed starts in a row after which a keeper gives up."""


class Supervised(Protocol):
    """A process, or several that live and die together."""

    name: str

    def start(self) -> dict[str, Any]:
        """Start; return once the process can be used. The result is recorded."""

    def ended(self) -> int | None:
        """Return the exit status; None while it runs."""

    def end(self) -> None:
        """SIGKILL what is left of it."""


class Keeper:
    """Keeps one process running until `close`.

    Attributes:
        down_until: Time of the history before which it is not started again.
        problem: Error of the last start, if it failed.
        given_up: Whether so many starts have failed that there are no more.
    """

    def __init__(self, kept: Supervised, history: History) -> None:
        self.kept, self.down_until, self.problem, self.given_up = kept, 0.0, "", False
        self.running = threading.Event()
        self._history, self._closing = history, threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keeper-{kept.name}", daemon=True)

    def open(self) -> None:
        """Start the process and this thread."""
        self._thread.start()

    def close(self) -> None:
        """Leave the process alone from now on."""
        self._closing.set()
        self._thread.join(200)

    def _keep(self) -> None:
        failed = 0
        while not self._closing.is_set():
            self.running.clear()
            failed = 0 if self._start() else failed + 1
            if not failed:
                self.running.set()
            self.given_up = failed >= _STARTS
            if self.given_up:
                return
            while not self._closing.wait(_POLL) and self.kept.ended() is None:
                pass
            if not self._closing.is_set():
                self.running.clear()
                self._history.record("death", process=self.kept.name, status=self.kept.ended())
                self.kept.end()
            while not self._closing.wait(_POLL) and self._history.now < self.down_until:
                pass

    def _start(self) -> bool:
        self._history.record("start", process=self.kept.name)
        try:
            found = self.kept.start()
        except Exception as error:
            self._history.record("failed", process=self.kept.name, text=f"{type(error).__name__}: {error}"[-2000:])
            self.problem = str(error)[-2000:]
            time.sleep(0.5)
            return False
        self.problem = ""
        self._history.record("ready", process=self.kept.name, **found)
        return True
