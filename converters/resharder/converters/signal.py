"""Signals: who changes something emits, who has connected is called. For the daemon and its clients alike."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVarTuple

Values = TypeVarTuple("Values")


class Signal(Generic[*Values]):
    """Something that happens, with the values that describe it.

    Connected functions are called in the order of their connection, on the thread that emits and under the locks that it holds.
    So they must not block, and must not take a lock that the emitter's may be waited for under. An exception reaches the emitter.
    Thread-safe: a function that is connected or disconnected during an emission is called from the next one on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connected: tuple[Callable[[*Values], object], ...] = ()

    @property
    def connections(self) -> int:
        """Number of connected functions."""
        return len(self._connected)

    def connect(self, call: Callable[[*Values], object]) -> None:
        """Call a function at every later emission."""
        with self._lock:
            self._connected = (*self._connected, call)

    def disconnect(self, call: Callable[[*Values], object]) -> None:
        """End one connection of a function. Raises ValueError if there is none."""
        with self._lock:
            connected = list(self._connected)
            connected.remove(call)
            self._connected = tuple(connected)

    def emit(self, *values: *Values) -> None:
        """Call every connected function."""
        for call in self._connected:
            call(*values)
