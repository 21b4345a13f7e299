"""The interpreter's switch interval, shortened while latency matters.

A thread that has released the interpreter's lock, as in each kernel launch or NCCL call, waits up to `sys.getswitchinterval()`
(5 ms by default) to get it back while another thread computes in Python. Beside a thread that stages a version of many tensors,
that slows a server's steps, and a transfer of hundreds of calls takes more than a second.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_INTERVAL = 50e-6  # seconds; below this, switching slows both threads
_lock, _users, _before = threading.Lock(), 0, 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Shorten the process's switch interval while the block runs; nested and concurrent uses share one setting."""
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
