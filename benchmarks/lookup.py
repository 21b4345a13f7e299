"""Looking a model's tensors up by name again at each publish: `python -m benchmarks.lookup [--rounds N] [--json FILE]`.

The model has the modules and names of Qwen3-30B-A3B, 18,867 tensors in 25,239 modules, with rows of 8 elements, so that nearly
all of a publish is work for each tensor. A process publishes it to a daemon over shared memory: with the look-up, without it,
and without it again, in turn, in another order each time. The last shows what is noise.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from resharder.client.trainer.connect import connect
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.models.live import LocalTensors
from rich.console import Console
from rich.table import Table

from benchmarks.rows import Row, write
from benchmarks.shapes import QWEN3_30B_A3B
from tests.support.daemon import Daemon

SMALL = {
    "vocab_size": 64, "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 4, "head_dim": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
WAYS = ("with", "without", "without again")


def model_of(shapes: dict[str, tuple[int, ...]]) -> torch.nn.Module:
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)))
    return root


def without_look_up(self: LocalTensors) -> None:
    """Stand in for `LocalTensors.find_again`."""


def measure(rounds: int) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Return the wall and CPU seconds of each publish, and the CPU seconds of the look-up alone."""
    config = QWEN3_30B_A3B | SMALL
    model = model_of(expected_shapes(config))
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    alone: list[float] = []
    with Daemon(keep_count=1) as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1) as publisher:
        publisher.attach(model, config)
        print(f"{len([*model.parameters()])} tensors in {len([*model.modules()])} modules")
        gc.freeze()
        step = 0
        for number in range(-1, rounds):  # the first is a warm-up
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                step += 1
                with nullcontext() if way == "with" else patch.object(LocalTensors, "find_again", without_look_up):
                    seconds = timed(lambda step=step: publisher.publish(step).wait_ready(300))
                if number >= 0:
                    taken[way].append(seconds)
            tensors = publisher._live._tensors
            alone.append(timed(tensors.find_again)[1])
    return taken, alone


def timed(act: Callable[[], object]) -> tuple[float, float]:
    cpu, began = time.process_time(), time.perf_counter()
    act()
    return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"load {os.getloadavg()[0]:.1f}")
    taken, alone = measure(arguments.rounds)
    table = Table("publish", "seconds", "over `without`", "CPU seconds", "over `without`")
    for way in WAYS:
        row = []
        for kind in range(2):
            row += [f"{median(each[kind] for each in taken[way]):.3f}"]
            row += [f"{median(a[kind] / b[kind] for a, b in zip(taken[way], taken['without'], strict=True)):.3f}"]
        table.add_row(way, *row)
    Console(width=150).print(table)
    if arguments.json:
        ours, peer = (median(each[0] for each in taken[way]) for way in ("with", "without"))
        write([Row("publish 18,867 small tensors, with the look-up (peer: without)", ours, peer, None)], arguments.json)
    print(f"the look-up alone: {1e3 * median(alone):.1f} ms CPU")
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
