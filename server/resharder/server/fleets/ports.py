"""Interfaces by which the fleets reach the rest of the daemon."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from resharder.server.infra.event_log import Kind
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Server
from resharder.server.state.version import VersionRecord


class Versions(Protocol):
    """Records of the versions in the store."""

    def models(self) -> list[str]:
        """Return the names of models that are published, have a READY version, or await a restored one."""

    def versions(self, name: str) -> list[VersionRecord]:
        """Return the versions of a model, oldest first. Raises ResourceNotFound (MODEL_UNKNOWN)."""

    def subscribe(self, callback: Callable[[VersionRecord], None]) -> None:
        """Call `callback(record)` after every READY, RETIRED and ABORTED, without the store's lock."""


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
        """Return no versions."""
        return ()

    def at_once(self, model: str) -> int:
        """Return 1."""
        return 1

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Ignore the callback, since nothing changes."""


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

    def server_stepped(self, before: Server, after: Server) -> None:
        """Called after each step of a server, even if nothing changed."""

    def fleet_stepped(self, before: Fleet | None, after: Fleet) -> None:
        """Called after each change of a fleet's durable state; `before` is None for a new fleet."""

    def serving_changed(self) -> None:
        """Called when `Roster.serving` may have changed."""
