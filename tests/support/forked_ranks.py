"""Four real ranks under torchrun's own agent, forked from one process that has imported their module and called nothing of it:
torch, Megatron and transformers, imported four times, take longer than most ranks take for all the rest.

`python -m tests.support.forked_ranks MODULE ARGUMENT...` calls the module's `main` in each.
They share the order of their sets, as ranks
of a job do not: what sends and takes by turns is also tested under `tests.client.ranks.torchrun`.
"""

import multiprocessing
import os
import subprocess
import sys
import uuid
from importlib import import_module
from pathlib import Path


def forked(module: str, *arguments: object) -> None:
    """Raises CalledProcessError where a rank fails; what it raised is on the standard error."""
    subprocess.run(
        [sys.executable, "-m", "tests.support.forked_ranks", module, *map(str, arguments)],
        check=True,
        timeout=1000,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )


def rank(module: str, arguments: list[str]) -> None:
    import_module(module).main(*arguments)


def main(module: str, *arguments: str) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload([module])
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=4,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        start_method="forkserver",
        max_restarts=0,
    )
    elastic_launch(config, rank)(module, list(arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
