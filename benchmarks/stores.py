"""Where a benchmark's daemon keeps its versions: a tmpfs with huge pages where this process may mount one, else /dev/shm.

Huge pages are what an operator of a fast store sets (`mount -t tmpfs -o huge=always`): mapping a version costs hundreds of page
faults then, not hundreds of thousands. It is as large as /dev/shm.
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
    """(folder, what it is)."""
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
