"""Offers of publishers: which ranks have a version in memory, their tasks, and the end of the offer."""

from collections import deque
from collections.abc import Callable, Iterator

from resharder.server.direct.exchange import LOOK, Exchange
from resharder.server.direct.layouts import Memories
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.direct.state import Member, Offer, Task
from resharder.server.infra.change_signal import Pause
from resharder.server.state.errors import FailedPrecondition

Awaiting = Callable[[str, int], frozenset[str]]
"""Function of a model and a version's number that returns the servers that install it next and can receive it directly."""


class Offers:
    """Offers of all publishers, one for each model. Thread-safe."""

    def __init__(self, exchange: Exchange, memories: Memories, awaiting: Awaiting, offered: OfferedVersions) -> None:
        self._exchange, self._memories, self._awaiting, self._offered = exchange, memories, awaiting, offered
        self._withheld: dict[str, int] = {}  # the newest version of each model that no rank offers

    def offer(
        self,
        member: Member,
        memory: str,
        model: str,
        number: int,
        world_size: int,
        wait_seconds: float,
        *,
        servers_sleep: bool = False,
    ) -> Offer:
        """Add one rank's offer. The first offer of a later version ends the earlier one.

        Args:
            member: The rank.
            memory: Fingerprint of its declared layout.
            model: Model of the version.
            number: Number of the version.
            world_size: Ranks of the publisher.
            wait_seconds: Seconds after READY for which the rank keeps its memory unchanged.
            servers_sleep: The offer lasts until a server is awaited, because servers still sleep when the version is READY.

        Raises:
            FailedPrecondition: MEMORY_UNKNOWN; NOT_OFFERED after the offer of a later version.
        """
        exchange = self._exchange
        with exchange.lock:
            self._memories.check(member, memory)
            offer = exchange.offers.get(model)
            if offer is None or offer.publisher != member.owner or offer.number < number:
                if offer is not None:
                    offer.end(f"version {number} is offered by {member.owner}")
                offer = exchange.offers[model] = Offer(model, number, member.owner, world_size, wait_seconds, exchange.changed)
            if offer.number > number or offer.ended:
                why = offer.over if offer.number == number else f"version {offer.number} is offered"
                raise FailedPrecondition("NOT_OFFERED", f"version {number} of {model}: its offer is over: {why}")
            offer.wait_seconds = min(offer.wait_seconds, wait_seconds)
            offer.servers_sleep |= servers_sleep
            offer.ranks[member.rank] = (member, memory, deque())
            if offer.complete:
                self._ask_ahead(offer)
                self._offered.add(model, number)
            exchange.changed.notify()
            return offer

    def _ask_ahead(self, offer: Offer) -> None:
        """Request the digests of groups whose workers asked for those of the last version, before the workers ask again.

        Ranks compute them while the workers' server receives the order to stage.
        """
        for group in self._exchange.groups_of(offer):
            if group.verifies_ahead and not group.error:
                group.verifies_ahead = False
                offer.ask(group)

    def withhold(self, model: str, number: int) -> None:
        """Declare that no rank will offer a version, nor an earlier one that is not offered yet."""
        with self._exchange.lock:
            self._withheld[model] = max(number, self._withheld.get(model, 0))
            self._exchange.changed.notify()

    def version_changed(self, model: str) -> None:
        """Schedule a check whether a model's offer is over, because the state of one of its versions has changed."""
        with self._exchange.lock:
            if offer := self._exchange.offers.get(model):
                offer.look_at = 0.0
                self._exchange.changed.notify()

    def usable(self, server: str, model: str, number: int) -> Offer | None:
        """Return the offer of a version, or None while it may still come. Callers hold the exchange's lock.

        Raises:
            FailedPrecondition: NOT_OFFERED.
        """
        exchange = self._exchange
        offer = exchange.offers.get(model)
        exchange.check_attempts(server, number)
        if offer is not None and (offer.number > number or (offer.number == number and offer.ended)):
            why = offer.over if offer.number == number else f"version {offer.number} is offered"
            exchange.refuse(server, number, "offer_over", f"its offer is over: {why}")
        if offer is None or offer.number != number:
            able = any(owner.startswith(f"models/{model}/publishers/") for owner in self._memories.owners())
            if not able or number <= self._withheld.get(model, 0):
                exchange.refuse(server, number, "not_offered", "no publisher offers it")
            return None
        return offer

    def tasks(self, offer: Offer, rank: int, state: Callable[[], str]) -> Iterator[Task | Pause]:
        """Yield a rank's tasks, and pauses, until its memory may change.

        Args:
            offer: The offer.
            rank: The rank.
            state: Function that returns the state of the version.
        """
        exchange = self._exchange
        while True:
            seen = exchange.changed.count
            if rank == min(offer.ranks) and exchange.clock() >= offer.look_at:  # one rank is enough
                offer.look_at = exchange.clock() + LOOK
                self._end_if_over(offer, state())
            tasks = offer.ranks[rank][2]
            while tasks:
                task = tasks.popleft()
                if task is None:
                    return
                yield task
            yield exchange.changed.pause(seen, LOOK)

    def leave(self, offer: Offer, rank: int) -> None:
        """End an offer because one of its ranks is gone, and fail its groups. A no-op if the offer has ended."""
        exchange = self._exchange
        with exchange.lock:
            member, _, _ = offer.ranks[rank]
            if offer.ended:
                return
            for group in [group for group in exchange.groups.values() if member in group.members]:
                exchange.fail(group, "member_gone", f"rank {rank} of {member.owner} is gone")
            offer.end(f"rank {rank} of {member.owner} is gone")
            exchange.changed.notify()

    def _end_if_over(self, offer: Offer, state: str) -> None:
        """End transfers that are late, and the offer if no server needs it."""
        exchange = self._exchange
        now = exchange.clock()
        awaiting = self._awaiting(offer.model, offer.number) if state == "READY" else frozenset()
        with exchange.lock:
            exchange.end_late(offer)
            if state == "READY" and offer.ready_at is None:
                offer.ready_at = now
            offer.servers_sleep &= not awaiting
            needed = offer.servers_sleep or any(
                not exchange.is_refused(server, offer.number) for server in awaiting - offer.served
            )
            if not offer.ended and (why := self._why_over(offer, state, now, needed)):
                offer.end(why)
                exchange.changed.notify()

    def _why_over(self, offer: Offer, state: str, now: float, needed: bool) -> str:
        """Return why an offer is over; empty if it is not. Workers that wait for the begin of a transfer are waited for."""
        if state != "READY" or offer.ready_at is None:
            return "" if state == "UPLOADING" else f"version {offer.number} is {state}"
        waited, seconds = now - offer.ready_at, self._exchange.seconds
        starting = any(group.starting for group in self._exchange.groups_of(offer))
        bound = offer.wait_seconds + (seconds if offer.running or offer.turns or starting else 0.0)
        if waited > bound:
            return f"the publisher waits for {bound:g} s after READY"
        if offer.running or offer.turns or starting:
            return ""
        if not needed:
            return "no server waits for it"
        return f"not every rank offered it within {seconds:g} s after READY" if waited > seconds and not offer.complete else ""
