"""Threads beside a storm that do the same thing again and again."""

import threading
from abc import ABC, abstractmethod


class Periodic(ABC):
    """Thread that calls `act`, with `period` seconds before each call, until it is closed."""

    def __init__(self, period: float) -> None:
        self._period = period
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @abstractmethod
    def act(self) -> None:
        """Do it once."""

    def open(self) -> None:
        """Start."""
        self._thread.start()

    def close(self) -> None:
        """Stop, if it was started."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(60)

    def _run(self) -> None:
        while not self._ended.wait(self._period):
            self.act()
