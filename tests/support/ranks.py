"""Four real ranks of a job: forked from one process that has imported their modules and called nothing of them, which a test run
keeps (torch, Megatron and transformers, imported four times, take longer than most ranks take for all the rest), or started by
torchrun.

Each calls `main` of a module with the arguments. Forked ranks share the order of their sets, as ranks of a job do not: what sends
and takes by turns is tested under `torchrun` too.
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.forked import ForkedProcess, start
from tests.support.ports import free_port

MODULES = (
    "tests.client.adapter_ranks",
    "tests.client.bridge_ranks",
    "tests.client.dtensor_ranks",
    "tests.client.megatron_ranks",
    "tests.client.save_ranks",
    "tests.client.vision_ranks",
    "tests.client.home_ranks",
    "tests.support.megatron_ranks",
)
"""They have one source; a module that is not among them has its own."""
WORLD_SIZE = 4
TIMEOUT = 1000.0
_NAME = "tests.support.ranks"
_ON_IMPORT = {"OMP_NUM_THREADS": "1"}


class RanksFailed(Exception):
    """A rank ended with an error, or not in time."""


def forked(module: str, *arguments: object) -> None:
    """Raises RanksFailed with what the ranks wrote."""
    common = os.environ | _ON_IMPORT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE)}
    options: Any = {"imported_with": _ON_IMPORT, "preloaded": MODULES if module in MODULES else (module,)}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="resharder-ranks-")))
        logs = [stack.enter_context((folder / str(rank)).open("wb")) for rank in range(WORLD_SIZE)]
        ranks = list[ForkedProcess]()
        for rank, log in enumerate(logs):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(start(_NAME, environment, log, arguments=[module, *map(str, arguments)], **options))
            stack.callback(ranks[-1].kill)
        statuses: list[int | None] = [None]
        end = time.monotonic() + TIMEOUT
        while None in statuses and not any(statuses) and time.monotonic() < end:
            time.sleep(0.02)
            statuses = [rank.poll() for rank in ranks]
        if any(status != 0 for status in statuses):
            written = [f"rank {rank}:\n{(folder / str(rank)).read_text(errors='replace')}" for rank in range(WORLD_SIZE)]
            raise RanksFailed("\n".join([f"{module}: statuses {statuses}", *written]))


def torchrun(module: str, *arguments: object) -> None:
    """Raises CalledProcessError where a rank fails."""
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD_SIZE)),
            *("-m", _NAME, module, *map(str, arguments)),
        ],
        check=True,
        timeout=TIMEOUT,
        env=os.environ | _ON_IMPORT,
        cwd=Path(__file__).parents[2],
    )


def main() -> None:
    import_module(sys.argv[1]).main(*sys.argv[2:])


if __name__ == "__main__":
    main()
