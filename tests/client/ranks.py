"""Four real ranks of one of these modules."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(module: str, endpoint: str, folder: Path) -> None:
    """Raises CalledProcessError where a rank fails."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *("-m", module, endpoint, folder),
        ],
        check=True,
        timeout=1000,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
