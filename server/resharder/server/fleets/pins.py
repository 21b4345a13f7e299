"""Who keeps which versions in the store from being dropped."""

from collections.abc import Collection
from typing import Protocol

from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import VersionRecord


class Pinnable(Protocol):
    """Pins of the versions in the store."""

    def pin(self, name: str, number: int, holder: str) -> VersionRecord: ...
    def release(self, name: str, number: int, holder: str) -> None: ...


class Holds:
    """Of holders by name, each with versions of a model. One thread at a time changes it; `of` may be asked by any."""

    def __init__(self, pins: Pinnable) -> None:
        self._pins = pins
        self._held: dict[tuple[str, str], frozenset[int]] = {}

    def of(self, holder: str, model: str) -> frozenset[int]:
        return self._held.get((holder, model), frozenset())

    def hold(self, holder: str, model: str, numbers: Collection[int]) -> frozenset[int]:
        """These too; those that are no longer READY are returned."""
        gone = set()
        for number in numbers:
            if number in self.of(holder, model):
                continue
            try:
                self._pins.pin(model, number, holder)
                self._held[holder, model] = self.of(holder, model) | {number}
            except ResourceNotFound:
                gone.add(number)
        return frozenset(gone)

    def release(self, holder: str, model: str, keep: frozenset[int] = frozenset()) -> None:
        """All but those."""
        held = self.of(holder, model)
        if held & keep:
            self._held[holder, model] = held & keep
        else:
            self._held.pop((holder, model), None)
        for number in held - keep:
            self._pins.release(model, number, holder)
