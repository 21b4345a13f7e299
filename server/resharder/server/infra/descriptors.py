"""File descriptors of this process: as many as it may have, a warning before the last one is used, and few words without any."""

import errno
import os
import resource
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any

import structlog

_FEW = 64
_MOST = 1 << 20  # some programs that a check starts visit every descriptor that they may have
_QUIET_SECONDS = 60.0
_log = structlog.get_logger("resharder.descriptors")


def raise_descriptor_limit() -> Callable[[], None]:
    """Raise the soft limit of open files as far as the hard one allows. Returns a function that logs the limits."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if before != resource.RLIM_INFINITY and wanted > before:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return lambda: _log.info("descriptor_limit", limit=limit, before=before, hard=hard)


class Descriptors:
    """Watch over the limit of open files. The metrics are `process_open_fds` and `process_max_fds`. Not thread-safe."""

    def __init__(self) -> None:
        self._few = False

    def look(self) -> None:
        """Log a warning when fewer than 64 descriptors, or a tenth of the limit, are left; once until more are free again."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # listing the folder takes a descriptor
            used = limit
        few = limit - used < max(_FEW, limit // 10)
        if few and not self._few:
            _log.warning("few_descriptors_left", used=used, limit=limit, advice="raise the process's hard limit (ulimit -Hn)")
        self._few = few


class DescriptorErrorFilter:
    """Processor of log entries that lets one a minute pass of those whose error is that no descriptor is left.

    Such an entry has no traceback, and the number of those that were left out before it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last, self._left_out = clock, -_QUIET_SECONDS, 0

    def __call__(self, logger: Any, method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the entry to log. Raises structlog.DropEvent."""
        if not is_exhausted(entry.get("exc_info")):
            return entry
        now = self._clock()
        if now < self._last + _QUIET_SECONDS:
            self._left_out += 1
            raise structlog.DropEvent
        self._last = now
        entry["error"] = f"no file descriptors left: {entry.pop('exc_info')}"
        entry["limit"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        entry["left_out"], self._left_out = self._left_out, 0
        return entry


def is_exhausted(error: object) -> bool:
    """Return whether an exception, or one that caused it, says that no descriptor is left."""
    while isinstance(error, BaseException):
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__
    return False


def log_loop_error(loop: Any, context: dict[str, Any]) -> None:
    """Log an error that asyncio reports. An exception handler of an event loop, in place of asyncio's own log."""
    details = {key: repr(value) for key, value in context.items() if key not in ("message", "exception")}
    _log.error("loop_failed", message=context.get("message", ""), exc_info=context.get("exception"), **details)
