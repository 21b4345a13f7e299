"""Communicators through NCCL's C interface (nccl.h, 2.18 and later), from the library that torch has loaded.

Calls never block: slow operations are polled until a deadline, then aborted. No thread can hang in a call, so no other thread is
needed to free one, and there is no watchdog.
"""

import ctypes
import datetime
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_UNDEFINED = -(2**31)
NAP = 50e-6  # seconds
_SPINS = 200  # polls before the first nap


class _UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.17. Later libraries fill in later fields."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
    "ncclCommInitRankConfig": [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_int,
        _UniqueId,
        ctypes.c_int,
        ctypes.POINTER(_Config),
    ],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclSend": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
    "ncclRecv": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p],
    "ncclCommGetAsyncError": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)],
    "ncclCommAbort": [ctypes.c_void_p],
}


@lru_cache(maxsize=1)
def _library() -> Any:
    """Return NCCL's library. Raises DirectFailed if there is none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise DirectFailed(f"there is no usable NCCL beside torch {torch.__version__}: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    for name, arguments in (("ncclGetErrorString", [ctypes.c_int]), ("ncclGetLastError", [ctypes.c_void_p])):
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_char_p
    return library


class PairCommunicator:
    """Communicator of two processes, this one and `peer`, each with its own GPU.

    One thread at a time may use it; any thread may call `abort`.
    """

    def __init__(self, store: Any, rank: int, peer: int, device: torch.device, timeout: float, ctas: int | None) -> None:
        """Form the communicator through a torch Store.

        Args:
            store: Store that both processes share, with a prefix of their own.
            rank: Rank of this process.
            peer: Rank of the other process.
            device: GPU of this process.
            timeout: Seconds to wait for the peer.
            ctas: Multiprocessors of each GPU that NCCL may use; None for NCCL's choice.

        Raises:
            DirectFailed: The peer is missing, or NCCL reports an error.
        """
        self.rank, self._device, self._why = rank, device, ""
        self._nccl, self._communicator = _library(), ctypes.c_void_p()
        self._place = int(rank > peer)
        deadline = time.monotonic() + timeout
        late = f"ranks {rank} and {peer} did not meet within {timeout:g} s"
        name = _UniqueId()
        if self._place == 0:
            self._called("ncclGetUniqueId", ctypes.byref(name))
            store.set("id", bytes(name))
        else:
            try:
                store.wait(["id"], datetime.timedelta(seconds=timeout))
            except RuntimeError as error:
                raise DirectFailed(f"{late}: {error}") from error
            ctypes.memmove(ctypes.byref(name), store.get("id"), ctypes.sizeof(name))
        most = _UNDEFINED if ctas is None else ctas
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21700, 0, _UNDEFINED, most, most, None, _UNDEFINED)
        try:
            with torch.cuda.device(device):
                made = (ctypes.byref(self._communicator), 2, name, self._place, ctypes.byref(config))
                self._called("ncclCommInitRankConfig", *made)
                self._settle(deadline, late)
        except DirectFailed as error:
            self.abort(str(error))
            self.close()
            raise

    def post(
        self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor], stream: torch.cuda.Stream, deadline: float
    ) -> None:
        """Begin to send and receive these messages, in this order, on `stream`. Raises DirectFailed."""
        with torch.cuda.device(self._device):
            self._called("ncclGroupStart")
            try:
                for function, tensors in (("ncclSend", sends), ("ncclRecv", receives)):
                    for memory in tensors:
                        where = (memory.data_ptr(), memory.numel(), _UINT8, 1 - self._place)
                        self._called(function, *where, self._communicator, stream.cuda_stream)
            finally:
                self._called("ncclGroupEnd")
            self._settle(deadline, f"rank {self.rank}: could not begin the messages in time")

    def _called(self, name: str, *arguments: Any) -> None:
        found = getattr(self._nccl, name)(*arguments)
        if found not in (_SUCCESS, _IN_PROGRESS):
            raise self._failed(name, found)

    def _failed(self, what: str, code: int) -> DirectFailed:
        texts = (self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(self._communicator))
        message = ", ".join(text.decode(errors="replace") for text in texts if text)
        return DirectFailed(f"rank {self.rank}: NCCL ({what}): {message}")

    def check(self) -> None:
        """Raise DirectFailed if the communicator was aborted or NCCL reports an error."""
        if self._why or not self._communicator:
            raise DirectFailed(self._why or "the group is closed")
        state = self._state()
        if state not in (_SUCCESS, _IN_PROGRESS):
            raise self._failed("a member", state)

    def _state(self) -> int:
        state = ctypes.c_int(_SUCCESS)
        self._nccl.ncclCommGetAsyncError(self._communicator, ctypes.byref(state))
        return state.value

    def _settle(self, deadline: float, late: str) -> None:
        for i in count():
            if self._why or self._state() != _IN_PROGRESS:
                break
            if time.monotonic() > deadline:
                raise DirectFailed(late)
            time.sleep(NAP if i > _SPINS else 0)
        self.check()

    def abort(self, why: str) -> None:
        """Make waits in progress raise DirectFailed. `close` frees the communicator."""
        self._why = self._why or why

    def close(self) -> None:
        """Free the communicator and end its running kernels. Its messages should have ended before.

        Always aborts: ncclCommDestroy waits until the other side destroys its communicator as well (NCCL's manual calls it an
        intra-node collective; its proxy serves until every peer has disconnected), and a training rank may not do so for a
        while. Without CUDA's virtual memory, an abort also waits, by NCCL's proxy.cc; `NcclGroup.close` bounds that wait. An
        abort waits for the whole GPU: kernels of other communicators must be able to end, so several are closed at once.
        """
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        self._why = self._why or "the group is closed"
        if communicator:
            with torch.cuda.device(self._device):
                self._nccl.ncclCommAbort(communicator)
