"""Decisions about room: what retention drops, and how many bytes a model will need at most."""

from collections.abc import Collection, Sequence

from resharder.server.store.manifest import VersionRecord


def surplus(ready: Sequence[VersionRecord], held: Collection[int], keep_count: int, keep_bytes: int) -> list[VersionRecord]:
    """Which READY versions (given oldest first) to drop. The newest and the held ones always stay."""
    drop, size = [], 0
    for count, record in enumerate(reversed(ready), start=1):
        size += record.size_bytes
        over = count > keep_count or (keep_bytes and size > keep_bytes)
        if count > 1 and over and record.number not in held:
            drop.append(record)
    return drop[::-1]


def wanted_sets(size: int, keep_count: int, keep_bytes: int) -> int:
    """How many sets of files of `size` bytes an epoch uses in turn: wanted, previous and arriving at least, and what is kept."""
    kept = min(keep_count, keep_bytes // size) if keep_bytes and size else keep_count
    return max(kept, 2) + 1


def peak(size: int, sets: int, old: Sequence[int]) -> int:
    """Bytes at the fullest moment while `sets` sets of a new epoch replace READY versions of `old` sizes, oldest first."""
    moments = []
    for arrived in range(sets):
        still = old[max(0, len(old) - (sets - 1 - arrived)) :] if arrived < sets - 1 else ()
        moments.append((arrived + 1) * size + sum(still))
    return max(moments)
