"""Members of a transfer that run an action first."""

from collections.abc import Callable
from typing import Any

from resharder.client.direct.base import DirectGroup
from resharder.client.direct.peer_memory.pairs import PeerPairs


class DelayedGroup:
    """Group whose round `at`, counted from 1, begins with a call of `act`."""

    def __init__(self, group: DirectGroup, at: int, act: Callable[[], object]) -> None:
        self.rank, self.size, self.check, self.abort, self.close = group.rank, group.size, group.check, group.abort, group.close
        self.path, self.prepare, self.release = group.path, group.prepare, group.release
        self._group, self._at, self._act, self._rounds = group, at, act, 0

    def post(self, *parts: Any) -> Any:
        self._rounds += 1
        if self._rounds == self._at:
            self._act()
        return self._group.post(*parts)


class DelayedPairs:
    """Pairs whose memory is computed, and read by others, after a call of `act`."""

    def __init__(self, pairs: PeerPairs, act: Callable[[], object]) -> None:
        self._pairs, self._act = pairs, act

    def fill(self) -> None:
        self._act()
        self._pairs.fill()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pairs, name)
