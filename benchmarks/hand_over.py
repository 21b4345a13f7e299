"""Hand-over of a rank's boxes from its GPU into a version's files, by threads and sizes of their buffers.

`python -m benchmarks.hand_over [--gib N] [--tensor-mib N] [--threads 8,16] [--buffers 16,32]`. The store is that of `stores.py`.
Each setting is measured alone, and beside a process that digests the same files as the daemon does, in a loop. There are two
limits: a copy between pinned memory and the GPU, and the host's plain copies, without a GPU, from buffers of the same size
into the same files, alone and beside the digests. Prints GB/s, the medians of the rounds after the first.
"""

import argparse
import ctypes
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.gpu_buffers import FromGpu
from resharder.client.transport.live_items import LiveItems
from resharder.converters.geometry.layout import Piece, TensorSpec, contiguous_strides, full_box
from resharder.converters.storage.files import FileLayout, MappedFiles, lay_out
from resharder.server.infra.filesystem import write_zeros
from resharder.server.store.digests import digest_tensors
from resharder.v1 import resources_pb2

from benchmarks.stores import fast_store
from benchmarks.vllm_reload import limit_seconds
from tests.support.released import Released

ROUNDS, DIGEST_THREADS = 3, 8


def digest_forever(folder: Path, files: tuple[FileLayout, ...], bytes_read: Any) -> None:
    while True:
        for file in files:
            with MappedFiles(folder, [file]) as maps:
                digest_tensors(maps, DIGEST_THREADS)
            bytes_read.value += file.size


def hand_over(folder: Path, specs: list[TensorSpec], tensors: dict[str, torch.Tensor], threads: int, buffer_bytes: int) -> float:
    """Return the median seconds."""
    pieces = [Piece(spec.name, full_box(spec.shape), spec.name, 0, contiguous_strides(spec.shape)) for spec in specs]
    slot = AssignedSlot(0, tuple(piece.box for piece in pieces), tuple(specs), 1 << 20)
    transport, times = FromGpu(torch.device("cuda", 0), threads, lambda: NotImplemented, buffer_bytes), []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        transport.deliver(resources_pb2.Version(folder=str(folder)), slot, LiveItems(tensors, pieces), Released())
        times.append(time.perf_counter() - began)
    return median(times[1:])


def plain_copies(folder: Path, files: tuple[FileLayout, ...], threads: int, buffer_bytes: int) -> float:
    """Return the median seconds in which threads copy a buffer each, over and over, to all bytes of the files."""
    buffers, times = [ctypes.create_string_buffer(b"x" * buffer_bytes) for _ in range(threads)], []
    with MappedFiles(folder, files, writable=True) as maps, ThreadPoolExecutor(threads) as pool:
        bodies = [(begin + len(file.header), begin + file.size) for begin, file in zip(maps.begins, files, strict=True)]
        parts = [(at, min(buffer_bytes, end - at)) for first, end in bodies for at in range(first, end, buffer_bytes)]

        def copy(own: int) -> None:
            for at, size in parts[own::threads]:
                ctypes.memmove(at, buffers[own], size)

        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            list(pool.map(copy, range(threads)))
            times.append(time.perf_counter() - began)
    return median(times[1:])


def measure(copy: Callable[[], float], folder: Path, files: tuple[FileLayout, ...], total: int) -> str:
    """Return the rates in GB/s of a copy alone, beside digests of the same files, and of these digests."""
    alone, context = copy(), multiprocessing.get_context("spawn")
    bytes_read = context.Value("q", 0)
    beside = context.Process(target=digest_forever, args=(folder, files, bytes_read))
    beside.start()
    while not bytes_read.value:  # its kernels are compiled then
        time.sleep(0.05)
    began, before = time.perf_counter(), bytes_read.value
    with_digests = copy()
    digested = (bytes_read.value - before) / (time.perf_counter() - began)
    beside.kill()
    beside.join()
    return f"{total / alone / 1e9:5.1f}, {total / with_digests / 1e9:5.1f} ({digested / 1e9:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--tensor-mib", type=int, default=16)
    parser.add_argument("--threads", default="4,8,12,16")
    parser.add_argument("--buffers", default="16,32,64", help="MiB of each thread's buffer")
    asked = parser.parse_args()
    count = (asked.gib << 10) // asked.tensor_mib
    specs = [TensorSpec(f"tensor.{i}", "BF16", (asked.tensor_mib << 6, 8192)) for i in range(count)]
    tensors = {spec.name: torch.randint(0, 1 << 15, spec.shape, dtype=torch.int16, device="cuda") for spec in specs}
    total, files = sum(spec.size for spec in specs), lay_out(specs)
    with fast_store() as (store, kind):
        for file in files:
            write_zeros(store / file.path, file.header, file.size)
        limit = total / limit_seconds(total) / 1e9
        print(f"{total / 1e9:.1f} GB, {len(specs)} tensors, {len(files)} files, {kind}; limit {limit:.1f} GB/s", flush=True)
        print("threads  buffer  from the GPU: alone, beside digests (digests); plain copies: the same; GB/s", flush=True)
        for threads in map(int, asked.threads.split(",")):
            for mib in map(int, asked.buffers.split(",")):
                ours = measure(partial(hand_over, store, specs, tensors, threads, mib << 20), store, files, total)
                plain = measure(partial(plain_copies, store, files, threads, mib << 20), store, files, total)
                print(f"{threads:7}  {mib:3} MiB  {ours}; {plain}", flush=True)


if __name__ == "__main__":
    main()
