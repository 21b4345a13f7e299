"""Versions that all ranks of a publisher have offered, for readers outside the direct path."""

from collections.abc import Mapping

from resharder.converters.signal import Signal
from resharder.server.state.server import Reach

_REMEMBERED = 4  # offered versions of a model


class OfferedVersions:
    """Table of offered versions. Readers take no lock: it is replaced, never modified. Writers hold the lock of `Direct`."""

    def __init__(self) -> None:
        self._offered: dict[str, dict[int, Reach]] = {}
        self._at_once: dict[str, int] = {}
        self.offers_changed: Signal[()] = Signal()
        """Emitted after each change of `offered`."""

    def offered(self, model: str) -> Mapping[int, Reach]:
        """Return the last versions that every rank has offered, and to whom, by number, whatever their state is now."""
        return self._offered.get(model, {})

    def at_once(self, model: str) -> int:
        """Return the number of servers to which the ranks can send at the same time; 1 before the first group."""
        return self._at_once.get(model, 1)

    def add(self, model: str, number: int, reach: Reach) -> None:
        """Add a version that every rank offers."""
        known = self._offered.get(model, {})
        if number not in known:
            kept = list(known.items())[1 - _REMEMBERED :]
            self._offered = self._offered | {model: dict([*kept, (number, reach)])}
            self.offers_changed.emit()

    def set_at_once(self, model: str, servers: int) -> None:
        """Set the number of servers to which the ranks of a model can send at the same time."""
        self._at_once = self._at_once | {model: servers}
