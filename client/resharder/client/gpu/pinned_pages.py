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
from typing import Any, TypeVar

import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu.cuda_driver import beside_captures
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.converters.geometry.layout import Box, box_index
from resharder.converters.storage.digest import Array
from resharder.converters.storage.pages import Span, forget_pages

logger = logging.getLogger(__name__)
_AT_ONCE = 64 << 20  # bytes per call: other threads' kernels wait during a registration
WRITABLE = 1 | 2  # cudaHostRegister's Portable and Mapped
_READ_ONLY = WRITABLE | 8
_SAME_ADDRESS = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
_BY_HOST_TABLES = 100  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
_THREADS = 4  # register 27 GB/s, one 18, eight 23
_GAP = 16 << 20  # gaps of at most so many bytes are registered as well: each call waits for all running kernels
Result = TypeVar("Result")
Busy = Callable[[], bool]
"""Whether other threads of this process launch kernels that clients wait for."""
Stop = Callable[[], bool]
"""Whether a preparation is no longer wanted, or another thread goes on with it."""


def never() -> bool:
    """Return False: go on to the end."""
    return False


class Registered:
    """Pages that are registered with CUDA, one span after another. Not thread-safe.

    Args:
        spans: First and end address of each part, as of `spans_of`.
        device: GPU.
        busy: Whether to leave half of the time to other threads of this process, whose kernels wait while the driver works. Asked
            before each call into the driver.
        flags: Flags of cudaHostRegister; by default kernels only read the pages.
    """

    def __init__(self, spans: list[Span], device: torch.device, busy: Busy, flags: int = _READ_ONLY) -> None:
        self._left, self._device, self._busy, self._flags = spans, device, busy, flags
        self._spans: list[Span] = []  # registered, in the order of their addresses

    def go_on(self, stop: Stop) -> bool:
        """Register the spans that are left, until `stop` returns true. It is asked before each of them.

        Returns:
            Whether CUDA has refused none. If it has, the log has the reason, and all pages are released.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

        def one(span: Span) -> int | None:
            return None if stop() else int(runtime.cudaHostRegister(span[0], span[1] - span[0], self._flags))

        left, self._left = self._left, []
        errors = list(zip(left, _call_driver(one, left, self._device, self._busy), strict=True))
        self._left = [span for span, error in errors if error is None]
        self._spans = sorted([*self._spans, *(span for span, error in errors if error == 0)])
        if failed := [error for _, error in errors if error]:
            logger.info("CUDA refused to register %d of %d spans of host memory: error %d", len(failed), len(left), failed[0])
            self.close()
            return False
        return True

    @property
    def whole(self) -> bool:
        """Whether all pages are registered."""
        return not self._left

    def close(self) -> None:
        """Release the pages, and unmap them from this process's page tables part by part: at once, they would delay others."""
        spans, self._spans, self._left = self._spans, [], []
        _call_driver(_let_go, spans, self._device, self._busy)

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


def register(arrays: Iterable[Array], device: torch.device, busy: Busy = lambda: False, stop: Stop = never) -> Registered | None:
    """Register the pages of arrays in mapped files for kernels that read.

    Args:
        arrays: Arrays whose pages are registered. Memory that is no file's would lose its bytes when the pages are released.
        device: GPU.
        busy: See `Registered`.
        stop: See `Registered.go_on`, which registers the rest later.

    Returns:
        The pages, or None if CUDA refuses. The log has the reason.
    """
    if not _same_address(device):
        logger.info("%s cannot access host pages at their own addresses", device)
        return None
    made = Registered(spans_of(arrays, _GAP), device, busy)
    return made if made.go_on(stop) else None


def box_of(array: Array, box: Box) -> Array:
    """Return the view of a box of an array, also of one without dimensions."""
    return array[box_index(box)] if box else array


def spans_of(arrays: Iterable[Array], gap: int = 0) -> list[Span]:
    """Return the first and end address of the arrays' pages, as `pages_of` does."""
    return pages_of(((*byte_bounds(array), _map_of(array)) for array in arrays if array.nbytes), gap)


def pages_of(bounds: Iterable[tuple[int, int, int]], gap: int = 0, most: int = _AT_ONCE) -> list[Span]:
    """Return the whole pages of bytes, ascending, in parts of at most `most` bytes.

    Pages are joined if they touch, or are in one map with at most `gap` bytes between them.

    Args:
        bounds: First byte, end, and a key that is equal for bytes in one map.
        gap: Bytes between pages that are joined.
        most: Bytes of the largest part.
    """
    page = mmap.PAGESIZE
    joined: list[list[int]] = []
    for low, high, map_ in sorted(bounds):
        first, end = low // page * page, -(-high // page) * page
        if joined and first <= joined[-1][1] + (gap if map_ == joined[-1][2] else 0):
            joined[-1][1:] = max(joined[-1][1], end), map_
        else:
            joined.append([first, end, map_])
    return [(at, min(at + most, end)) for begin, end, _ in joined for at in range(begin, end, most)]


def _map_of(array: Array) -> int:
    """Return a key that is equal for arrays in one map."""
    return id(array if array.base is None else array.base)


def _call_driver(call: Callable[[Span], Result], spans: list[Span], device: torch.device, busy: Busy) -> list[Result]:
    """Call the driver for each span: on one thread while others are busy, on four otherwise, which are faster.

    The threads are new ones. CUDA stores an error for the thread that caused it, and torch would raise it at that thread's next
    kernel.
    """

    def one(span: Span) -> Result:
        with torch.cuda.device(device), beside_captures(device), paced(busy):
            return call(span)

    with ThreadPoolExecutor(1 if busy() else _THREADS, "resharder-pages") as pool:
        return list(pool.map(one, spans))


def _let_go(span: Span) -> None:
    torch.cuda.cudart().cudaHostUnregister(span[0])  # type: ignore[no-untyped-call]
    forget_pages(span)


@contextmanager
def paced(busy: Busy) -> Iterator[None]:
    """Run the block, a call into the driver, in the background; if other threads are busy, sleep for as long as it took."""
    slowly = busy()
    with DRIVER_LOCK.background():
        began = time.monotonic()
        yield
    if slowly:
        time.sleep(time.monotonic() - began)


def _same_address(device: torch.device) -> bool:
    return _attribute(device, _SAME_ADDRESS) == 1


def pages_stay_in_place(device: torch.device) -> bool:
    """Return whether the device writes into registered pages by their physical addresses, also once they are unmapped.

    GPUs that use the host's page tables, such as Grace Hopper's, do not. A CPU writes while they are mapped.
    """
    return device.type != "cuda" or (_same_address(device) and _attribute(device, _BY_HOST_TABLES) == 0)


def _attribute(device: torch.device, number: int) -> int | None:
    """Return a CUdevice_attribute of a GPU; None if the driver does not know it."""
    found = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        index = torch.cuda.current_device() if device.index is None else device.index
        return found.value if driver.cuDeviceGetAttribute(ctypes.byref(found), number, index) == 0 else None
    except OSError:
        return None
