"""The interpreter's switch interval, shortened while latency matters.

A thread that needs the interpreter's lock again, for example after each kernel launch or NCCL call,
waits up to `sys.getswitchinterval()` (5 ms by default) while another thread computes in Python.
Beside a thread that stages a version of many tensors, that slows a server's steps and makes a
transfer of hundreds of calls take more than a second.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL = 50e-6  # seconds; below this, switching slows both threads
_lock, _users, _before = threading.Lock(), 0, 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the switch interval of the process; nested and concurrent uses share one setting."""
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
