"""Runs a schedule: round after round packed, sent, received and unpacked, each while the others are at it."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from resharder.client.direct.group import DirectFailed, Group, Part, Pending
from resharder.client.direct.lanes import Lane, Mark
from resharder.client.direct.pack import Table, addresses_of, check_fit
from resharder.client.direct.schedule import ALIGN, SLOTS, Post, Round, Schedule
from resharder.converters.local import view_of
from resharder.converters.packed import Ints

Tensors = Mapping[str, torch.Tensor]
_AHEAD = 8  # rounds that the host may be ahead of the device: the driver's queue of launches is not endless


class Seconds(NamedTuple):
    """What a transfer took, and how long its parts were at work, one beside the other. `wire` includes waiting for others."""

    total: float
    pack: float
    wire: float
    unpack: float


class Transfer:
    """One process's side of one plan over one group: made once, run for every version, by one thread at a time."""

    def __init__(self, schedule: Schedule, group: Group, device: torch.device) -> None:
        self.schedule, self.group, self._device = schedule, group, device
        slots = min(SLOTS, len(schedule.rounds) - 1)
        self._packed = [_buffer(schedule.pack_slot, device) for _ in range(slots)]
        self._unpacked = [_buffer(schedule.unpack_slot, device) for _ in range(slots)]
        self._ready = _buffer(schedule.ready_size, device)
        self._pack, self._wire, self._unpack = Lane(device), Lane(device, first=True), Lane(device)
        self._addresses: tuple[Ints, Ints] | None = None
        self._tables: tuple[Table, Table, Table]
        self._begun = False

    @property
    def staging(self) -> int:
        """Bytes of the device that its buffers take."""
        return sum(buffer.numel() for buffer in (*self._packed, *self._unpacked, self._ready))

    def run(self, sources: Tensors, targets: Tensors, timeout: float) -> Seconds:
        """Every target is filled when it returns. `sources` stay as they are until then; work on them that the current stream has
        yet to do comes first.

        Raises DirectFailed after `timeout` seconds, or when the group is aborted or loses a member, with `torn` where targets may
        hold a mix; the group is closed then and nothing writes to them any more. Raises KeyError and ValueError for tensors that
        are not as scheduled.
        """
        started, self._begun = time.monotonic(), False
        try:
            self._prepare(sources, targets)
            self._rounds(sources, targets, started + timeout)
        except BaseException as error:
            self.group.abort(str(error))
            self.group.close()
            for lane in self._lanes:
                lane.drain()
            if isinstance(error, RuntimeError | DirectFailed):
                raise DirectFailed(str(error), torn=self._begun and self._writes) from error
            raise
        return Seconds(time.monotonic() - started, *(lane.seconds for lane in self._lanes))

    @property
    def _lanes(self) -> tuple[Lane, Lane, Lane]:
        return self._pack, self._wire, self._unpack

    @property
    def _writes(self) -> bool:
        return self.schedule.received > 0 or len(self.schedule.local.rows) > 0

    def _prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Tables of addresses, anew where a tensor has moved."""
        s = self.schedule
        source = addresses_of(s.source_locals, sources, np.concatenate([s.packs.source, s.local.source]))
        target = addresses_of(s.target_locals, targets, np.concatenate([s.unpacks.target, s.local.target]))
        if self._addresses is not None and all(map(np.array_equal, self._addresses, (source, target))):
            return
        for moves in (s.packs, s.unpacks, s.local):
            check_fit(moves, s.source_locals, source, s.target_locals, target)
        begins = np.append(source[:, 0], self._ready.data_ptr()), np.append(target[:, 0], 0)
        packs, unpacks, local = (Table(moves, *begins, self._device) for moves in (s.packs, s.unpacks, s.local))
        for slot in self._packed[:1]:
            packs.compile(target_base=slot.data_ptr())
        for slot in self._unpacked[:1]:
            unpacks.compile(source_base=slot.data_ptr())
        self._addresses, self._tables = (source, target), (packs, unpacks, local)

    def _rounds(self, sources: Tensors, targets: Tensors, deadline: float) -> None:
        """Round 0 needs no slots. Round `k` takes the slots of `k - 2`, packed once that was sent, received once that was
        unpacked."""
        packs, _, local = self._tables
        for lane in self._lanes:
            lane.begin()
        self.group.check()
        self._begun = True
        with self._pack.work():
            self._make_ready(sources)
            local.run(0)
        wire: list[Pending] = []
        unpacked: list[Mark] = []
        for k, exchange in enumerate(self.schedule.rounds):
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
                wire.append(self._post(k, exchange, sources, targets, deadline))
            if k:
                unpacked.append(self._unpack_round(k - 1, wire[k - 1], deadline))
        if wire:
            self._unpack_round(len(wire) - 1, wire[-1], deadline)
            wire[-1].wait(deadline)
        for lane in self._lanes:
            lane.drain()

    def _make_ready(self, sources: Tensors) -> None:
        for local, view, plus, at in self.schedule.ready:
            values = view_of(sources[self.schedule.source_locals[local]], view) + plus
            size = values.numel() * values.element_size()
            self._ready[at : at + size].view(values.dtype).view(values.shape).copy_(values)

    def _post(self, k: int, exchange: Round, sources: Tensors, targets: Tensors, deadline: float) -> Pending:
        s = self.schedule
        sends = [_part(post, s.source_locals, sources, self._packed, k) for post in exchange.sends]
        receives = [_part(post, s.target_locals, targets, self._unpacked, k) for post in exchange.receives]
        return self.group.post(sends, receives, deadline)

    def _unpack_round(self, k: int, arrived: Pending, deadline: float) -> Mark:
        with self._wire.work():
            arrived.come_before(self._unpack, deadline)
        if k:
            with self._unpack.work():
                self._tables[1].run(k, source_base=_slot(self._unpacked, k).data_ptr())
        return self._unpack.mark()


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """Beginning at a multiple of `ALIGN`."""
    if device.type == "cuda":  # as the allocator has it
        return torch.empty(size, dtype=torch.uint8, device=device)
    whole = torch.empty(size + ALIGN, dtype=torch.uint8)
    first = -whole.data_ptr() % ALIGN
    return whole[first : first + size]


def _slot(slots: list[torch.Tensor], k: int) -> torch.Tensor:
    return slots[(k - 1) % SLOTS]


def _part(post: Post, names: tuple[str, ...], tensors: Tensors, slots: list[torch.Tensor], k: int) -> Part:
    peer, local, at, size = post
    memory = _slot(slots, k) if local < 0 else _bytes(names[local], tensors[names[local]], at + size)
    return Part(peer, memory[at : at + size])


def _bytes(name: str, tensor: torch.Tensor, needed: int) -> torch.Tensor:
    """The first bytes of a tensor's memory."""
    item = tensor.element_size()
    elements = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if not tensor.numel() or elements * item < needed:
        raise ValueError(f"{name}: expected {needed} bytes of memory, got {list(tensor.shape)} of {tensor.dtype}")
    flat: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    found: torch.Tensor = flat.set_(tensor.detach().untyped_storage(), tensor.storage_offset() * item, (needed,), (1,))
    return found
