"""State that the parts of the direct path share, and the end of groups."""

import threading
from collections.abc import Callable
from typing import Literal, NoReturn, Protocol

import structlog
from resharder.server.direct.state import Act, Group, Offer
from resharder.server.infra.backoff import backoff
from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.state.errors import FailedPrecondition

LOOK = 0.25
"""Longest pause of a waiting call, in seconds."""
_PAUSE, _LONGEST_PAUSE = (
    30.0,
    600.0,
)  # seconds without an attempt after the second consecutive failure; doubles with each further one
_log = structlog.get_logger("resharder.direct")

Cause = Literal["not_offered", "offer_over", "layout", "late", "member_gone", "member_failed"]
"""Reason for which a server takes a version over the staged path."""


class TransferObserver(Protocol):
    """Observer of successful transfers (`cause` None) and of fallbacks to the staged path. It must not block."""

    def __call__(self, seconds: float, cause: Cause | None) -> None: ...


def _no_observer(seconds: float, cause: Cause | None) -> None:
    pass


class Exchange:
    """Offers by model and groups by server, guarded by `lock`; `changed` signals each change.

    Lock order: `lock` is taken after all others, except that of the layouts. The fleets are called without it.

    Args:
        seconds: Bound on the set-up of a group, and on one transfer.
        clock: Monotonic clock in seconds.
        observe: Observer of transfers.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], observe: TransferObserver = _no_observer) -> None:
        self.seconds, self.clock, self.observe = seconds, clock, observe
        self.lock, self.changed = threading.RLock(), ChangeSignal()
        self.offers: dict[str, Offer] = {}
        """The newest offer of each model."""
        self.groups: dict[str, Group] = {}
        self._refused: dict[str, int] = {}  # server -> version that it takes over the staged path
        self._failures: dict[str, tuple[int, float]] = {}  # server -> failures in a row, time of the next attempt

    # Methods below are called with the lock held

    def group(self, id: str) -> Group:
        """Return a group by its id. Raises FailedPrecondition (NOT_OFFERED)."""
        group = next((group for group in self.groups.values() if group.id == id), None)
        if group is None:
            raise FailedPrecondition("NOT_OFFERED", f"group {id[:64]} is over")
        return group

    def offer_of(self, group: Group) -> Offer:
        """Return the current offer of a group's ranks. Raises FailedPrecondition (NOT_OFFERED)."""
        offer = next(iter(self._offers_to(group)), None)
        if offer is None or offer.ended:
            why = f": {offer.over}" if offer is not None else ""
            raise FailedPrecondition("NOT_OFFERED", f"group {group.id}: the offer of its version is over{why}")
        return offer

    def _offers_to(self, group: Group) -> list[Offer]:
        return [offer for offer in self.offers.values() if offer.publisher == group.members[0].owner]

    def groups_of(self, offer: Offer) -> list[Group]:
        """Return the groups of an offer's publisher."""
        return [group for group in self.groups.values() if group.members[0].owner == offer.publisher]

    def is_refused(self, server: str, number: int) -> bool:
        """Return whether a server takes a version over the staged path."""
        return self._refused.get(server) == number

    def check_attempts(self, server: str, number: int) -> None:
        """Raise FailedPrecondition (NOT_OFFERED) if a transfer to a server has failed and is not due again."""
        if self.is_refused(server, number):
            self.refuse(server, number, "member_failed", "it has failed before")
        failures, again = self._failures.get(server, (0, 0.0))
        if (left := again - self.clock()) > 0:
            self.refuse(server, number, "member_failed", f"{failures} transfers in a row failed; the next is due in {left:.0f} s")

    def refuse(self, server: str, number: int, cause: Cause, why: str) -> NoReturn:
        """Make a server take a version over the staged path, and raise FailedPrecondition (NOT_OFFERED)."""
        self._give_up(server, number, cause)
        self.changed.notify()
        raise FailedPrecondition("NOT_OFFERED", f"version {number} goes to server {server} over the staged path: {why}")

    def _give_up(self, server: str, number: int, cause: Cause) -> None:
        if not self.is_refused(server, number):  # observed once, however many workers call
            self._refused[server] = number
            self.observe(0.0, cause)

    def start_next(self, offer: Offer) -> None:
        """Start the queued transfers whose ranks are idle."""
        for group in list(offer.turns):
            if not group.error and not offer.has_room(group):
                continue
            offer.turns.remove(group)
            if not group.error:
                offer.running[group.id] = group
                group.granted, group.began = group.install, self.clock()
                offer.tell(group, Act.RUN)
                _log.info("direct_turn", server=group.server, version=offer.number, group=group.id)
                self.changed.notify()

    def succeed(self, group: Group, offer: Offer) -> None:
        """End a transfer that every member has finished."""
        del offer.running[group.id]
        took = self.clock() - group.began
        _log.info(
            "direct_transfer",
            server=group.server,
            version=offer.number,
            group=group.id,
            seconds=took,
            size_bytes=group.received,
        )
        self.observe(took, None)
        self._failures.pop(group.server, None)
        offer.served.add(group.server)
        offer.look_at = 0.0
        self.start_next(offer)
        self.changed.notify()

    def fail(self, group: Group, cause: Cause, why: str) -> None:
        """End a group after a failure, which delays further attempts of its server. A no-op for a group that has ended."""
        if group.error:
            return
        count = self._failures.get(group.server, (0, 0.0))[0] + 1
        self._failures[group.server] = count, self.clock() + backoff(count - 1, _PAUSE, _LONGEST_PAUSE)
        _log.warning("direct_failed", server=group.server, group=group.id, reason=why)
        for offer in self._offers_to(group):
            if not offer.ended:
                self._give_up(group.server, offer.number, cause)
        self.end(group, why)

    def end(self, group: Group, why: str) -> None:
        """End a group, which need not mean failure, and start the next queued transfers."""
        group.error = why
        for offer in self._offers_to(group):
            offer.tell(group, Act.DROP)
            offer.running.pop(group.id, None)
            self.start_next(offer)
        self.changed.notify()

    def end_late(self, offer: Offer, slack: float = 5.0) -> None:
        """End transfers that take longer than their bound and `slack` seconds."""
        for group in list(offer.running.values()):
            if self.clock() > group.began + self.seconds + slack:
                self.fail(group, "late", f"not every member finished within {self.seconds + slack:g} s")

    def forget(self, server: str) -> None:
        """Remove all state of a server."""
        self.groups.pop(server, None)
        self._refused.pop(server, None)
        self._failures.pop(server, None)
