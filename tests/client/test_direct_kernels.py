"""The kernels of the direct path without a GPU: Triton has to be imported as an interpreter, so in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_move_and_digest_as_the_host_does() -> None:
    pytest.importorskip("triton", reason="the kernels run in Triton's interpreter")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.client.direct_kernels"]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
