"""Rank of the trainer in `benchmarks.publish`, under torchrun: publishes, sends and copies the same bytes alternately.

Rank 0 prints `{way: [seconds of the slowest rank, …]}` as its last line.
"""

import json
import sys
import time
from collections.abc import Callable

from tests.support.megatron_models import build_model  # isort: skip
import numpy as np
import torch
import torch.distributed as dist
from resharder.client import connect

from benchmarks.peers import TcpSender, copy


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    chunks = build_model(settings["config"], tp=dist.get_world_size(), dtype=torch.bfloat16)
    parameters = [p.detach() for chunk in chunks for p in chunk.parameters()]
    for parameter in parameters:
        parameter.view(torch.int16).random_(0, 1 << 15)
    arrays = [parameter.view(torch.int16).numpy() for parameter in parameters]
    sender = TcpSender(settings["tcp_port"], sum(array.nbytes for array in arrays))
    copies = [np.ones_like(array) for array in arrays]
    ways: dict[str, Callable[[int], None]] = {
        "tcp": lambda step: sender.send(arrays),
        "memcpy": lambda step: copy(copies, arrays),
    }
    publisher = connect(settings["endpoint"], model="policy")
    publisher.attach(chunks, settings["config"])
    ways["publish"] = lambda step: publisher.publish(step).wait_ready(120)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(settings["warm_up"] + settings["rounds"]):
        for way, work in ways.items():
            elapsed = slowest_rank(work, step)
            if step >= settings["warm_up"]:
                seconds[way].append(elapsed)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def slowest_rank(work: Callable[[int], None], step: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    work(step)
    elapsed = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


if __name__ == "__main__":
    main()
