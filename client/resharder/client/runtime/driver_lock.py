"""Who goes first where transfers meet a process's other work.

While CUDA's driver registers or lets go of pages, other threads' kernels are not launched. Beside a hand-over to the host
transfers took 300 ms that take 180 alone. While Python looks for garbage no thread goes on: half a second beside a trainer's
model of many tensors.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from resharder.client.runtime.switch_interval import quick_turns


class Turnstile:
    """Those `undisturbed` wait for the calls under way and for no others, nor for other threads' Python longer than they must;
    `slowly` waits until nobody is undisturbed."""

    def __init__(self) -> None:
        self._news, self._undisturbed, self._slow = threading.Condition(), 0, 0
        self._collects = False  # the process, by itself

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._news:
            self._undisturbed += 1
            if self._undisturbed == 1:
                self._collects = gc.isenabled()
                gc.disable()
            self._news.wait_for(lambda: not self._slow)
        try:
            with quick_turns():
                yield
        finally:
            with self._news:
                self._undisturbed -= 1
                if not self._undisturbed and self._collects:
                    gc.enable()
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
