"""Store of a benchmark's daemon: a tmpfs with huge pages if this process may mount one, otherwise /dev/shm.

Operators of fast stores use huge pages (`mount -t tmpfs -o huge=always`), because a version then takes hundreds of page faults
rather than hundreds of thousands. The tmpfs is as large as /dev/shm.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fast_store() -> Iterator[tuple[Path, str]]:
    """Yield a folder for the store and its description."""
    folder, shared = Path(tempfile.mkdtemp(prefix="resharder-benchmark-")), os.statvfs("/dev/shm")
    options = f"huge=always,size={shared.f_blocks * shared.f_frsize}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True).returncode == 0
    if not mounted:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="resharder-benchmark-", dir="/dev/shm"))
    try:
        yield folder, "tmpfs with huge pages" if mounted else "/dev/shm"
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)
        shutil.rmtree(folder, ignore_errors=True)
