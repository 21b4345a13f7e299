"""The pairs of a process, of which those that share memory take part in a transfer here."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
from resharder.client.direct.peer_memory.owner import PeerOwner
from resharder.client.direct.peer_memory.reader import PeerReader
from resharder.client.gpu.table import Tensors
from resharder.converters.geometry.copy_table import Copies


@dataclass(frozen=True)
class PeerPairs:
    """Pairs of a process that share memory, by the other side's rank, and the ranks of those that use NIXL."""

    owners: dict[int, PeerOwner] = field(default_factory=dict)
    """Sides of this process's own memory."""
    readers: dict[int, PeerReader] = field(default_factory=dict)
    """Sides of other processes' memory."""
    nixl: set[int] = field(default_factory=set)
    """The other side's rank of each pair that uses NIXL instead."""
    on_device: set[int] = field(default_factory=set)
    """The other side's rank of each pair that shares memory and the GPU, or the CPUs."""

    @property
    def size(self) -> int:
        """Bytes that this process reads with each version."""
        return sum(reader.size for reader in self.readers.values())

    @property
    def frozen_size(self) -> int:
        """Bytes of frozen boxes among them."""
        return sum(reader.frozen_size for reader in self.readers.values())

    @property
    def rounds(self) -> int:
        """Number of rounds of the reads."""
        return max((reader.rounds for reader in self.readers.values()), default=0)

    @property
    def complete(self) -> dict[str, int]:
        """Last round that writes into each target tensor, by its name."""
        found: dict[str, int] = {}
        for reader in self.readers.values():
            for name, number in reader.complete.items():
                found[name] = max(number, found.get(name, 0))
        return found

    def rest(self, copies: Copies) -> Copies:
        """Return the copies of other pairs."""
        return copies.take(~(np.isin(copies.target, [*self.owners]) | np.isin(copies.source, [*self.readers])))

    def prepare(self, sources: Tensors, targets: Tensors) -> None:
        """Share and locate the tensors. Fast if none has moved. Raises DirectFailed, KeyError and ValueError."""
        for owner in self.owners.values():
            owner.prepare(sources)
        for reader in self.readers.values():
            reader.prepare(targets)

    def fill(self) -> None:
        """Compute the elements of this process's memory that are not copied as they are, on the current stream."""
        for owner in self.owners.values():
            owner.fill()

    @contextmanager
    def reading(self, targets: Tensors, deadline: float, check: Callable[[], None]) -> Iterator[None]:
        """Let the others read, whose reads have ended when the block's have and this returns.

        At the block's end, no copy of this process may be in progress. Raises DirectFailed.
        """
        for owner in self.owners.values():
            owner.go()
        with ExitStack() as held:
            for reader in self.readers.values():
                held.enter_context(reader.reading(targets, deadline, check))
            yield
        for owner in self.owners.values():
            owner.finish(deadline, check)

    def run(self, number: int, *, kept: bool) -> None:
        """Copy the bytes of a round, on the current stream; `kept`: without frozen boxes."""
        for reader in self.readers.values():
            if not kept or number < reader.frozen_from:
                reader.run(number)

    def release(self, deadline: float) -> None:
        """Have all readers unmap this process's memory. Raises DirectFailed after `deadline`."""
        for owner in self.owners.values():
            owner.release(deadline)

    def close(self) -> None:
        """Close all connections."""
        for owner in self.owners.values():
            owner.close()
        for reader in self.readers.values():
            reader.close()
