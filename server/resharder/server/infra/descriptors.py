"""File descriptors of this process: a warning while there are still some."""

import os
import resource

import structlog

_FEW = 64
_log = structlog.get_logger("resharder.descriptors")


class Descriptors:
    """`look` warns once each time that few come to be left. Metrics: `process_open_fds` and `process_max_fds`."""

    def __init__(self) -> None:
        self._few = False

    def look(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            used = len(os.listdir("/proc/self/fd"))
        except OSError:  # to look takes one
            used = limit
        few = limit - used < max(_FEW, limit // 10)
        if few and not self._few:
            _log.warning("few_descriptors_left", used=used, limit=limit, advice="raise the daemon's limit (ulimit -n)")
        self._few = few
