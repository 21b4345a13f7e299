"""Interfaces by which the fleets reach the rest of the daemon."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from resharder.server.infra.event_log import Kind
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Server
from resharder.server.state.version import VersionRecord


class Versions(Protocol):
    """Records of the versions in the store."""

    def models(self) -> list[str]: ...
    def versions(self, name: str) -> list[VersionRecord]: ...
    def subscribe(self, callback: Callable[[VersionRecord], None]) -> None: ...


class DirectOffers(Protocol):
    """Versions that ranks offer over the direct path."""

    def offered(self, model: str) -> Collection[int]:
        """Return the numbers of the last versions that every rank has offered."""

    def at_once(self, model: str) -> int:
        """Return the number of servers to which the ranks can send at the same time; 1 before the first group."""

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` after each change of `offered`. It must not block."""


class NoOffers:
    """`DirectOffers` of a daemon without a direct path."""

    def offered(self, model: str) -> Collection[int]:
        return ()

    def at_once(self, model: str) -> int:
        return 1

    def subscribe(self, callback: Callable[[], None]) -> None:
        pass


class Note(Protocol):
    """Recorder of events."""

    def __call__(self, kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> object: ...


def no_note(kind: Kind, subject: str, what: str, reason: str = "", **details: object) -> None:
    """Record nothing."""


class StartCheck(Protocol):
    """Starter of the check of a fleet's canaries, at most once for each move.

    `addresses` are those of the canaries. `done` is called once, on another thread, with the result and a message.
    """

    def __call__(self, fleet: Fleet, addresses: Sequence[str], done: Callable[[bool, str], None]) -> None: ...


def no_check(fleet: Fleet, addresses: Sequence[str], done: Callable[[bool, str], None]) -> None:
    """Start nothing."""


class FleetObserver:
    """Observer of every step of servers and fleets. Methods are called with the fleets' lock held and must not block."""

    def server_stepped(self, before: Server, after: Server) -> None: ...
    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None: ...
    def serving_changed(self) -> None:
        """Called when `Roster.serving` may have changed."""
