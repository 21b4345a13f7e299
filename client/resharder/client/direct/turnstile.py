"""Who goes first where CUDA's driver is busy: while it registers or lets go of pages, other threads' kernels are not launched."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turnstile:
    """Those `undisturbed` wait for the calls under way and for no others; `slowly` waits until nobody is undisturbed."""

    def __init__(self) -> None:
        self._news, self._undisturbed, self._slow = threading.Condition(), 0, 0

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self._news:
            self._undisturbed += 1
            self._news.wait_for(lambda: not self._slow)
        try:
            yield
        finally:
            with self._news:
                self._undisturbed -= 1
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
