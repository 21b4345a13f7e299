"""Transfers of a group: start when every worker is ready and the ranks are idle, finish, verification ahead of READY."""

from collections.abc import Sequence

import numpy as np
from resharder.server.direct.digest_sums import held_by, sent_count
from resharder.server.direct.exchange import LOOK, Exchange
from resharder.server.direct.state import Group, Member, Offer
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import FailedPrecondition, InvalidArgument


class Transfers:
    """Calls of members during a transfer. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def start(self, member: Member, id: str, install: str) -> Waiting[None]:
        """Return once the transfer of a worker's group has begun.

        Raises FailedPrecondition (NOT_OFFERED), InvalidArgument (WORKER).
        """
        exchange = self._exchange
        with exchange.lock:
            group = self._group_of_worker(member, id)
            if group.install != install:
                group.install, group.started, group.finished, group.received = install, set(), set(), 0
            offer, deadline = exchange.offer_of(group), exchange.clock() + exchange.seconds
            group.started.add(member.rank)
            if len(group.started) == len(group.members) - group.senders:
                offer.turns.append(group)
                exchange.start_next(offer)
        try:
            while True:
                seen = exchange.changed.count
                with exchange.lock:
                    if group.granted == install:
                        return
                    self._check_offered(group, offer)
                    if group not in offer.turns and exchange.clock() > deadline:
                        exchange.fail(group, "late", f"not every worker was ready within {exchange.seconds:g} s")
                    exchange.end_late(offer)  # in case no rank asks for its tasks
                yield exchange.changed.pause(seen, LOOK)
        finally:
            with exchange.lock:
                if group.install == install and group.granted != install:
                    group.started.discard(member.rank)  # the offer does not wait for a worker that has left

    def finish(self, member: Member, id: str, ok: bool, error: str, size_bytes: int) -> None:
        """Record that a member has finished, or failed with `error`.

        `size_bytes` counts the bytes that a worker received; it is ignored for ranks. Raises FailedPrecondition (NOT_OFFERED),
        InvalidArgument (WORKER).
        """
        exchange = self._exchange
        with exchange.lock:
            group = exchange.group(id)
            if member not in group.members:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a member of group {id}")
            if not ok:
                exchange.fail(group, "member_failed", f"{member.owner}, rank {member.rank}: {error[:500]}")
                return
            group.finished.add(member)
            group.received += size_bytes if member in group.members[group.senders :] else 0
            offer = exchange.offers.get(group.members[0].owner.split("/")[1])
            if len(group.finished) == len(group.members) and offer is not None and id in offer.running:
                exchange.succeed(group, offer)

    def digests(self, member: Member, id: str, number: int) -> Waiting[list[int]]:
        """Return the digest of every box of a worker's memory, derived from the digests that the ranks report.

        Raises:
            FailedPrecondition: NOT_OFFERED.
            InvalidArgument: WORKER.
        """
        exchange = self._exchange
        with exchange.lock:
            group = self._group_of_worker(member, id)
            offer, deadline = exchange.offer_of(group), exchange.clock() + exchange.seconds
            if offer.number != number:
                raise FailedPrecondition("NOT_OFFERED", f"version {number}: its offer is over: version {offer.number} is offered")
            group.verifies_ahead = True
            if group.reported_of != number:
                offer.ask(group)
        while True:
            seen = exchange.changed.count
            with exchange.lock:
                if len(group.reported) >= group.senders and group.reported_of == number:
                    reported, target = dict(group.reported), group.members.index(member) - group.senders
                    break
                self._check_offered(group, offer)
                if group.reported_of != number:
                    exchange.refuse(group.server, number, "offer_over", f"digests of version {group.reported_of} are asked for")
                if exchange.clock() > deadline:
                    exchange.fail(group, "late", f"not every rank reported its digests within {exchange.seconds:g} s")
            yield exchange.changed.pause(seen, LOOK)
        return held_by(group.planned.plan, target, reported)

    def report(self, member: Member, id: str, number: int, digests: Sequence[int]) -> None:
        """Record a rank's digests of the boxes that it sends, in the plan's order.

        Raises FailedPrecondition (NOT_OFFERED), InvalidArgument (WORKER, DIGESTS).
        """
        exchange = self._exchange
        with exchange.lock:
            group = exchange.group(id)
            if member not in group.members[: group.senders]:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a sender of group {id}")
            expected = sent_count(group.planned.plan, member.rank)
            if len(digests) != expected:
                raise InvalidArgument("DIGESTS", f"rank {member.rank} sends {expected} boxes, got {len(digests)} digests")
            if group.reported_of == number:
                group.reported[member.rank] = np.array(digests, np.uint64)
                exchange.changed.notify()

    def _check_offered(self, group: Group, offer: Offer) -> None:
        """Raise FailedPrecondition (NOT_OFFERED) if not all workers of a group will receive a version."""
        exchange = self._exchange
        if group.error or offer.ended:
            exchange.refuse(group.server, offer.number, "offer_over", group.error or f"its offer is over: {offer.over}")
        if exchange.is_refused(group.server, offer.number):  # the others must not wait, with their server paused
            exchange.refuse(group.server, offer.number, "late", "another worker takes that path")

    def _group_of_worker(self, member: Member, id: str) -> Group:
        group = self._exchange.group(id)
        if member not in group.members[group.senders :]:
            raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a worker of group {id}")
        return group
