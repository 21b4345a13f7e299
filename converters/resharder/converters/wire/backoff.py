"""Pauses between attempts to reach a daemon or a data port."""

import random
import time


class Backoff:
    """Pauses between attempts, which double, with jitter, until the patience is used up.

    Args:
        patience: Bound on the sum of all pauses and attempts, in seconds.
        first: Longest first pause, in seconds.
        longest: Bound on a pause, in seconds.
    """

    def __init__(self, patience: float, first: float = 0.05, longest: float = 2.0) -> None:
        self._end = time.monotonic() + patience
        self._pause, self._longest = first, longest
        self._random = random.Random()  # apart from the generator that a trainer has seeded

    @property
    def left(self) -> float:
        """Seconds of patience that are left."""
        return max(0.0, self._end - time.monotonic())

    def wait(self) -> bool:
        """Sleep for the next pause and return True, or return False at once if the patience is used up."""
        if not self.left:
            return False
        time.sleep(min(self._pause * self._random.uniform(0.5, 1.0), self.left))
        self._pause = min(self._pause * 2, self._longest)
        return True
