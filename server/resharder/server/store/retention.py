"""Decisions about capacity: versions that retention drops, the peak use of a model, and the bound on a store's bytes."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from resharder.converters.units import size_text
from resharder.server.infra.filesystem import touching
from resharder.server.state.errors import ResourceExhausted
from resharder.server.state.version import READY, UPLOADING, VersionRecord
from resharder.server.store.catalogue import Catalogue, StoredModel

_SHARE = 0.8
_MORE_ROOM = "raise --store-limit-bytes or lower --keep-count"


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


class Capacity:
    """Upper bound on the bytes of all versions: `limit_bytes`, or if that is 0, 80 % of the medium.

    Callers must hold the lock of the catalogue, unless a method says otherwise. The constructor raises MediumRefused. Without
    `hold`, the store has no bytes of versions, and there is no bound.
    """

    def __init__(self, root: Path, catalogue: Catalogue, retention: Retention, limit_bytes: int, *, hold: bool = True) -> None:
        self._root, self._catalogue, self._retention, self.hold = root, catalogue, retention, hold
        self.limit_bytes = limit_bytes
        if not limit_bytes:
            with touching(root, "measuring"):
                self.limit_bytes = int(_SHARE * (self._free() + catalogue.used_bytes()))

    def check_size(self, model: str, size: int) -> None:
        """Raise ResourceExhausted (NO_ROOM) if versions of `size` bytes do not fit in an empty store. Needs no lock."""
        sets = self._retention.sets(size)
        if self.hold and size * sets > self.limit_bytes:
            raise ResourceExhausted(
                "NO_ROOM",
                f"no room: model {model} needs {sets} versions of {size_text(size)} ({size_text(size * sets)}), the store holds "
                f"{size_text(self.limit_bytes)}; {_MORE_ROOM}",
            )

    def check_epoch(self, model: StoredModel, size: int, coming: Mapping[str, int] = MappingProxyType({})) -> None:
        """Raise ResourceExhausted (NO_ROOM) if an epoch of versions of `size` bytes does not fit.

        `coming`: bytes that are about to be reserved for other models, in place of their present reservations.
        """
        sets = self._retention.sets(size)
        needed = peak(size, sets, [record.size_bytes for record in model.of(READY)])
        lent = sum(other.lent() for other in self._catalogue.stored() if other is not model)
        limit, there = self._left_for(model, coming, lent=True), self._free() + model.used() + lent
        if self.hold and (needed > limit or needed > there):
            raise ResourceExhausted(
                "NO_ROOM",
                f"no room: {sets} versions of {size_text(size)} of model {model.name} and what is kept need {size_text(needed)}, "
                f"the store has {size_text(max(0, min(limit, there)))} of {size_text(self.limit_bytes)} for them; {_MORE_ROOM}; "
                f"{self.holdings()}",
            )

    def within_limit(self, model: StoredModel, size: int) -> bool:
        """Return whether the bound allows `size` more bytes for the model."""
        return model.used() + size <= self._left_for(model)

    def fits(self, model: StoredModel, size: int) -> bool:
        """Return whether the bound and the medium allow `size` more bytes for the model."""
        return not self.hold or (self.within_limit(model, size) and size <= self._free())

    def available_bytes(self) -> dict[str, int]:
        """Return the bytes that each model's versions after its READY ones have or can get. Takes the lock."""
        if not self.hold:
            return {}
        with self._catalogue.changed:
            models = [(model, model.unpublished() + model.held()) for model in self._catalogue.stored()]
            limits = {model.name: self._left_for(model, lent=True) - model.used() for model, _ in models}
        try:
            free = self._free()
        except OSError:  # the store is lost
            free = 0
        return {model.name: max(0, unpublished + min(limits[model.name], free)) for model, unpublished in models}

    def holdings(self) -> str:
        """Return a description of the versions and reservations that occupy the store, for messages of NO_ROOM."""
        lines = []
        for model in self._catalogue.stored():
            for record in sorted([*model.of(READY), *model.of(UPLOADING)], key=lambda r: r.number):
                by = ", ".join(sorted(model.holders.get(record.number, ()))[:4])
                lines.append(f"{record.name} {record.state} {size_text(record.size_bytes)}" + (f" used by {by}" if by else ""))
                lines[-1] += f" ({record.reason})" if record.reason else ""
            if model.reservation:
                lines.append(f"models/{model.name} reserves {model.reservation.sets} times {size_text(model.reservation.size)}")
            lines += [f"{path}, which cannot be removed, {size_text(size)}" for path, size in model.stuck.items()]
        return "held: " + ("; ".join(lines[:16]) or "nothing")

    def _left_for(self, model: StoredModel, coming: Mapping[str, int] = MappingProxyType({}), *, lent: bool = False) -> int:
        """Return the bytes that the bound leaves to a model. `lent`: count what others have beyond their reservations."""
        taken = 0
        for other in self._catalogue.stored():
            if other is not model:
                used = other.used() - (other.lent() if lent else 0)
                taken += max(used, coming[other.name] if other.name in coming else other.reserved_bytes())
        return self.limit_bytes - taken

    def _free(self) -> int:
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize
