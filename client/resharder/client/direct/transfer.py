"""Execution of a schedule: packing, sending, receiving and unpacking of successive rounds overlap."""

import mmap
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, Exchange, PeerMessage, Pending, reason_of
from resharder.client.direct.peer_memory.pairs import PeerPairs
from resharder.client.gpu.ready import fill_ready
from resharder.client.gpu.schedule import SLOTS, Post, Schedule
from resharder.client.gpu.streams import Mark, WorkStream
from resharder.client.gpu.table import Table, Tensors, addresses_of, check_fit
from resharder.converters.geometry.copy_table import ALIGN
from resharder.converters.geometry.piece_arrays import Ints

_AHEAD = 8  # rounds that the host may be ahead of the device, whose queue of launches is bounded


class Follower(Protocol):
    """Work on arrived data while the transfer continues, on the current stream: `resharder.client.gpu.digest.Digester`."""

    def begin(self) -> None:
        """Begin with a transfer."""

    def arrived(self, number: int) -> None:
        """Begin work on round `number`, whose data are in their targets when the current stream reaches this point."""


class Seconds(NamedTuple):
    """Durations of a transfer and of its concurrent parts, in seconds. `wire` includes waits for peers."""

    total: float
    pack: float
    wire: float
    unpack: float


class Transfer:
    """One process's side of one plan over one group, prepared and run for every version, by one thread at a time."""

    def __init__(
        self,
        schedule: Schedule,
        group: DirectGroup,
        device: torch.device,
        memory: torch.Tensor | None = None,
        pairs: PeerPairs | None = None,
    ) -> None:
        """Allocate the buffers of a transfer.

        Args:
            schedule: Rounds of this process.
            group: Group of all processes of the plan.
            device: Device of the tensors.
            memory: Memory on `device` for the buffers; transfers that share it must not run at once. By default it is allocated.
            pairs: Pairs that share memory, whose copies are not in `schedule`.

        Raises:
            ValueError: `memory` is too small.
        """
        self.schedule, self.group, self._device = schedule, group, device
        self._pairs = pairs or PeerPairs()
        slots = min(SLOTS, len(schedule.rounds) - 1)
        sizes = [*[schedule.pack_slot] * slots, *[schedule.unpack_slot] * slots, schedule.ready_size]
        buffers = _buffers(sizes, device, memory)
        self._packed, self._unpacked, self._ready = buffers[:slots], buffers[slots:-1], buffers[-1]
        self._pack, self._wire, self._unpack = (WorkStream(device, before) for before in (1, 2, 1))
        self._follow, self._copy = WorkStream(device), WorkStream(device)
        posts = [(exchange.sends, exchange.receives) for exchange in schedule.rounds]
        sent, received = ([post.local for pair in posts for post in pair[i]] for i in (0, 1))
        made = [ready.local for ready in schedule.ready]
        self._reads = _used(schedule.packs.source, schedule.local.source, sent, made)
        self._writes = _used(schedule.unpacks.target, schedule.local.target, received)
        self._pointers: list[int] | None = None
        self._exchanges: list[Exchange]
        self._tables: tuple[Table, Table, Table]
        self._sources: Tensors
        self._targets: Tensors

    @property
    def path(self) -> str:
        """Kinds of links to other processes: `peer-memory`, `nixl`, `nccl` or `gloo`, joined by `+`."""
        shared, sends = bool(self._pairs.owners or self._pairs.readers), self.schedule.messages > 0
        return "+".join(kind for kind, used in (("peer-memory", shared), (self.group.path, sends)) if used)

    @property
    def received(self) -> int:
        """Bytes that this process receives with each version."""
        return self.schedule.received + self._pairs.size

    @property
    def frozen_size(self) -> int:
        """Bytes of frozen boxes among them."""
        return self.schedule.frozen_size + self._pairs.frozen_size

    @property
    def complete(self) -> dict[str, int]:
        """Number of the last arrival into each target tensor, by its name. Reads arrive after all rounds."""
        first = len(self.schedule.rounds)
        return self.schedule.complete | {name: first + number for name, number in self._pairs.complete.items()}

    @property
    def staging(self) -> int:
        """Bytes of device memory of all buffers."""
        return sum(buffer.numel() for buffer in (*self._packed, *self._unpacked, self._ready))

    def prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Locate the tensors. Must be called before each version; fast if no tensor has moved.

        Raises KeyError and ValueError for tensors that differ from the schedule, and DirectFailed.
        """
        self._sources, self._targets = sources, targets
        self._pairs.prepare(sources, targets)
        self._locate(sources, targets)
        self.group.prepare(self._exchanges)

    def _locate(self, sources: Tensors, targets: Tensors) -> None:
        s = self.schedule
        pointers = [sources[s.source_locals[i]].data_ptr() for i in self._reads]
        pointers += [targets[s.target_locals[i]].data_ptr() for i in self._writes]
        if pointers == self._pointers:
            return
        source, target = addresses_of(s.source_locals, sources, self._reads), addresses_of(s.target_locals, targets, self._writes)
        for moves in (s.packs, s.unpacks, s.local):
            check_fit(moves, s.source_locals, source, s.target_locals, target)
        self._exchanges = [
            (
                [_part(post, s.source_locals, sources, self._packed, k) for post in exchange.sends],
                [_part(post, s.target_locals, targets, self._unpacked, k) for post in exchange.receives],
            )
            for k, exchange in enumerate(s.rounds)
        ]
        begins = np.append(source[:, 0], self._ready.data_ptr()), np.append(target[:, 0], 0)
        packs, unpacks, local = (Table(moves, *begins, self._device) for moves in (s.packs, s.unpacks, s.local))
        with self._pack.work():
            for slot in self._packed[:1]:
                packs.compile(target_base=slot.data_ptr())
            for slot in self._unpacked[:1]:
                unpacks.compile(source_base=slot.data_ptr())
        self._tables, self._pointers = (packs, unpacks, local), pointers

    def run(
        self,
        timeout: float,
        follower: Follower | None = None,
        meanwhile: Callable[[], None] | None = None,
        *,
        kept: bool = False,
    ) -> Seconds:
        """Fill every target.

        Begins after the current stream's pending work. Sources must not change until it returns. Work that `follower` has begun
        precedes later work of the current stream.

        Args:
            timeout: Bound in seconds.
            follower: Work on arrived data.
            meanwhile: Called after the last round has begun. The transfer fails if it raises.
            kept: Leave out frozen boxes, as all processes of the group do now.

        Raises:
            DirectFailed: After `timeout` seconds, or when the group is aborted or loses a member; with `torn` if targets may
                have a mix of versions. The group is then closed and writes to no target.
        """
        started, begun = time.monotonic(), False
        try:
            self.group.check()
            for stream in (*self._streams, self._follow):
                stream.begin()
            with self._pack.work():
                fill_ready(self.schedule.ready, self.schedule.source_locals, self._sources, self._ready)
                self._pairs.fill()
            if self._pairs.owners:
                self._pack.drain()
            with self._pairs.reading(self._targets, started + timeout, self.group.check):
                begun = True
                try:
                    self._rounds(started + timeout, follower, meanwhile, kept=kept)
                except BaseException:
                    self._copy.drain()
                    raise
        except BaseException as error:
            self.group.abort(reason_of(error))
            self.close()
            for stream in (*self._streams, self._follow):
                stream.drain()
            if isinstance(error, Exception):
                raise DirectFailed(reason_of(error), torn=begun and self._fills) from error
            raise
        wire = self._wire.seconds + self._copy.seconds
        return Seconds(time.monotonic() - started, self._pack.seconds, wire, self._unpack.seconds)

    def release(self, seconds: float) -> None:
        """Let go of this process's memory here and in others, between transfers. The next `prepare` shares it again."""
        self.group.release()
        self._pairs.release(time.monotonic() + seconds)

    def close(self) -> None:
        """Close the group and the pairs. The transfer is then unusable."""
        self.group.close()
        self._pairs.close()

    @property
    def _streams(self) -> tuple[WorkStream, ...]:
        return self._pack, self._wire, self._unpack, self._copy

    @property
    def _fills(self) -> bool:
        return self.received > 0 or len(self.schedule.local.rows) > 0

    def _rounds(self, deadline: float, follower: Follower | None, meanwhile: Callable[[], None] | None, *, kept: bool) -> None:
        """Run the rounds.

        Round 0 needs no slots. Round `k` uses the slots of round `k - 2`: it packs after that round was sent, and receives
        after that round was unpacked. Reads of other processes' memory need neither and run beside all rounds.
        """
        packs, _, local = self._tables
        if follower is not None:
            with self._follow.work():
                follower.begin()
        with self._pack.work():
            local.run(0)
        copied = [self._copy_round(number, kept=kept) for number in range(self._pairs.rounds)]
        end = self.schedule.frozen_from if kept else len(self._exchanges)
        wire: list[Pending] = []
        unpacked: list[Mark] = []
        for k, (sends, receives) in enumerate(self._exchanges[:end]):
            if k > _AHEAD:
                wire[k - _AHEAD].wait(deadline)
            if k:
                if k > SLOTS:
                    wire[k - SLOTS].come_before(self._pack, deadline)
                    self._wire.after(unpacked[k - SLOTS])
                with self._pack.work():
                    packs.run(k, target_base=_slot(self._packed, k).data_ptr())
                self._wire.after(self._pack.mark())
            with self._wire.work():
                wire.append(self.group.post(sends, receives, deadline))
            if k:
                unpacked.append(self._unpack_round(k - 1, wire[k - 1], deadline, follower))
        self.group.skip(self._exchanges[end:])
        if wire:
            self._unpack_round(len(wire) - 1, wire[-1], deadline, follower)
        for number, mark in enumerate(copied):
            self._notify(follower, len(self._exchanges) + number, mark)
        if meanwhile is not None:
            meanwhile()
        if wire:
            wire[-1].wait(deadline)
        for stream in self._streams:
            stream.drain()
        self._follow.join_current()

    def _copy_round(self, number: int, *, kept: bool) -> Mark:
        with self._copy.work():
            self._pairs.run(number, kept=kept)
        return self._copy.mark()

    def _unpack_round(self, k: int, arrived: Pending, deadline: float, follower: Follower | None) -> Mark:
        with self._wire.work():
            arrived.come_before(self._unpack, deadline)
        if k:
            with self._unpack.work():
                self._tables[1].run(k, source_base=_slot(self._unpacked, k).data_ptr())
        mark = self._unpack.mark()
        self._notify(follower, k, mark)
        return mark

    def _notify(self, follower: Follower | None, number: int, mark: Mark) -> None:
        if follower is not None:
            self._follow.after(mark)
            with self._follow.work():
                follower.arrived(number)


def _buffers(sizes: list[int], device: torch.device, memory: torch.Tensor | None) -> list[torch.Tensor]:
    """Return buffers aligned to `ALIGN`. Raises ValueError if `memory` is too small."""
    spaces = [-(-size // ALIGN) * ALIGN for size in sizes]
    if memory is None:
        size = sum(spaces) + ALIGN
        memory = _host_memory(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % ALIGN
    if first + sum(spaces) > memory.numel():
        raise ValueError(f"expected {first + sum(spaces)} bytes for buffers, got {memory.numel()}")
    begins = [first + sum(spaces[:i]) for i in range(len(spaces))]
    return [memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def _host_memory(size: int) -> torch.Tensor:
    """Return memory of a mapping of its own, which is unmapped with the tensor.

    Links are formed on threads that end. `malloc` would take the memory from such a thread's arena and keep it there after the
    link: with each link that another thread formed, one more of its arenas, up to eight a processor, kept as much.
    """
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _used(*locals_: Ints | list[int]) -> list[int]:
    """Return the numbers of local tensors, each once, without the negative numbers of buffers."""
    found = np.unique(np.concatenate([np.asarray(some, np.int64) for some in locals_]))
    numbers: list[int] = found[found >= 0].tolist()
    return numbers


def _slot(slots: list[torch.Tensor], k: int) -> torch.Tensor:
    return slots[(k - 1) % SLOTS]


def _part(post: Post, names: tuple[str, ...], tensors: Tensors, slots: list[torch.Tensor], k: int) -> PeerMessage:
    peer, local, at, size = post
    memory = _slot(slots, k) if local < 0 else _bytes(names[local], tensors[names[local]], at + size)
    return PeerMessage(peer, memory[at : at + size])


def _bytes(name: str, tensor: torch.Tensor, needed: int) -> torch.Tensor:
    """Return the first `needed` bytes of a tensor's memory."""
    item = tensor.element_size()
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or elements * item < needed:
        raise ValueError(f"{name}: expected {needed} bytes of memory, got {list(tensor.shape)} of {tensor.dtype}")
    flat: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found: torch.Tensor = flat.set_(tensor.detach().untyped_storage(), tensor.storage_offset() * item, (needed,), (1,))
    return found
