"""A rank's side of a pair: it shares the memory of its tensors, and signals when a version may be read."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.peer_memory.export import Block, NotShareable, blocks_of, handle_of, of_device
from resharder.client.direct.peer_memory.messages import MOST_FDS, Line
from resharder.client.gpu import cuda_driver
from resharder.client.gpu.ready import fill_ready, ready_of
from resharder.client.gpu.table import Tensors, addresses_of
from resharder.converters.geometry.copy_table import ALIGN, Copies

logger = logging.getLogger(__name__)


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise NotShareable for errors of CUDA's driver."""
    try:
        yield
    except RuntimeError as error:
        raise NotShareable(str(error)) from error


class PeerOwner:
    """The memory that one worker reads. One thread at a time may use it; any thread may call `close`."""

    def __init__(self, line: Line, copies: Copies, rank: int, device: torch.device) -> None:
        """Take over a connection.

        Args:
            line: Connection to the worker.
            copies: Copies from this rank to the worker.
            rank: This rank.
            device: Device of the tensors.
        """
        self._line, self._names, self._device = line, copies.source_locals, device
        self._ready, _ = ready_of(copies, rank)
        self._buffer = torch.empty(int(copies.made.sum()), dtype=torch.uint8, device=device)
        if self._buffer.data_ptr() % ALIGN:  # on a CPU only
            memory = torch.empty(self._buffer.numel() + ALIGN, dtype=torch.uint8, device=device)
            self._buffer = memory[-memory.data_ptr() % ALIGN :][: self._buffer.numel()]
        self._used = np.unique(copies.source_local).tolist()
        self._sources: Tensors = {}
        self._pointers: list[int] = []
        self._shared: dict[str, Block] = {}
        self._serial = 0
        self._lock = threading.Lock()

    def prepare(self, sources: Tensors) -> None:
        """Share what is new since the last call. Fast if nothing is.

        A worker that is gone, as one that sleeps, is no error before `go`: the daemon may have ended the group already.

        Raises:
            NotShareable: Memory cannot be shared.
            KeyError: A tensor is missing.
        """
        pointers = [sources[self._names[i]].data_ptr() for i in self._used]
        with self._lock:
            if pointers == self._pointers and self._is_shared():
                return
            ranges = addresses_of(self._names, sources, self._used)
            own = self._buffer.data_ptr()
            table = np.concatenate([ranges, np.array([(own, own + self._buffer.numel())], np.int64)])
            blocks = {block.id: block for block in blocks_of(table[table[:, 1] > table[:, 0]].tolist(), self._device)}
            self._serial += 1
            self._sources, self._pointers = sources, pointers
            try:
                for id, block in blocks.items():
                    if id not in self._shared:
                        self._share(block)
                self._line.send("memory", table.tobytes(), serial=self._serial, blocks=list(blocks))
                self._shared = blocks
            except DirectFailed as error:
                self._shared = {}
                if isinstance(error, NotShareable):
                    raise
                logger.info("memory is not shared: %s", error)

    def _is_shared(self) -> bool:
        """Return whether the shared blocks are still the physical memory at their addresses."""
        if not self._serial or not self._shared:
            return False
        try:
            found = blocks_of([(block.begin, block.begin + block.size) for block in self._shared.values()], self._device)
        except NotShareable:  # freed
            return False
        return {block.id for block in found} == self._shared.keys()

    def _share(self, block: Block) -> None:
        """Send a block, in parts if it has many file descriptors."""
        whole = block.kind != "fd"
        parts = [block.pieces] if whole else [block.pieces[i : i + MOST_FDS] for i in range(0, len(block.pieces), MOST_FDS)]
        with of_device(self._device), _refusals():
            about: dict[str, Any] = {
                "id": block.id,
                "type": block.kind,
                "begin": block.begin,
                "size": block.size,
                "handle": handle_of(block),
            }
            for part in parts:
                fds: list[int] = []
                try:
                    if not whole:
                        for address, _ in part:
                            fds.append(cuda_driver.export_fd(address))
                    self._line.send("block", fds=fds, sizes=[size for _, size in part], **about)
                finally:
                    for fd in fds:
                        os.close(fd)

    def accepted(self, deadline: float) -> str:
        """Return why the worker cannot map the shared memory, empty if it can. Raises DirectFailed."""
        answer = self._line.receive(deadline)
        return str(answer.fields["why"]) if answer.kind == "refused" else ""

    def refuse(self, why: str) -> None:
        """Tell the worker that the memory cannot be shared. Raises DirectFailed."""
        self._line.send("refused", why=why)

    def go(self) -> None:
        """Let the worker read: the tensors' content is final. Raises DirectFailed."""
        self._line.send("go", serial=self._serial)

    def fill(self) -> None:
        """Compute the elements that are not copied as they are, on the current stream."""
        fill_ready(self._ready, self._names, self._sources, self._buffer)

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Return when the worker has read everything. Raises DirectFailed."""
        while (answer := self._line.receive(deadline, check)).kind != "done":
            if answer.kind == "refused":
                raise DirectFailed(str(answer.fields["why"]))

    def release(self, deadline: float) -> None:
        """Have the worker unmap everything, so that freed memory is free for others. The next `prepare` shares it again."""
        with self._lock, suppress(DirectFailed):  # a worker that is gone has unmapped it
            if self._shared:
                self._shared = {}
                self._line.send("release")
                while self._line.receive(deadline).kind != "released":
                    pass

    def close(self) -> None:
        """Close the connection. The worker unmaps the memory."""
        self._line.close()
