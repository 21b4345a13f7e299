"""Host pages that a GPU's kernels can access: registered with CUDA, at their addresses in this process.

CUDA copies other pages through buffers of its own, at 6 to 8 GB/s on a host whose link transfers 55; kernels read registered
pages at 51 GB/s (benchmarks/results/staged_gpu.md).
"""

import ctypes
import logging
import mmap
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.converters.geometry.layout import Box, box_index
from resharder.converters.storage.digest import Array
from resharder.converters.storage.pages import Span, forget_pages

logger = logging.getLogger(__name__)
_AT_ONCE = 64 << 20  # bytes per call: other threads' kernels wait during a registration
_FLAGS = 1 | 2 | 8  # cudaHostRegister's Portable, Mapped and ReadOnly
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_GAP = 16 << 20  # gaps of at most so many bytes are registered as well: each call waits for all running kernels
Result = TypeVar("Result")


class Registered:
    """Registered pages. `close` releases them and must precede unmapping."""

    def __init__(self, spans: list[Span], device: torch.device, gently: bool) -> None:
        self._spans, self._device, self._gently = spans, device, gently

    def close(self) -> None:
        """Release the pages and unmap them from this process's page tables."""
        if self._spans:
            _beside(lambda: _let_go(self._spans, self._device, self._gently))
        self._spans = []

    def splits(self, array: Array) -> bool:
        """Return whether an array begins or ends outside of the one registration that has some of its pages.

        Kernels read such an array, but CUDA refuses to copy from it: `invalid argument`.
        """
        low, high = byte_bounds(array)
        at = bisect_right(self._spans, low, key=lambda span: span[0])
        before = self._spans[at - 1] if at else (0, 0)
        if low < before[1]:
            return high > before[1]
        return at < len(self._spans) and self._spans[at][0] < high


def register(arrays: Iterable[Array], device: torch.device, *, gently: bool = False) -> Registered | None:
    """Register the pages of arrays, which must be mapped already, for kernels that read.

    Args:
        arrays: Arrays whose pages are registered.
        device: GPU.
        gently: Leave half of the time, here and in `close`, to other threads of this process, whose kernels wait while the
            driver works.

    Returns:
        The pages, or None if CUDA refuses. The log has the reason.
    """
    if not _same_address(device):
        logger.info("%s cannot access host pages at their own addresses", device)
        return None
    return _beside(lambda: _register(spans_of(arrays, _GAP), device, gently))


def box_of(array: Array, box: Box) -> Array:
    """Return the view of a box of an array, also of one without dimensions."""
    return array[box_index(box)] if box else array


def spans_of(arrays: Iterable[Array], gap: int = 0) -> list[Span]:
    """Return the first and end address of the arrays' pages, in parts of at most 64 MiB.

    Pages are joined if they touch, or are in one map with at most `gap` bytes between them.
    """
    page = mmap.PAGESIZE
    joined: list[list[int]] = []
    for low, high, map_ in sorted((*byte_bounds(array), _map_of(array)) for array in arrays if array.nbytes):
        first, end = low // page * page, -(-high // page) * page
        if joined and first <= joined[-1][1] + (gap if map_ == joined[-1][2] else 0):
            joined[-1][1:] = max(joined[-1][1], end), map_
        else:
            joined.append([first, end, map_])
    return [(at, min(at + _AT_ONCE, end)) for begin, end, _ in joined for at in range(begin, end, _AT_ONCE)]


def _map_of(array: Array) -> int:
    """Return a key that is equal for arrays in one map."""
    return id(array if array.base is None else array.base)


def _beside(work: Callable[[], Result]) -> Result:
    """Run on a thread of its own.

    CUDA stores an error for the thread that caused it, and torch would raise it at that thread's next kernel.
    """
    with ThreadPoolExecutor(1, "resharder-pages") as thread:
        return thread.submit(work).result()


def _register(spans: list[Span], device: torch.device, gently: bool) -> Registered | None:
    done: list[Span] = []
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for begin, end in spans:
            with _pace(gently):
                error = int(runtime.cudaHostRegister(begin, end - begin, _FLAGS))
            if error:
                logger.info("CUDA refused to register %d bytes of host memory: error %d", end - begin, error)
                _let_go(done, device, gently)
                return None
            done.append((begin, end))
    return Registered(done, device, gently)


def _let_go(spans: list[Span], device: torch.device, gently: bool) -> None:
    """Release pages, and unmap them from this process's page tables bit by bit: at once, they would delay other unmaps."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for begin, end in spans:
            with _pace(gently):
                runtime.cudaHostUnregister(begin)
                forget_pages((begin, end))


@contextmanager
def _pace(gently: bool) -> Iterator[None]:
    with DRIVER_LOCK.background():
        began = time.monotonic()
        yield
    if gently:
        time.sleep(time.monotonic() - began)


def _same_address(device: torch.device) -> bool:
    found = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        index = torch.cuda.current_device() if device.index is None else device.index
        return driver.cuDeviceGetAttribute(ctypes.byref(found), _SAME_ADDRESS, index) == 0 and bool(found.value)
    except OSError:
        return False
