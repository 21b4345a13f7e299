"""A worker's side of a pair: it maps a rank's memory, and copies from it by one kernel."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.peer_memory.mapping import Mappings
from resharder.client.direct.peer_memory.messages import Line, PairMessage
from resharder.client.errors import ResharderError
from resharder.client.gpu.ready import ready_of
from resharder.client.gpu.schedule import Moves, reads_of
from resharder.client.gpu.table import Table, Tensors, addresses_of, check_fit
from resharder.converters.geometry.copy_table import Copies

_ROUND_BYTES = 1 << 30  # digests of a round are computed while the next is copied
_POLL = 0.05  # seconds


class PeerReader:
    """The memory of one rank, and the copies from it. A thread of its own maps what the rank shares, when it does.

    One thread at a time may transfer; any thread may call `close`.
    """

    def __init__(self, line: Line, copies: Copies, rank: int, device: torch.device, programs: int) -> None:
        """Take over a connection, and begin to listen to it.

        Args:
            line: Connection to the rank.
            copies: Copies from the rank to this process.
            rank: The other process's rank.
            device: Device of the targets.
            programs: Programs of the kernel that copies; on a CPU it has no meaning.
        """
        order = np.lexsort((copies.target_offset, copies.target_local))
        self._copies, ready_at = copies.take(order), ready_of(copies, rank)[1][order]
        self.size = int(copies.sizes.sum())
        self.frozen_size = int(copies.sizes[copies.frozen].sum())
        self.frozen_from = -(-(self.size - self.frozen_size) // _ROUND_BYTES)
        self.rounds = max(1, self.frozen_from + -(-self.frozen_size // _ROUND_BYTES))
        frozen = self._copies.frozen
        first = reads_of(self._copies.take(~frozen), ready_at[~frozen], self.frozen_from)
        last = reads_of(self._copies.take(frozen), ready_at[frozen], self.rounds - self.frozen_from)
        last = last._replace(round=last.round + self.frozen_from)
        self.moves = Moves(*(np.concatenate(columns) for columns in zip(first, last, strict=True)))
        self._targets = np.unique(copies.target_local).tolist()
        self._line, self._device, self._programs = line, device, programs
        self._changed = threading.Condition()
        self._using = threading.RLock()  # guards what is mapped, and is held while copies read it
        self._mappings = Mappings(device)
        self._sources, self._serial = np.zeros((0, 2), np.int64), 0  # the rank's addresses, and which memory they are in
        self._go = 0  # the memory that may be read
        self._why = ""  # why nothing can be read
        self._prepared: tuple[int, list[int]] = (0, [])
        self._table: Table
        threading.Thread(target=self._listen, name="resharder-peer", daemon=True).start()

    @property
    def complete(self) -> dict[str, int]:
        """Last round that writes into each target tensor, by its name."""
        names, found = self._copies.target_locals, dict[str, int]()
        for local in self._targets:
            found[names[local]] = int(self.moves.round[self.moves.target == local].max())
        return found

    def accept(self, deadline: float) -> str:
        """Return, when the rank has shared its memory or has failed to, why it cannot be read; empty if it can.

        Raises DirectFailed if the rank is late.
        """
        self._wait(lambda: bool(self._serial), deadline, "to share its memory")
        return self._why

    def prepare(self, targets: Tensors) -> None:
        """Locate sources and targets. Fast if neither has moved.

        Raises DirectFailed, KeyError and ValueError for memory that differs from the copies.
        """
        names = self._copies.target_locals
        pointers = [targets[names[i]].data_ptr() for i in self._targets]
        with self._using:
            if not self._serial or self._prepared == (self._serial, pointers):
                return
            target, source = addresses_of(names, targets, self._targets), self._mappings.translate(self._sources)
            spans = np.column_stack([source, source + self._sources[:, 1] - self._sources[:, 0]])[:-1]
            check_fit(self.moves, self._copies.source_locals, spans, names, target)
            self._table = Table(self.moves, source, np.append(target[:, 0], 0), self._device, self._programs)
            self._table.compile()
            self._prepared = self._serial, pointers

    @contextmanager
    def reading(self, targets: Tensors, deadline: float, check: Callable[[], None]) -> Iterator[None]:
        """Wait for the rank's word, and keep its memory mapped in the block, at whose end no copy may be in progress.

        Raises:
            DirectFailed: The rank is gone, or does not let this process read in time.
        """
        self._wait(lambda: bool(self._go), deadline, "to let this process read", check)
        if self._why:
            raise DirectFailed(self._why)
        with self._using:
            go, self._go = self._go, 0
            self.prepare(targets)
            if go != self._prepared[0]:
                raise DirectFailed(f"expected the rank's memory number {go}, got {self._prepared[0]}")
            self._mappings.refresh()
            yield
        self._line.send("done")

    def run(self, number: int) -> None:
        """Copy the bytes of a round, on the current stream."""
        self._table.run(number)

    def _wait(self, holds: Callable[[], bool], deadline: float, what: str, check: Callable[[], None] = lambda: None) -> None:
        """Wait until something holds, or nothing can be read. Raises DirectFailed."""
        with self._changed:
            while not (holds() or self._why):
                check()
                if time.monotonic() > deadline:
                    raise DirectFailed(f"the rank was not ready in time {what}")
                self._changed.wait(_POLL)

    def _listen(self) -> None:
        """Take the rank's messages until the connection ends, then unmap its memory."""
        try:
            while True:
                self._take(self._line.receive())
        except (ResharderError, RuntimeError, OSError, KeyError, ValueError) as error:
            with suppress(DirectFailed):
                self._line.send("refused", why=str(error))
            self._line.close()
            with self._changed:
                self._why = self._why or str(error)
                self._changed.notify_all()
        with self._using:
            self._mappings.close()

    def _take(self, message: PairMessage) -> None:
        fields = message.fields
        match message.kind:
            case "block":
                self._map(fields, message.fds)
            case "memory":
                with self._using:
                    self._mappings.keep(fields["blocks"])
                    self._sources, self._serial = np.frombuffer(message.data, np.int64).reshape(-1, 2), int(fields["serial"])
                self._line.send("mapped")
            case "go":
                self._go = int(fields["serial"])
            case "release":
                with self._using:
                    self._mappings.keep(())
                    self._serial, self._prepared = 0, (0, [])
                self._line.send("released")
            case "refused":
                raise DirectFailed(str(fields["why"]))
        with self._changed:
            self._changed.notify_all()

    def _map(self, fields: dict[str, Any], fds: tuple[int, ...]) -> None:
        try:
            with self._using:
                self._mappings.add(
                    fields["id"], fields["type"], fields["begin"], fields["size"], fields["handle"], fields["sizes"], fds
                )
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Close the connection, and unmap the memory as soon as no copy reads it."""
        self._line.close()
