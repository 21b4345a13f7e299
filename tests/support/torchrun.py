"""`torchrun --standalone --nproc-per-node N -m MODULE ARGUMENT...`, whose ranks are forked: torchrun's own import all anew.

The agent is torchrun's. Each rank runs the module as its main one. Arguments: N MODULE ARGUMENT...
"""

import runpy
import sys

import torch.distributed.argparse_util  # noqa: F401  # the agent imports it
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main() -> None:
    ranks, module, *arguments = sys.argv[1:]
    settings = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "max_restarts": 0, "monitor_interval": 0.1}
    settings |= {"start_method": "fork"}
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=int(ranks), **settings)
    elastic_launch(config, rank)(module, arguments)


def rank(module: str, arguments: list[str]) -> None:
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
