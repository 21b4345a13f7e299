"""Pins of versions in the store, by holder."""

from collections.abc import Collection
from typing import Protocol

from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import VersionRecord


class Pinnable(Protocol):
    """Pins of the versions in the store."""

    def pin(self, name: str, number: int, holder: str) -> VersionRecord:
        """Protect a READY version until `release`. Raises ResourceNotFound if it is not READY or unknown."""

    def release(self, name: str, number: int, holder: str) -> None:
        """Remove a pin. A no-op if the holder has not pinned the version."""


class FleetPins:
    """Versions that servers and fleets pin. Callers serialise changes; any thread may call `of`."""

    def __init__(self, pins: Pinnable) -> None:
        self._pins = pins
        self._pinned: dict[tuple[str, str], frozenset[int]] = {}
        self._lost: frozenset[tuple[str, int]] = frozenset()

    def of(self, holder: str, model: str) -> frozenset[int]:
        """Return the numbers of the versions of a model that a holder has pinned."""
        pinned, lost = self._pinned.get((holder, model), frozenset()), self._lost
        return frozenset(number for number in pinned if (model, number) not in lost) if lost else pinned

    def version_changed(self, record: VersionRecord) -> None:
        """Drop the pins of a version that is lost: the only one that retires in spite of them. Any thread may call this."""
        key = (record.model, record.number)
        if record.is_lost:
            self._lost |= {key}
        elif key in self._lost:  # restored from an archive
            self._lost -= {key}

    def pin(self, holder: str, model: str, numbers: Collection[int]) -> frozenset[int]:
        """Pin versions in addition to earlier ones, and return the numbers that are no longer READY."""
        gone = set()
        for number in numbers:
            if number in self.of(holder, model):
                continue
            try:
                self._pins.pin(model, number, holder)
                self._pinned[holder, model] = self.of(holder, model) | {number}
            except ResourceNotFound:
                gone.add(number)
        return frozenset(gone)

    def release(self, holder: str, model: str, keep: frozenset[int] = frozenset()) -> None:
        """Release all versions of a model that a holder has pinned, except `keep`."""
        pinned = self.of(holder, model)
        if pinned & keep:
            self._pinned[holder, model] = pinned & keep
        else:
            self._pinned.pop((holder, model), None)
        for number in pinned - keep:
            self._pins.release(model, number, holder)
