"""Calls of CUDA's driver that torch does not offer: memory that one process allocates and another maps, and plain copies.

Names, numbers and structures are those of `cuda.h` (CUDA 12 and 13).
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch

_Address = ctypes.c_ulonglong
_IPC_CAPABLE, _ALLOCATION_BEGIN, _ALLOCATION_SIZE, _HANDLE_TYPES = 10, 11, 12, 14  # of CUpointer_attribute
_MAPPING_SIZE, _MAPPING_BEGIN, _BLOCK_ID = 18, 19, 20
_POSIX_FD = 1
_ON_DEVICE = 1
_READ_WRITE = 3
_WITH_PEER_ACCESS = 1
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DriverFailed(RuntimeError):
    """A call of CUDA's driver failed."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 64),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Allocation(NamedTuple):
    """Physical memory at an address.

    Attributes:
        begin: Its first address in this process.
        size: In bytes.
        id: Number that the process gives to no other memory.
        ipc: Whether other processes can open it by a handle (cudaMalloc).
        fd: Whether it can be exported as a file descriptor (cuMemCreate with that handle type).
    """

    begin: int
    size: int
    id: int
    ipc: bool
    fd: bool


_ARGUMENTS: dict[str, list[Any]] = {
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuDevicePrimaryCtxRelease_v2": [ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuPointerGetAttributes": [ctypes.c_uint, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p), _Address],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), _Address],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Address), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Address],
    "cuMemRetainAllocationHandle": [ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_void_p],
    "cuMemExportToShareableHandle": [ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_int, ctypes.c_ulonglong],
    "cuMemImportFromShareableHandle": [ctypes.POINTER(ctypes.c_ulonglong), ctypes.c_void_p, ctypes.c_int],
    "cuMemRelease": [ctypes.c_ulonglong],
    "cuMemAddressReserve": [ctypes.POINTER(_Address), ctypes.c_size_t, ctypes.c_size_t, _Address, ctypes.c_ulonglong],
    "cuMemAddressFree": [_Address, ctypes.c_size_t],
    "cuMemcpyDtoHAsync_v2": [ctypes.c_void_p, _Address, ctypes.c_size_t, ctypes.c_void_p],
    "cuMemMap": [_Address, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_ulonglong],
    "cuMemUnmap": [_Address, ctypes.c_size_t],
    "cuThreadExchangeStreamCaptureMode": [ctypes.POINTER(ctypes.c_int)],
    "cuMemSetAccess": [_Address, ctypes.c_size_t, ctypes.POINTER(_Access), ctypes.c_size_t],
}


@lru_cache(maxsize=1)
def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverFailed(f"CUDA's driver cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise DriverFailed(f"{name}: {(text.value or str(code).encode()).decode()}")


@contextmanager
def context(device: torch.device) -> Iterator[None]:
    """Make torch's context of a device current for the block's driver calls, on this thread."""
    index, handle = device.index or 0, ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(handle), index)
    try:
        _call("cuCtxPushCurrent_v2", handle)
        try:
            yield
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(handle))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", index)


@contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """Let this thread work while another one captures a CUDA graph. A no-op for a CPU.

    `torch.cuda.graph` captures in CUDA's global mode. A thread that waits for an event, or registers memory, meanwhile gets an
    error and ends the capture, unless its own mode is relaxed.
    """
    if device.type != "cuda":
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


_WANTED = (_IPC_CAPABLE, _HANDLE_TYPES, _MAPPING_BEGIN, _MAPPING_SIZE, _BLOCK_ID, _ALLOCATION_BEGIN, _ALLOCATION_SIZE)


def allocation_at(address: int) -> Allocation:
    """Return the physical memory at a device address. Raises DriverFailed if there is none."""
    values = [ctypes.c_ulonglong(0) for _ in _WANTED]
    pointers = (ctypes.c_void_p * len(_WANTED))(*(ctypes.addressof(value) for value in values))
    _call("cuPointerGetAttributes", len(_WANTED), (ctypes.c_int * len(_WANTED))(*_WANTED), pointers, address)
    ipc, types, begin, size, block, whole, length = (value.value for value in values)
    if ipc & 0xFF:
        return Allocation(whole, length, block, True, False)
    return Allocation(begin, size, block, False, bool(types & _POSIX_FD))


def ipc_handle(address: int) -> bytes:
    """Return the handle by which other processes open the allocation that begins at `address`. Raises DriverFailed."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
    return bytes(handle)


def ipc_open(handle: bytes) -> int:
    """Map another process's allocation and return its address here. Raises DriverFailed."""
    address, found = _Address(), _IpcHandle()
    ctypes.memmove(ctypes.byref(found), handle, ctypes.sizeof(found))
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), found, _WITH_PEER_ACCESS)
    return address.value


def ipc_close(address: int) -> None:
    """Unmap memory that `ipc_open` has mapped. Raises DriverFailed."""
    _call("cuIpcCloseMemHandle", address)


def export_fd(address: int) -> int:
    """Return a new file descriptor of the physical memory at `address`. Raises DriverFailed."""
    handle, fd = ctypes.c_ulonglong(), ctypes.c_int(-1)
    _call("cuMemRetainAllocationHandle", ctypes.byref(handle), address)
    try:
        _call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, 0)
    finally:
        _call("cuMemRelease", handle)
    return fd.value


def reserve(size: int) -> int:
    """Reserve addresses for `size` bytes. Raises DriverFailed."""
    address = _Address()
    _call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
    return address.value


def map_fd(address: int, size: int, fd: int) -> None:
    """Map the memory of a file descriptor at reserved addresses. The descriptor stays the caller's. Raises DriverFailed."""
    handle = ctypes.c_ulonglong()
    _call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _POSIX_FD)
    try:
        _call("cuMemMap", address, size, 0, handle, 0)
    finally:
        _call("cuMemRelease", handle)


def allow(address: int, size: int, device: torch.device) -> None:
    """Allow a device to use mapped memory. Raises DriverFailed."""
    access = _Access(_Location(_ON_DEVICE, device.index or 0), _READ_WRITE)
    _call("cuMemSetAccess", address, size, ctypes.byref(access), 1)


def unmap(address: int, size: int) -> None:
    """Unmap memory that `map_fd` has mapped. Raises DriverFailed."""
    _call("cuMemUnmap", address, size)


def free_addresses(address: int, size: int) -> None:
    """Return reserved addresses. Raises DriverFailed."""
    _call("cuMemAddressFree", address, size)


def copy_to_host(target: int, source: int, size: int, stream: int) -> None:
    """Begin a copy of `size` bytes from device memory into registered pages, on a stream. Raises DriverFailed."""
    _call("cuMemcpyDtoHAsync_v2", target, source, size, stream)
