"""Elements of tensors on any device, as arrays on the host.

Host tensors are read in place. GPU tensors are packed on the GPU and copied to two pinned buffers, of which one is filled while
the other is read. All work runs on the caller's current stream, after a trainer's earlier kernels and before its later ones.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from resharder.client.transport.base import AssignedSlot, HostArray
from resharder.converters.geometry.layout import Box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, Array

if TYPE_CHECKING:
    import torch
    from resharder.client.transport.base import Item

PART_BYTES = 4 << 20
_BUFFER_BYTES = 8 << 20
_BATCH_BYTES = 32 << 20
_ALIGNMENT = 64


class HostPart(NamedTuple):
    """Part `part` of box `number`. `array` has its elements as unsigned integers and is valid until the next batch."""

    number: int
    part: int
    array: Array


def host_parts(items: "Iterable[Item]", boxes: Sequence[Box], cuts: Sequence[Sequence[Box]]) -> Iterator[HostPart]:
    """Yield the parts of `host_batches` one by one. Each is valid until the next one."""
    for batch in host_batches(items, boxes, cuts):
        yield from batch


def host_batches(
    items: "Iterable[Item]", boxes: Sequence[Box], cuts: Sequence[Sequence[Box]], *, lasting: bool = False
) -> Iterator[list[HostPart]]:
    """Yield the parts of every item on the host, for each device in the order of the items.

    A batch has what a GPU's buffer holds, or the parts of a host tensor; with `lasting`, of host tensors of 32 MiB together.

    Args:
        items: Elements of boxes.
        boxes: All boxes by number.
        cuts: Parts of each box.
        lasting: Whether a tensor does not change when the next one is requested.
    """
    stage: _DeviceStage | None = None
    batch, left = list[HostPart](), _BATCH_BYTES
    for number, tensor in items:
        for part, cut in enumerate(cuts[number]):
            if isinstance(tensor, HostArray):
                batch.append(HostPart(number, part, tensor.array[within(cut, boxes[number])]))
                continue
            elements = tensor.detach()[within(cut, boxes[number])]
            if tensor.device.type == "cpu":
                batch.append(HostPart(number, part, host_bits(elements)))
            else:
                stage = stage or _DeviceStage(_BUFFER_BYTES)
                yield from stage.add(number, part, elements)
        left -= tensor.nbytes
        if batch and not (lasting and left > 0):
            yield batch
            batch, left = [], _BATCH_BYTES
    if batch:
        yield batch
    if stage is not None:
        yield from stage.flush()


def digests_of(slot: AssignedSlot, items: "Iterable[Item]") -> list[int]:
    """Return the digest of each box of a slot, without sending it."""
    cuts, digests = slot.cuts(PART_BYTES), [0] * len(slot.boxes)
    for number, part, array in host_parts(items, slot.boxes, cuts):
        add_digest(digests, number, digest(array, cuts[number][part], slot.specs[number].shape))
    return digests


def add_digest(digests: list[int], number: int, value: int) -> None:
    """Add the digest of a part to that of box `number`, modulo 2**64, in place."""
    digests[number] = (digests[number] + value) & ((1 << 64) - 1)


def within(part: Box, box: Box) -> tuple[slice, ...]:
    """Return the index of `part`, a part of `box`, in an array of the box's elements."""
    starts = [(p.start - b.start) // b.step for p, b in zip(part, box, strict=True)]
    return tuple(slice(start, start + p.count) for start, p in zip(starts, part, strict=True))


def host_bits(tensor: "torch.Tensor") -> Array:
    """Return a host tensor's elements as unsigned integers, in the same memory."""
    import torch

    plain = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    array: Array = tensor.detach().view(plain).numpy()
    return array.view(BITS[tensor.element_size()])


class _DeviceStage:
    """Two pinned buffers between a GPU and the host, of which one is filled while the other is read."""

    def __init__(self, buffer_bytes: int) -> None:
        self._filling, self._full = _Pinned(buffer_bytes), _Pinned(buffer_bytes)

    def add(self, number: int, part: int, elements: "torch.Tensor") -> Iterator[list[HostPart]]:
        if not self._filling.fits(elements):
            self._filling.close()
            self._filling, self._full = self._full, self._filling
            # The older buffer is read while copies into the newer one proceed.
            if parts := self._filling.drain():
                yield parts
        self._filling.add(number, part, elements)

    def flush(self) -> Iterator[list[HostPart]]:
        self._filling.close()
        for buffer in (self._full, self._filling):
            if parts := buffer.drain():
                yield parts


class _Pinned:
    def __init__(self, size: int) -> None:
        import torch

        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._copied: list[torch.cuda.Event] = []
        self._devices: set[torch.device] = set()
        self._parts: list[tuple[int, int, torch.Tensor]] = []
        self._end = 0

    def fits(self, elements: "torch.Tensor") -> bool:
        return self._end + elements.nbytes <= self._memory.numel()

    def add(self, number: int, part: int, elements: "torch.Tensor") -> None:
        place = self._memory[self._end : self._end + elements.nbytes].view(elements.dtype).view(elements.shape)
        place.copy_(elements, non_blocking=True)
        self._parts.append((number, part, place))
        self._devices.add(elements.device)
        self._end += -(-elements.nbytes // _ALIGNMENT) * _ALIGNMENT

    def close(self) -> None:
        """Record the end of the copies on the stream of each tensor's GPU, which need not be the thread's current GPU."""
        import torch

        self._copied = [torch.cuda.current_stream(device).record_event() for device in self._devices]

    def drain(self) -> list[HostPart]:
        for copied in self._copied:
            copied.synchronize()
        parts = [HostPart(number, part, host_bits(place)) for number, part, place in self._parts]
        self._parts, self._end, self._copied, self._devices = [], 0, [], set()
        return parts
