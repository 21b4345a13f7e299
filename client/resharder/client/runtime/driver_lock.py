"""Priority of transfers over long calls into the CUDA driver, in one process.

While the driver registers or releases pages, it delays the kernel launches of all other threads: a
transfer of 180 ms took 300 ms beside a hand-over to the host. A garbage collection stops every
thread, for half a second beside a trainer's model of many tensors.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from resharder.client.runtime.switch_interval import short_switch_interval


class DriverLock:
    """Priority sections wait only for background calls under way; background calls wait for all priority sections.

    Sections of one kind run side by side.
    """

    def __init__(self) -> None:
        self._changed, self._priority, self._background = threading.Condition(), 0, 0
        self._gc_was_enabled = False

    @contextmanager
    def priority(self) -> Iterator[None]:
        """Hold back new background calls, disable garbage collection and shorten the switch interval."""
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
        """Run one short call into the driver once no priority section is active."""
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
