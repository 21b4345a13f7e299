"""Groups of ranks and workers: declared memories, and the link by which a worker joins its group."""

import itertools
import secrets
from collections.abc import Callable, Collection, Hashable

import structlog
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.piece_arrays import Pieces
from resharder.server.direct.exchange import LOOK, Exchange
from resharder.server.direct.layouts import Memories, Side
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.direct.offers import Offers
from resharder.server.direct.state import Act, Group, Link, Member, Offer, Planned
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import FailedPrecondition, ResourceNotFound

_log = structlog.get_logger("resharder.direct")


Processes = Callable[[str], dict[int, str]]
"""Function that returns the process of every worker of a server by rank, or nothing unless all are known.

Raises ResourceNotFound (SERVER_UNKNOWN).
"""


class Links:
    """Calls of members that declare their memory and join a group. Thread-safe."""

    def __init__(
        self, exchange: Exchange, offers: Offers, memories: Memories, processes: Processes, offered: OfferedVersions
    ) -> None:
        self._exchange, self._offers, self._memories = exchange, offers, memories
        self._processes, self._offered = processes, offered
        self._joined: dict[str, tuple[str, dict[int, tuple[Member, str]]]] = {}  # server -> install, workers and their memories
        self._numbers: dict[str, tuple[str, int]] = {}  # server -> model, number among the servers that follow it
        self._planning: set[str] = set()

    def declare(self, member: Member, fingerprint: str, pieces: Pieces[int], publishers: Collection[str] = ()) -> None:
        """Replace the declared layout of a member's memory, and remove all state of servers and publishers that are gone.

        `publishers`: publishers of a rank's model that are not gone.
        """
        gone = {
            owner: server
            for owner in self._memories.owners()
            if (server := owner.removeprefix("servers/")) != owner and not self._is_known(server)
        }
        self._memories.forget(gone.keys())
        self._memories.declare(member, fingerprint, pieces, publishers)
        with self._exchange.lock:
            for server in gone.values():
                self._joined.pop(server, None)
                self._numbers.pop(server, None)
                self._exchange.forget(server)

    def _is_known(self, server: str) -> bool:
        try:
            self._processes(server)
        except ResourceNotFound:
            return False
        return True

    def check_worker(self, member: Member) -> dict[int, str]:
        """Return the processes of a worker's server, by rank.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_OFFERED, if the worker is not among them.
        """
        processes = self._processes(member.owner.removeprefix("servers/"))
        if processes.get(member.rank) != member.process:
            raise FailedPrecondition("NOT_OFFERED", f"{member.owner[:200]}: not all of its workers are known yet")
        return processes

    def join(self, member: Member, memory: str, model: str, number: int, install: str, held: str | None = None) -> Waiting[Link]:
        """Return a worker's link, after all ranks and all workers of its server are present.

        Args:
            member: The worker.
            memory: Fingerprint of its declared layout.
            model: Model of the version.
            number: Number of the version.
            install: Id of the install.
            held: Group whose link the worker has, "" for none, None if unknown.

        Raises:
            FailedPrecondition: MEMORY_UNKNOWN, NOT_OFFERED.
        """
        exchange, server = self._exchange, member.owner.removeprefix("servers/")
        deadline = exchange.clock() + exchange.seconds
        with exchange.lock:
            self._memories.check(member, memory)
            current, workers = self._joined.get(server, ("", {}))
            if current != install:
                workers = {}
                self._joined[server] = install, workers
            workers[member.rank] = (member, memory)
            exchange.changed.notify()
        processes = self.check_worker(member)
        while True:
            seen = exchange.changed.count
            with exchange.lock:
                offer = self._offers.usable(server, model, number)
                there = {rank: worker.process for rank, (worker, _) in workers.items()} == processes
                if there and offer is not None and offer.complete and server not in self._planning:
                    ranks = {rank: (m, memory) for rank, (m, memory, _) in offer.ranks.items()}
                    key = (tuple(sorted(ranks.items())), tuple(sorted(workers.items())))
                    group = exchange.groups.get(server)
                    if group is not None and group.key == key and not group.error:
                        if held in (None, group.id) or member not in group.linked:
                            return group.link(member)
                        exchange.end(group, f"{member.owner}, rank {member.rank} has dropped its link")  # as after a sleep
                    self._planning.add(server)
                    place = self._number(server, model)
                    break
                if exchange.clock() > deadline:
                    exchange.refuse(server, number, "late", f"not all ranks and workers joined within {exchange.seconds:g} s")
            yield exchange.changed.pause(seen, LOOK)
        try:
            planned = self._memories.plan(ranks, workers, place)
        except (LayoutError, ValueError) as error:
            with exchange.lock:
                exchange.refuse(server, number, "layout", f"{error}")
        finally:
            with exchange.lock:
                self._planning.discard(server)
                exchange.changed.notify()
        with exchange.lock:
            return self._group(offer, server, key, planned, ranks, workers).link(member)

    def _number(self, server: str, model: str) -> int:
        """Return a server's number among the servers that follow a model, by which they divide its publisher's replicas."""
        known = self._numbers.get(server)
        if known is None or known[0] != model:
            taken = {number for other, number in self._numbers.values() if other == model}
            known = self._numbers[server] = model, next(number for number in itertools.count() if number not in taken)
        return known[1]

    def _group(self, offer: Offer, server: str, key: Hashable, planned: Planned, ranks: Side, workers: Side) -> Group:
        exchange = self._exchange
        former = exchange.groups.get(server)
        if former is not None and former.key == key and not former.error:
            return former
        if offer.ended:
            exchange.refuse(server, offer.number, "offer_over", f"its offer is over: {offer.over}")
        if former is not None:  # its ranks were not notified if their offer had ended
            exchange.end(former, former.error or "other members have taken its place")
        members = (*(ranks[rank][0] for rank in planned.senders), *(workers[rank][0] for rank in sorted(workers)))
        group = Group(secrets.token_hex(12), server, key, members, len(planned.senders), planned)
        exchange.groups[server] = group
        self._offered.set_at_once(offer.model, self._disjoint_groups(offer))
        offer.tell(group, Act.LINK, link=True)
        _log.info("direct_group", server=server, group=group.id, senders=group.senders, members=len(members))
        return group

    def _disjoint_groups(self, offer: Offer) -> int:
        """Count groups of an offer's publisher that share no rank, at least 1. Groups of earlier publishers may remain."""
        busy, found = set[Member](), 0
        for group in self._exchange.groups.values():
            if not group.error and group.members[0].owner == offer.publisher and busy.isdisjoint(group.ranks):
                busy |= group.ranks
                found += 1
        return max(1, found)
