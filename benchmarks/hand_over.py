"""Hand-over of a rank's boxes from its GPU into a version's files: into pages that stay registered, and through buffers.

`python -m benchmarks.hand_over [--gib N] [--tensor-mib N] [--threads 8,16] [--buffers 16,32] [--digest-threads 8,16]`. The store
is that of `stores.py`. Registered pages, and each setting of threads and buffers, are measured alone, and beside a process that
digests the same files as the daemon does, in a loop, once for each number of its threads. There are two limits: a copy between
pinned memory and the GPU, and the host's plain copies, without a GPU, from buffers of the same size into the same files, alone
and beside the digests. Prints GB/s, the medians of the rounds after the first.
"""

import argparse
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from resharder.client.transport.base import AssignedSlot, LiveItems
from resharder.client.transport.gpu_buffers import FromGpu
from resharder.converters.geometry.layout import Piece, TensorSpec, contiguous_strides, full_box
from resharder.converters.storage.files import FileLayout, MappedFiles, lay_out
from resharder.server.infra.filesystem import write_zeros
from resharder.server.store.digests import digest_tensors
from resharder.v1 import resources_pb2

from benchmarks.stores import fast_store
from benchmarks.vllm_reload import limit_seconds
from tests.support.released import ImmediateReleases

ROUNDS = 5


class Setting(NamedTuple):
    """Threads of the copy, and bytes of the buffer of each."""

    threads: int
    buffer_bytes: int


def digest_forever(folder: Path, files: tuple[FileLayout, ...], threads: int, bytes_read: Any) -> None:
    while True:
        for file in files:
            with MappedFiles(folder, [file]) as maps:
                digest_tensors(maps, threads)
            bytes_read.value += file.size


@contextmanager
def digests(folder: Path, files: tuple[FileLayout, ...], threads: int) -> Iterator[Callable[[], int]]:
    """Digest the files in another process, if there are threads for it; yields a function that returns the bytes read so far."""
    if not threads:
        yield lambda: 0
        return
    context = multiprocessing.get_context("spawn")
    bytes_read = context.Value("q", 0)
    beside = context.Process(target=digest_forever, args=(folder, files, threads, bytes_read))
    beside.start()
    try:
        while not bytes_read.value:  # its kernels are compiled then
            time.sleep(0.05)
        yield lambda: int(bytes_read.value)
    finally:
        beside.kill()
        beside.join()


def hand_over(folder: Path, specs: list[TensorSpec], tensors: dict[str, torch.Tensor], setting: Setting | None) -> float:
    """Return the median seconds, after a first time. Without a `setting` of buffers, the pages are registered after that."""
    pieces = [Piece(spec.name, full_box(spec.shape), spec.name, 0, contiguous_strides(spec.shape)) for spec in specs]
    slot, device = AssignedSlot(0, tuple(piece.box for piece in pieces), tuple(specs), 1 << 20), torch.device("cuda", 0)
    threads, buffer_bytes = setting or Setting(8, 16 << 20)
    next_files = None if setting else lambda version: folder
    transport = FromGpu(device, threads, lambda: NotImplemented, next_files=next_files, buffer_bytes=buffer_bytes)
    version = resources_pb2.Version(name="models/m/versions/1", folder=str(folder))
    times = []
    for _ in range(1 + ROUNDS):
        began = time.perf_counter()
        transport.deliver(version, slot, LiveItems(tensors, pieces), ImmediateReleases())
        times.append(time.perf_counter() - began)
        transport.wait_prepared(60)
    transport.close()
    return median(times[1:])


def plain_copies(folder: Path, files: tuple[FileLayout, ...], setting: Setting) -> float:
    """Return the median seconds in which threads copy a buffer each, over and over, to all bytes of the files."""
    threads, size_of_buffer, times = setting.threads, setting.buffer_bytes, []
    buffers = [ctypes.create_string_buffer(b"x" * size_of_buffer) for _ in range(threads)]
    with MappedFiles(folder, files, writable=True) as maps, ThreadPoolExecutor(threads) as pool:
        bodies = [(begin + len(file.header), begin + file.size) for begin, file in zip(maps.begins, files, strict=True)]
        parts = [(at, min(size_of_buffer, end - at)) for first, end in bodies for at in range(first, end, size_of_buffer)]

        def copy(own: int) -> None:
            for at, size in parts[own::threads]:
                ctypes.memmove(at, buffers[own], size)

        for _ in range(1 + ROUNDS):
            began = time.perf_counter()
            list(pool.map(copy, range(threads)))
            times.append(time.perf_counter() - began)
    return median(times[1:])


def measure(copy: Callable[[], float], total: int, bytes_read: Callable[[], int]) -> str:
    """Return the rates in GB/s of a copy, and of the digests meanwhile."""
    began, before = time.perf_counter(), bytes_read()
    seconds = copy()
    digested = (bytes_read() - before) / (time.perf_counter() - began)
    return f"{total / seconds / 1e9:6.1f} ({digested / 1e9:4.1f})"


def settings(threads: str, buffers: str) -> list[Setting]:
    """Parse lists such as `8,16` and `16,32` (MiB) into every combination."""
    return [Setting(number, mib << 20) for number in map(int, threads.split(",")) for mib in map(int, buffers.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--tensor-mib", type=int, default=16)
    parser.add_argument("--threads", default="8,16", help="threads that copy")
    parser.add_argument("--buffers", default="16,32", help="MiB of the buffer of each of them")
    parser.add_argument("--digest-threads", default="8,16", help="threads of the digests beside")
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
        print("threads of digests; of copies  buffer  from the GPU, GB/s (digests)  plain copies (digests)", flush=True)
        for digest_threads in (0, *map(int, asked.digest_threads.split(","))):
            with digests(store, files, digest_threads) as bytes_read:
                straight = measure(partial(hand_over, store, specs, tensors, None), total, bytes_read)
                print(f"{digest_threads:10}  registered pages    {straight}", flush=True)
                for each in settings(asked.threads, asked.buffers):
                    ours = measure(partial(hand_over, store, specs, tensors, each), total, bytes_read)
                    plain = measure(partial(plain_copies, store, files, each), total, bytes_read)
                    print(f"{digest_threads:10} {each.threads:10}  {each.buffer_bytes >> 20:3} MiB  {ours}  {plain}", flush=True)


if __name__ == "__main__":
    main()
