"""Who goes first where transfers meet a process's other work.

While CUDA's driver registers or lets go of pages, other threads' kernels are not launched. And a thread that needs Python's
interpreter lock again, as after each call of NCCL, waits for it as long as `sys.getswitchinterval` says, 5 ms, where another
thread computes in Python: a transfer of hundreds of calls would take more than a second.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL = 20e-6  # seconds


class Turnstile:
    """Those `undisturbed` wait for the calls under way and for no others, and for other threads' Python no longer than they must;
    `slowly` waits until nobody is undisturbed."""

    def __init__(self) -> None:
        self._news, self._undisturbed, self._slow = threading.Condition(), 0, 0
        self._interval = 0.0  # the process's own

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._news:
            self._undisturbed += 1
            if self._undisturbed == 1:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(_INTERVAL)
            self._news.wait_for(lambda: not self._slow)
        try:
            yield
        finally:
            with self._news:
                self._undisturbed -= 1
                if not self._undisturbed:
                    sys.setswitchinterval(self._interval)
                self._news.notify_all()

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """For one short call at a time."""
        with self._news:
            self._news.wait_for(lambda: not self._undisturbed)
            self._slow += 1
        try:
            yield
        finally:
            with self._news:
                self._slow -= 1
                self._news.notify_all()


DRIVER = Turnstile()
