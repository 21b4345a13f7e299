"""Whose turn it is in Python's interpreter.

A thread that needs the interpreter's lock again, as after each kernel that it launched and each call of NCCL, waits for it as
long as `sys.getswitchinterval` says, 5 ms, where another thread computes in Python. Beside one that stages a version of many
tensors a server's steps are slow then, and a transfer of hundreds of calls takes more than a second.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL = 50e-6  # seconds; with less, both threads are slower for the changes
_lock, _users, _before = threading.Lock(), 0, 0.0


@contextmanager
def quick_turns() -> Iterator[None]:
    """Whoever computes in Python meanwhile hands over at once when others have something to do, and takes longer for that."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(_INTERVAL)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_before)
