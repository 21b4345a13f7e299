"""Runs of the drivers that put the whole system through faults: `tests.failpoints`, `tests.chaos`, `tests.soak`."""

import os
import subprocess
import sys
from pathlib import Path


class Run:
    """`python -m tests.DRIVER ARGUMENT...`, which passes if it ends by itself with 0."""

    tier = "storm"

    def __init__(self, driver: str, *arguments: object, timeout: float) -> None:
        ended = subprocess.run(
            [sys.executable, "-m", f"tests.{driver}", *map(str, arguments)],
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        print(ended.stdout)
        assert ended.returncode == 0, f"{driver} {arguments}:\n{ended.stdout}\n{ended.stderr[-3000:]}"
