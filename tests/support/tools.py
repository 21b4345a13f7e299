"""External programs that check deployments, which may be missing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def tool(name: str, package: str) -> str:
    """Where it is; skips the test where it is not, and says how to get it."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))
    if found is None:
        pytest.skip(f"no {name} on this machine: .ci/tools installs it ({package})")
    return found


def checked(*command: object) -> str:
    """What it prints, on both outputs; fails with that if it exits with anything but 0."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output
