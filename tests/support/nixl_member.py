"""A member of a group over NIXL, in a process and on a host of its own."""

import time

import torch
from resharder.client.direct.base import DirectFailed, PeerMessage
from resharder.client.direct.nixl_group import NixlGroup
from torch.distributed import FileStore


class NixlMember:
    """Rank 0 sends `size` bytes to rank 1, in one message."""

    preloaded = ("resharder.client.direct.nixl_group",)

    def __init__(self, store: str, rank: int, size: int) -> None:
        self._rank = rank
        self._memory = torch.full((size,), 1 - rank, dtype=torch.uint8)
        self._group = NixlGroup(FileStore(store, 2), "group", rank, [1 - rank], torch.device("cpu"), 60.0)
        messages = [PeerMessage(1 - rank, self._memory)]
        self._round = ([], messages) if rank else (messages, [])
        self._group.prepare([self._round])

    def transfer(self, seconds: float) -> str:
        """Return the error, empty if there was none; after one, the group is closed."""
        deadline = time.monotonic() + seconds
        try:
            self._group.post(*self._round, deadline).wait(deadline)
        except DirectFailed as error:
            self._group.close()
            return str(error)
        return ""

    def arrived(self) -> int:
        """Return how many bytes the memory has from rank 0."""
        return int(self._memory.sum(dtype=torch.int64))
