"""A rank's memory as blocks that other processes can map: a whole allocation, or a run of physical pieces.

Blocks are what the driver can share, so they also hold what lies between tensors. torch's caching allocator takes its memory by
cudaMalloc, of which a handle can be shared, or with expandable segments by cuMemCreate, in pieces of 20 MiB
(CUDACachingAllocator.cpp, torch 2.11), each of which is shared as a file descriptor.
"""

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import xxhash
from resharder.client.direct.base import DirectFailed
from resharder.client.gpu import cuda_driver
from resharder.client.gpu.cuda_driver import Allocation


class NotShareable(DirectFailed):
    """Memory cannot be shared with other processes."""


Range = tuple[int, int]
"""First and end address."""


@dataclass(frozen=True)
class Block:
    """Contiguous memory that can be shared.

    Attributes:
        begin: First address in its process.
        size: In bytes.
        id: The same as long as the physical memory is.
        kind: "ipc" for memory that a handle opens, "fd" for file descriptors, "host" for memory of a CPU.
        pieces: Addresses and sizes of the parts that are shared one at a time.
    """

    begin: int
    size: int
    id: str
    kind: str
    pieces: tuple[tuple[int, int], ...]


def blocks_of(ranges: Iterable[Range], device: torch.device) -> list[Block]:
    """Return the blocks that hold all of these ranges, sorted by address.

    Raises:
        NotShareable: Its allocator made it so that other processes cannot map it, or CUDA's driver refuses.
    """
    merged = _merged(ranges)
    if device.type == "cpu":
        return [Block(a, b - a, f"{a:x}-{b:x}", "host", ((a, b - a),)) for a, b in merged]
    found: list[Allocation] = []
    try:
        with of_device(device):
            for begin, end in merged:
                at = max(begin, found[-1].begin + found[-1].size) if found else begin
                while at < end:
                    found.append(_shareable(cuda_driver.allocation_at(at)))
                    at = found[-1].begin + found[-1].size
    except RuntimeError as error:
        raise NotShareable(str(error)) from error
    return _joined(found)


def of_device(device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which memory of a device is shared and mapped."""
    return cuda_driver.context(device) if device.type == "cuda" else nullcontext()


def _merged(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _shareable(allocation: Allocation) -> Allocation:
    if not (allocation.ipc or allocation.fd):
        raise NotShareable(f"other processes cannot map an allocation of {allocation.size} bytes")
    return allocation


def _joined(allocations: list[Allocation]) -> list[Block]:
    """Return a block for each allocation, or for each run of pieces without a gap, of which tensors may take several."""
    runs: list[list[Allocation]] = []
    for each in allocations:
        last = runs[-1][-1] if runs else None
        if last is not None and last.fd and each.fd and last.begin + last.size == each.begin:
            runs[-1].append(each)
        else:
            runs.append([each])
    return [
        Block(
            run[0].begin,
            sum(piece.size for piece in run),
            xxhash.xxh3_128_hexdigest(",".join(f"{piece.begin} {piece.id}" for piece in run).encode()),
            "ipc" if run[0].ipc else "fd",
            tuple((piece.begin, piece.size) for piece in run),
        )
        for run in runs
    ]


def handle_of(block: Block) -> str:
    """Return what opens a block besides file descriptors, as text. Raises DriverFailed."""
    if block.kind == "ipc":
        return cuda_driver.ipc_handle(block.begin).hex()
    return str(os.getpid()) if block.kind == "host" else ""
