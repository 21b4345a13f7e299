"""A copy of what a rank delivers, from which it is uploaded while the trainer goes on: `release="transfer"`.

The copy is made in the memory of another GPU that this process sees, or of the host, where there is room for it. It has the size
of the boxes that the rank sends.
"""

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from resharder.client.errors import ResharderError
from resharder.client.gpu.cuda_driver import beside_captures
from resharder.client.gpu.streams import on_stream
from resharder.client.transport.base import LiveItems
from resharder.converters.geometry.layout import Piece, box_shape, contiguous_strides

logger = logging.getLogger(__name__)
_ALIGNED = 512  # bytes; copies of tensors begin at multiples
_SPARE_GPU, _SPARE_HOST = 2 << 30, 1 << 30  # bytes that are left to others
_HOST = torch.device("cpu")


class TransferCopy:
    """Buffer of one attached model, allocated by the first version and kept. One version at a time may be in it."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []  # those of the last version, which the buffer fits
        self._copied: LiveItems | None = None
        self._refused = False

    @property
    def device(self) -> torch.device | None:
        """Device of the buffer; None before there is one."""
        return self._copied.device if self._copied is not None else None

    def take(self, items: LiveItems) -> LiveItems | None:
        """Copy the items, which may change afterwards. Returns the copies; None without room for them, which is logged once.

        Reads the items on the current stream.
        """
        if self._copied is None or self._pieces is not items.pieces:
            self._copied, self._pieces = None, []
            if not self._refused:
                self._copied = self._allocated(items)
            if self._copied is None:
                return None
            self._pieces = items.pieces  # type: ignore[assignment]
        sources = [tensor for _, tensor in items if isinstance(tensor, torch.Tensor)]
        with torch.no_grad():
            torch._foreach_copy_(list(self._copied.tensors.values()), sources, non_blocking=True)
        for device in {tensor.device for tensor in sources}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        return self._copied

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let another thread read the copies: on a stream of its own on their GPU, while the trainer may capture a CUDA graph."""
        device = self.device
        if device is None or device.type != "cuda":
            yield
            return
        with beside_captures(device), on_stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            yield

    def _allocated(self, items: LiveItems) -> LiveItems | None:
        forms = [(tensor.dtype, tuple(tensor.shape)) for _, tensor in items if isinstance(tensor, torch.Tensor)]
        begins, size = [], 0
        for dtype, shape in forms:
            begins.append(size)
            size += -(-dtype.itemsize * torch.Size(shape).numel() // _ALIGNED) * _ALIGNED
        devices = {tensor.device for tensor in items.tensors.values()}
        place = place_for(size, devices, free_gpu_bytes(devices), available_host_bytes())
        try:
            if place is None:
                raise MemoryError(f"no other GPU and not the host has {size / 1e9:.3g} GB to spare")
            pinned = place == _HOST and any(device.type == "cuda" for device in devices)
            buffer = torch.empty(size, dtype=torch.uint8, device=place, pin_memory=pinned)
        except (MemoryError, RuntimeError) as error:
            self._refused = True
            logger.warning(
                'release="transfer" needs a copy of this rank\'s part, so `publish` returns after the upload: %s', error
            )
            return None
        tensors, pieces = dict[str, torch.Tensor](), []
        for number, (piece, (dtype, shape), begin) in enumerate(zip(items.pieces, forms, begins, strict=True)):
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            tensors[str(number)] = buffer[begin:end].view(dtype).view(shape)
            pieces.append(piece._replace(local=str(number), offset=0, strides=contiguous_strides(box_shape(piece.box)), plus=0))
        return LiveItems(tensors, pieces)


def place_for(size: int, sources: set[torch.device], gpus: Mapping[torch.device, int], host: int) -> torch.device | None:
    """Return where a copy of `size` bytes is made; None if there is no room.

    Args:
        size: Bytes of the copy.
        sources: Devices of the tensors. Those on the host are copied to the host.
        gpus: Free bytes of GPUs other than these.
        host: Bytes that are available on the host.
    """
    roomy = {device: free for device, free in gpus.items() if free >= size + _SPARE_GPU}
    if roomy and all(device.type == "cuda" for device in sources):
        return max(roomy, key=lambda device: roomy[device])
    return _HOST if host >= size + _SPARE_HOST else None


def free_gpu_bytes(but: set[torch.device]) -> dict[torch.device, int]:
    """Return the free memory of the GPUs that this process sees, except those in `but`; nothing if there are none in it."""
    if not any(device.type == "cuda" for device in but):
        return {}
    others = {torch.device("cuda", number) for number in range(torch.cuda.device_count())} - but
    return {device: torch.cuda.mem_get_info(device)[0] for device in others}


def available_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the host, and the control group of this process, can still give."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    found = int(fields["MemAvailable"].split()[0]) << 10
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError, KeyError):  # no control groups, or no bound
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
        found = min(found, int((group / "memory.max").read_text()) - used)
    return found


class BackgroundUpload:
    """Upload on a thread of its own. Its error is kept until it is asked for.

    Args:
        what: Name of the version.
        run: Uploads. Runs in a copy of the caller's context.
    """

    def __init__(self, what: str, run: Callable[[], None]) -> None:
        self.what, self._run, self._ignored = what, run, False
        self.error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._do,), name="resharder-upload", daemon=True)
        self._thread.start()

    def _do(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.error = error
            if not self._ignored:
                logger.warning("the upload of %s failed after `publish` had returned: %s", self.what, error)

    def ignore(self) -> None:
        """Expect a failure: the version is aborted on purpose."""
        self._ignored = True

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end, and return whether it has ended."""
        self._thread.join(None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the end. Raises the error of an upload that failed."""
        self.wait()
        if self.error is not None and not self._ignored:
            if isinstance(self.error, ResharderError):
                self.error.add_note(f"{self.what} failed after its `publish` had returned; call `publish` again to go on")
            raise self.error
