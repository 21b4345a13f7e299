"""SIGTERM and SIGINT, with which operators and supervisors end a process."""

import signal
import threading
from queue import SimpleQueue

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


def set_at_end_signals(*events: threading.Event) -> None:
    """Set one event at each of these signals, in turn; more signals do nothing. Call it in the main thread.

    A thread sets them: a handler that is interrupted by another signal while it holds an event's lock would wait for itself.
    """
    signals = SimpleQueue[int]()  # put may be interrupted by itself
    for number in _NUMBERS:
        signal.signal(number, lambda number, frame: signals.put(number))

    def set_in_turn() -> None:
        for event in events:
            signals.get()
            event.set()

    threading.Thread(target=set_in_turn, name="end-signals", daemon=True).start()


def ignore_end_signals() -> None:
    """Ignore these signals from now on, in a process that has nothing left to do.

    Python puts the default action back while it ends: a repeated signal would give a process that has ended in order the exit
    status of one that was killed.
    """
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)
