"""Priority of transfers over long calls into the CUDA driver, in one process.

While the driver registers or releases pages, it delays the kernel launches of all other threads: a transfer took 300 ms instead
of 180 ms beside a registration of host pages. A garbage collection stops all threads, for half a second beside a trainer's
model of many tensors.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from resharder.client.runtime.switch_interval import short_switch_interval


class DriverLock:
    """Lock with priority sections, which wait only for background calls under way, and background calls, which wait for all
    priority sections. Sections of one kind run concurrently.
    """

    def __init__(self) -> None:
        self._changed, self._priority, self._background = threading.Condition(), 0, 0
        self._gc_was_enabled = False

    @contextmanager
    def priority(self) -> Iterator[None]:
        """Defer new background calls, disable garbage collection and shorten the switch interval while the block runs."""
        with self._changed:
            self._priority += 1
            if self._priority == 1:
                self._gc_was_enabled = gc.isenabled()
                gc.disable()
            self._changed.wait_for(lambda: not self._background)
        try:
            with short_switch_interval():
                yield
        finally:
            with self._changed:
                self._priority -= 1
                if not self._priority and self._gc_was_enabled:
                    gc.enable()
                self._changed.notify_all()

    @contextmanager
    def background(self) -> Iterator[None]:
        """Run a block, one short call into the driver, once no priority section is active."""
        with self._changed:
            self._changed.wait_for(lambda: not self._priority)
            self._background += 1
        try:
            yield
        finally:
            with self._changed:
                self._background -= 1
                self._changed.notify_all()


DRIVER_LOCK = DriverLock()
