"""Blocks of another process's memory in this process's address space."""

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.peer_memory.export import of_device
from resharder.client.gpu import cuda_driver
from resharder.converters.geometry.piece_arrays import Ints


class _Mapped(Protocol):
    address: int

    def refresh(self) -> None:
        """Make the memory's present content visible."""

    def close(self) -> None:
        """Unmap."""


class _Allocation:
    """Allocation that was opened by its handle."""

    def __init__(self, handle: str) -> None:
        self.address = cuda_driver.ipc_open(bytes.fromhex(handle))

    def refresh(self) -> None:
        """Do nothing: the memory is the other process's."""

    def close(self) -> None:
        cuda_driver.ipc_close(self.address)


class _Pieces:
    """Pieces, each of a file descriptor, at contiguous addresses."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._size, self._sizes, self._end = device, size, list[int](), 0
        self.address = cuda_driver.reserve(size)

    def extend(self, sizes: Sequence[int], fds: Sequence[int]) -> None:
        """Map the next pieces."""
        for size, fd in zip(sizes, fds, strict=True):
            cuda_driver.map_fd(self.address + self._end, size, fd)
            self._sizes.append(size)
            cuda_driver.allow(self.address + self._end, size, self._device)
            self._end += size

    def refresh(self) -> None:
        """Do nothing: the memory is the other process's."""

    def close(self) -> None:
        """Unmap the pieces."""
        at = self.address
        for size in self._sizes:
            cuda_driver.unmap(at, size)
            at += size
        cuda_driver.free_addresses(self.address, self._size)


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Copied:
    """Memory of a CPU, which Linux maps into no other process: a copy, read anew by `refresh` (process_vm_readv)."""

    def __init__(self, pid: int, begin: int, size: int) -> None:
        self._pid, self._begin, self._memory = pid, begin, np.empty(size, np.uint8)
        self.address: int = self._memory.ctypes.data
        self._read(min(size, 1))  # fails now rather than in a transfer

    def refresh(self) -> None:
        """Read the memory anew."""
        self._read(len(self._memory))

    def _read(self, size: int) -> None:
        call: Any = ctypes.CDLL(None, use_errno=True).process_vm_readv
        call.restype = ctypes.c_ssize_t
        done = 0
        while done < size:
            here, there = _Vector(self.address + done, size - done), _Vector(self._begin + done, size - done)
            got = call(self._pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if got <= 0:
                raise DirectFailed(f"cannot read the memory of process {self._pid}: {os.strerror(ctypes.get_errno())}")
            done += got

    def close(self) -> None:
        """Free the copy."""
        self._memory = np.empty(0, np.uint8)


class _Known(NamedTuple):
    begin: int
    size: int
    mapped: _Mapped


class Mappings:
    """Mapped blocks of one other process, by their ids. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[str, _Known] = {}

    def add(self, id: str, kind: str, begin: int, size: int, handle: str, sizes: Sequence[int], fds: Sequence[int]) -> None:
        """Map a block, or the next pieces of one.

        Args:
            id: The block's id.
            kind: Its kind.
            begin: Its address in the other process.
            size: In bytes.
            handle: `export.handle_of` it.
            sizes: Sizes of the pieces, for file descriptors.
            fds: A file descriptor of each piece; they stay the caller's.

        Raises:
            DirectFailed, RuntimeError: The memory cannot be mapped here.
        """
        with of_device(self._device):
            if id not in self._known:
                self._known[id] = _Known(begin, size, self._opened(kind, begin, size, handle))
            mapped = self._known[id].mapped
            if isinstance(mapped, _Pieces):
                mapped.extend(sizes, fds)

    def _opened(self, kind: str, begin: int, size: int, handle: str) -> _Mapped:
        match kind:
            case "ipc":
                return _Allocation(handle)
            case "fd":
                return _Pieces(self._device, size)
            case "host":
                return _Copied(int(handle), begin, size)
        raise DirectFailed(f"expected a block of kind ipc, fd or host, got {kind}")

    def keep(self, ids: Sequence[str]) -> None:
        """Unmap all other blocks. Raises DirectFailed if one of these is not mapped."""
        for id in self._known.keys() - set(ids):
            self._unmap(self._known.pop(id))
        if missing := set(ids) - self._known.keys():
            raise DirectFailed(f"{len(missing)} of {len(ids)} blocks are missing")

    def _unmap(self, known: _Known) -> None:
        with of_device(self._device), suppress(RuntimeError):  # its process may be gone
            known.mapped.close()

    def refresh(self) -> None:
        """Make the present content of all blocks visible. Raises DirectFailed."""
        for known in self._known.values():
            known.mapped.refresh()

    def translate(self, ranges: Ints) -> Ints:
        """Return where ranges of the other process begin here.

        Args:
            ranges: (n, 2), first and end address; rows of zeros stay zeros.

        Raises:
            DirectFailed: A range is not within one block.
        """
        blocks = sorted(self._known.values(), key=lambda known: known.begin)
        begins = np.array([known.begin for known in blocks], np.int64)
        ends = begins + np.array([known.size for known in blocks], np.int64)
        here = np.array([known.mapped.address for known in blocks], np.int64)
        used = ranges[:, 1] > ranges[:, 0]
        at = np.searchsorted(begins, ranges[used, 0], "right") - 1
        if len(at) and ((at < 0).any() or (ranges[used, 1] > ends[at]).any()):
            raise DirectFailed("a tensor lies outside of the blocks that its process shares")
        found = np.zeros(len(ranges), np.int64)
        found[used] = here[at] + ranges[used, 0] - begins[at] if len(at) else 0
        return found

    def close(self) -> None:
        """Unmap all blocks."""
        self.keep(())
