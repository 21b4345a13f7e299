"""The kernels of the direct path and of casts without a GPU: Triton as an interpreter, imported in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.variants import sampled

DIRECT, CAST = "tests.client.direct_kernels", "tests.converters.cast_kernels"


@pytest.mark.parametrize(("module", "rounds"), sampled([(DIRECT, 1), (DIRECT, 3), (CAST, 1), (CAST, 2)], [(CAST, 1)]))
def test_kernels_move_digest_and_cast_as_the_host_does(module: str, rounds: int) -> None:
    pytest.importorskip("triton", reason="the kernels run in Triton's interpreter")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, str(rounds)]
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
