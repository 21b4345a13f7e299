"""Decisions about capacity: versions that retention drops, and the peak use of a model."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from resharder.server.state.version import VersionRecord


class Retention(NamedTuple):
    """Bounds on the READY versions of a model: how many, and how many bytes (0: no bound)."""

    keep_count: int
    keep_bytes: int = 0

    def surplus(
        self, ready: Iterable[VersionRecord], pinned: Collection[int] = (), partial: Collection[int] = ()
    ) -> list[VersionRecord]:
        """Return the READY versions to drop, oldest first.

        The newest, the newest whole one and the pinned ones are never among them. `partial`: versions that are not whole.
        """
        drop, size = [], 0
        newest_first = sorted(ready, key=lambda r: r.number, reverse=True)
        whole = next((record for record in newest_first if record.number not in partial), None)
        # The newest whole version counts as the second newest: bytes that only nodes hold may be lost.
        order = sorted(newest_first, key=lambda r: (r is not newest_first[0], r is not whole))
        for count, record in enumerate(order, start=1):
            size += record.size_bytes
            over = count > self.keep_count or (self.keep_bytes and size > self.keep_bytes)
            if count > 1 and over and record is not whole and record.number not in pinned:
                drop.append(record)
        return sorted(drop, key=lambda r: r.number)

    def sets(self, size: int) -> int:
        """Return how many sets of files an epoch uses in turn: one to upload to, at least two for READY versions.

        `size`: bytes of one set.
        """
        kept = min(self.keep_count, self.keep_bytes // size) if self.keep_bytes and size else self.keep_count
        return max(kept, 2) + 1


def peak(size: int, sets: int, old: Sequence[int]) -> int:
    """Return the peak bytes while `sets` sets of a new epoch replace READY versions of `old` sizes, oldest first."""
    moments = []
    for arrived in range(sets):
        still = old[max(0, len(old) - (sets - 1 - arrived)) :] if arrived < sets - 1 else ()
        moments.append((arrived + 1) * size + sum(still))
    return max(moments)
