"""File descriptors of this process: a warning before the last one is used."""

import os
import resource

import structlog

_FEW = 64
_log = structlog.get_logger("resharder.descriptors")


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
            _log.warning("few_descriptors_left", used=used, limit=limit, advice="raise the daemon's limit (ulimit -n)")
        self._few = few
