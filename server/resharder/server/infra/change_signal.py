"""Something to wait for, without a lock over what changes: read `told`, look, and `wait(told, …)` if it is not there yet."""

import threading


class News:
    """Thread-safe, and no other lock is taken under it: `tell` may be called under any."""

    def __init__(self) -> None:
        self.told = 0
        self._changed = threading.Condition()

    def tell(self) -> None:
        with self._changed:
            self.told += 1
            self._changed.notify_all()

    def wait(self, told: int, seconds: float) -> None:
        """Until something was told after `told`, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self.told != told, seconds)
