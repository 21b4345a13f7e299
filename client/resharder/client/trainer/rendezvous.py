"""Progress reports between the ranks of a trainer, as counters in the store of torch's default process group. No collective.

One short call shows whether all ranks have reported. A rank reports each word once.
"""

from collections import Counter

import torch.distributed as dist
from resharder.client.errors import UsageError
from resharder.client.trainer.identity import RankIdentity
from torch._C._distributed_c10d import HashStore, Store

_WORDS = ("entered", "aside", "settled", "left", "failed", "ended")
_meetings: Counter[str] = Counter()  # numbers, so that a key of the store has one meaning for the life of the process


class Ranks:
    """Meeting of all ranks: on each of them, the `number`-th of its `scope`."""

    def __init__(self, store: Store, rank: int, world_size: int, scope: str, number: int) -> None:
        self.first = rank == 0
        self._rank, self._world_size = rank, world_size
        self._store, self._scope, self._number = store, scope, number
        self._mark, self._said = str(number), set[str]()

    def say(self, word: str) -> None:
        """Report a word; a no-op if this rank has reported it."""
        if word not in self._said:
            self._said.add(word)
            self._store.set(f"{self._scope}/rank {self._rank}", self._mark)
            self._store.add(self._key(self._number, word), 1)

    def said(self, word: str) -> int:
        """Return the number of ranks that have reported a word."""
        return self._store.add(self._key(self._number, word), 0)

    def all_said(self, word: str) -> bool:
        """Return whether all ranks have reported a word."""
        return self.said(word) == self._world_size

    def absent(self) -> str:
        """Return, as text, the ranks that have not reported anything at this meeting."""
        keys = {rank: f"{self._scope}/rank {rank}" for rank in range(self._world_size)}
        came = {rank for rank, key in keys.items() if self._store.check([key]) and self._store.get(key) == self._mark.encode()}
        return f"ranks {', '.join(map(str, sorted(keys.keys() - came)))} have not"

    def forget_earlier(self) -> None:
        """Delete the counters of the previous meeting. All ranks must have joined this one."""
        for word in _WORDS:
            self._store.delete_key(self._key(self._number - 1, word))

    def _key(self, number: int, word: str) -> str:
        return f"{self._scope}/{number}/{word}"


def meet(identity: RankIdentity, model: str) -> Ranks:
    """Return the next meeting, which every rank must join. Raises UsageError if torch.distributed does not span all ranks."""
    scope = f"resharder/{identity.job}/{model}"
    return Ranks(_store(identity), identity.rank, identity.world_size, scope, _number(scope))


def _number(scope: str) -> int:
    _meetings[scope] += 1
    return _meetings[scope]


def _store(identity: RankIdentity) -> Store:
    if identity.world_size == 1:
        return HashStore()
    if not (dist.is_initialized() and dist.get_world_size() == identity.world_size):
        raise UsageError(
            f"expected torch.distributed over all {identity.world_size} ranks, which report their progress in its store: "
            "call init_process_group before generation"
        )
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
