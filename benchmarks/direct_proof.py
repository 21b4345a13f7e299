"""Verification alone on one GPU, with blocks of several shapes: `python -m benchmarks.direct_proof`.

It digests half of a model, as one of two vLLM workers has it. The limit is the rate of a read by torch."""

import time
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from resharder.client.gpu import digest_kernel
from resharder.client.gpu.digest import Digester
from rich.console import Console
from rich.table import Table

from benchmarks import shapes
from benchmarks.direct_layouts import memory_of, written_workers

BLOCKS = ((4, 128, 1), (2, 128, 1), (8, 128, 1), (4, 256, 2), (4, 512, 4), (8, 128, 2), (16, 128, 4))


def seconds(work: object, rounds: int = 5) -> float:
    took = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()  # type: ignore[operator]
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    return median(took[1:])


def main() -> None:
    device = torch.device("cuda")
    layout = written_workers(shapes.QWEN3_8B, 2)["worker 0"]
    tensors = {n: torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, device=device).view(t)
               for n, (size, t) in memory_of(layout).items()}  # fmt: skip
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = torch.ones(1 << 30, dtype=torch.int64, device=device)
    reading = memory.nbytes / seconds(memory.sum)
    proof, table = Digester(layout, tensors, device), Table("block (rows, words, warps)", "ms", "GB/s", "of the read")
    digests = proof.digests()
    for block in BLOCKS:
        with patch.object(digest_kernel, "add_digests_of_words", partial(digest_kernel.add_digests_of_words, block=block)):
            if proof.digests() != digests:
                raise AssertionError(f"{block}: other digests")
            took = seconds(proof.digests)
        table.add_row(str(block), f"{took * 1000:.2f}", f"{size / took / 1e9:.0f}", f"{size / took / reading:.0%}")
    print(f"{size / 1e9:.2f} GB; torch's sum reads {reading / 1e9:.0f} GB/s", flush=True)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
