"""Coordination of the direct path: which ranks send to which servers, and when. `plans.py` plans the copies.

An *offer* is a version that the ranks of a publisher still have in memory. A *group* is one server's workers and the ranks that
send to them, planned once and reused from version to version while its processes live. A *turn* is one group's transfer: a rank
sends to one group at a time, so that it needs the buffers of one transfer only. Groups with disjoint ranks, such as those of
different replicas, transfer concurrently.

    worker: join (staging) ... [announces] ....... start (paused) - turn - receives - [digests] - finish
    rank:   offer ... LINK: joins the group ... [DIGEST] ... RUN: sends - [reports] - finish ... end: memory may change

The parts in brackets are for a version that is served ahead of READY: a worker verifies it against the digests that the ranks
report, which compute them while the boxes travel. Workers of a release without this ask for them while they stage.

Installs are not decided here: `awaiting` names the servers that an offer is for. Any failure ends the group, and the server's
install continues over the staged path.

By default, servers on other hosts than the ranks take versions over a *proven* group only. It is made while a version is offered
that these servers take over the staged path, and its members try it:

    worker: meet ............ tries the link - meet again, with the seconds that a version would take
    rank:   offer ... LINK: joins the group, tries the link
"""

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Literal, NoReturn

import numpy as np
import structlog
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.piece_arrays import Pieces
from resharder.converters.signal import Signal
from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.direct.plans import PLAIN, Declared, Member, Planned, Plans, Side
from resharder.server.direct.state import Group, Link, Offer, Task
from resharder.server.infra.backoff import backoff
from resharder.server.infra.change_signal import ChangeSignal, Pause, Waiting
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ResourceNotFound
from resharder.server.state.server import Reach
from resharder.v1 import direct_pb2

_LOOK = 0.25  # longest pause of a waiting call, in seconds
_PAUSE, _LONGEST_PAUSE = 30.0, 600.0  # seconds without an attempt after the second failure in a row; doubles with each
_LONGEST_TRANSFER = 1.0  # seconds: servers on other hosts take versions directly by default if it takes no longer, for they pause
_ANY = 1 << 62  # stands for the number of the next version
_KEYS, _KEY_BYTES, _ALL_KEYS_BYTES = 4096, 1 << 16, 16 << 20
_log = structlog.get_logger("resharder.direct")

Cause = Literal["not_offered", "offer_over", "layout", "late", "member_gone", "member_failed"]
"""Reason for which a server takes a version over the staged path."""
Awaiting = Callable[[str, int], frozenset[str]]
"""Function of a model and a version's number that returns the servers that install it next and can receive it directly."""
Taking = Callable[[str, int, Reach], frozenset[str]]
"""Function of a model, a version's number and whom it reaches that returns the servers that would take it before READY."""
Hosts = Callable[[str], frozenset[str]]
"""Function that returns the hosts of a server's workers. Raises ResourceNotFound (SERVER_UNKNOWN)."""
ModelOf = Callable[[str], str]
"""Function that returns the model of a server, or an empty name for an unknown one."""
Processes = Callable[[str], dict[int, str]]
"""Function that returns the process of every worker of a server by rank, or nothing unless all are known.

Raises ResourceNotFound (SERVER_UNKNOWN).
"""


class Direct:
    """Offers by model and groups by server, under one lock. Thread-safe.

    Lock order: the lock is taken after all others, except that of the plans. The fleets are called without it.

    Attributes:
        staging_bytes: Memory beyond the weights that each member may use.
        seconds: Bound on the set-up of a group, and on one transfer.
        open_network: Whether members may use sockets that authenticate nobody without being asked to: between hosts by
            default, and NIXL's.

    Args:
        awaiting: Servers that an offer is for.
        processes: Processes of a server.
        taking: Servers that an offer is for which is `ahead_only`.
        hosts: Hosts of a server.
        model_of: Model of a server.
        offered: Table of offered versions for readers outside.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        awaiting: Awaiting,
        processes: Processes,
        *,
        taking: Taking = lambda model, number, reach: frozenset(),
        hosts: Hosts = lambda server: frozenset(),
        model_of: ModelOf = lambda server: "",
        offered: OfferedVersions | None = None,
        staging_bytes: int = 1 << 30,
        seconds: float = 10.0,
        open_network: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging_bytes, self.seconds, self.open_network = staging_bytes, seconds, open_network
        self._awaiting, self._processes, self._clock = awaiting, processes, clock
        self._taking, self._hosts, self._model_of = taking, hosts, model_of
        self._offered_versions = offered or OfferedVersions()
        self._plans = Plans()
        self._lock, self._changed = threading.RLock(), ChangeSignal()
        self.transferred: Signal[float, Cause | None] = Signal()  # seconds, or why a version falls back to the staged path
        self._offers: dict[str, Offer] = {}  # the newest of each model
        self._groups: dict[str, Group] = {}  # by server
        self._withheld: dict[str, int] = {}  # the newest version of each model that no rank offers
        self._joined: dict[str, tuple[str, dict[int, tuple[Member, str]]]] = {}  # server -> install, workers and their memories
        self._meeting: dict[str, tuple[str, dict[int, tuple[Member, str]]]] = {}  # server -> model, workers that wait for a link
        self._unlinked: dict[str, str] = {}  # server -> why its last group has failed
        self._numbers: dict[str, tuple[str, int]] = {}  # server -> model, number among the servers that follow it
        self._planning: set[str] = set()
        self._refused: dict[str, int] = {}  # server -> version that it takes over the staged path
        self._missed: frozenset[str] = frozenset()  # servers that no rank is held for: waited for in vain, they never came since
        self._failures: dict[str, tuple[int, float]] = {}  # server -> failures in a row, time of the next attempt

    # Layouts

    def declare(
        self, member: Member, fingerprint: str, pieces: Pieces[int], publishers: Collection[str] = (), declared: Declared = PLAIN
    ) -> None:
        """Replace the declared layout of a member's memory, and remove all state of servers and publishers that are gone.

        `publishers`: publishers of a rank's model that are not gone.
        """
        gone = {
            owner: server
            for owner in self._plans.owners()
            if (server := owner.removeprefix("servers/")) != owner and not self._is_known(server)
        }
        self._plans.forget(gone.keys())
        self._plans.declare(member, fingerprint, pieces, publishers, declared)
        with self._lock:
            for server in gone.values():
                self._joined.pop(server, None)
                self._numbers.pop(server, None)
                self._forget(server)

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

    # Offers of ranks

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
        ahead_only: bool = False,
        host: str = "",
        elsewhere: bool = False,
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
            ahead_only: The offer is for servers that take the version before it is READY. It ends as soon as none is left, or
                `wait_seconds` after the first rank has sealed its slot.
            host: The rank's host, if the offer is not for all servers but for those there.
            elsewhere: Whether it is also for servers on other hosts that are linked to the ranks. They are then on any hosts.

        Raises:
            FailedPrecondition: MEMORY_UNKNOWN; NOT_OFFERED after the offer of a later version.
        """
        with self._lock:
            self._plans.check(member, memory)
            offer = self._offers.get(model)
            if offer is None or offer.publisher != member.owner or offer.number < number:
                if offer is not None:
                    offer.end(f"version {number} is offered by {member.owner}")
                offer = self._offers[model] = Offer(model, number, member.owner, world_size, wait_seconds, self._changed)
                offer.ahead_only, offer.elsewhere, offer.hosts = ahead_only, elsewhere, {host} - {""}
            if offer.number == number:
                same = (offer.ahead_only, offer.elsewhere, bool(offer.hosts)) == (ahead_only, elsewhere, bool(host))
                if not same or not (elsewhere or offer.hosts <= {host}):
                    offer.end("its ranks are on different hosts")
                offer.hosts |= {host} - {""}
            if offer.number > number or offer.ended:
                why = offer.over if offer.number == number else f"version {offer.number} is offered"
                raise FailedPrecondition("NOT_OFFERED", f"version {number} of {model}: its offer is over: {why}")
            offer.wait_seconds = min(offer.wait_seconds, wait_seconds)
            offer.servers_sleep |= servers_sleep
            offer.ranks[member.rank] = (member, memory, deque())
            if offer.complete and not offer.ended:
                self._offered_versions.add(model, number, self._reach(offer))
            self._changed.emit()
            return offer

    def withhold(self, model: str, number: int) -> None:
        """Declare that no rank will offer a version, nor an earlier one that is not offered yet."""
        with self._lock:
            self._withheld[model] = max(number, self._withheld.get(model, 0))
            self._changed.emit()

    def version_changed(self, model: str) -> None:
        """Schedule a check whether a model's offer is over, because the state of one of its versions has changed."""
        with self._lock:
            if offer := self._offers.get(model):
                offer.look_at = 0.0
                self._changed.emit()

    def _usable(self, server: str, model: str, number: int, hosts: frozenset[str]) -> Offer | None:
        """Return the offer of a version to a server on `hosts`, or None while it may still come. The lock is held.

        Raises:
            FailedPrecondition: NOT_OFFERED.
        """
        offer = self._offers.get(model)
        self._check_attempts(server, number)
        if offer is not None and (offer.number > number or (offer.number == number and offer.ended)):
            why = offer.over if offer.number == number else f"version {offer.number} is offered"
            self._refuse(server, number, "offer_over", f"its offer is over: {why}")
        if offer is None or offer.number != number:
            able = any(owner.startswith(f"models/{model}/publishers/") for owner in self._plans.owners())
            if not able or number <= self._withheld.get(model, 0):
                self._refuse(server, number, "not_offered", "no publisher offers it")
            return None
        reach = self._reach(offer)
        if reach.hosts and hosts != reach.hosts:
            why = "its publisher offers it to servers on the trainer's host alone"
            if reach.links is not None:
                why = reach.links.get(server, reach.unlinked)
            if why:
                self._refuse(server, number, "not_offered", why)
        return offer

    def _reach(self, offer: Offer) -> Reach:
        """Return to whom a version is offered. The lock is held."""
        if not offer.elsewhere:
            return Reach(frozenset(offer.hosts))
        if not self.open_network:
            return Reach(frozenset(offer.hosts), {}, "the daemon has security, and not direct_trusted_fabric")
        links = dict(self._unlinked)
        for group in self._groups_of(offer):
            known = [offer.ranks[member.rank][0] for member in group.ranks if member.rank in offer.ranks]
            if group.trial and not group.error:
                proven = group.proven and group.ranks.issuperset(known)
                links[group.server] = "" if proven else "its link to the ranks is being tried"
        return Reach(frozenset(offer.hosts), links)

    def tasks(
        self, offer: Offer, rank: int, state: Callable[[], str], sealed: Callable[[], bool] = lambda: False
    ) -> Iterator[Task | Pause]:
        """Yield a rank's tasks, and pauses, until its memory may change.

        Args:
            offer: The offer.
            rank: The rank.
            state: Function that returns the state of the version.
            sealed: Function that returns whether a rank has sealed its slot.
        """
        while True:
            seen = self._changed.count
            if rank == min(offer.ranks) and self._clock() >= offer.look_at:  # one rank is enough
                offer.look_at = self._clock() + _LOOK
                self._end_if_over(offer, state(), sealed)
            tasks = offer.ranks[rank][2]
            while tasks:
                task = tasks.popleft()
                if task is None:
                    return
                yield task
            yield self._changed.pause(seen, _LOOK)

    def leave(self, offer: Offer, rank: int) -> None:
        """End an offer because one of its ranks is gone, and fail its groups. A no-op if the offer has ended."""
        with self._lock:
            member, _, _ = offer.ranks[rank]
            if offer.ended:
                return
            for group in [group for group in self._groups.values() if member in group.members]:
                self._fail(group, "member_gone", f"rank {rank} of {member.owner} is gone")
            offer.end(f"rank {rank} of {member.owner} is gone")
            self._changed.emit()

    def _end_if_over(self, offer: Offer, state: str, sealed: Callable[[], bool]) -> None:
        """End transfers that are late, and the offer if no server needs it."""
        if offer.ahead_only and not offer.servers_sleep:
            self._end_ahead_if_over(offer, state, state == "READY" or sealed())
            return
        now = self._clock()
        awaiting = self._awaiting(offer.model, offer.number) if state == "READY" else frozenset()
        with self._lock:
            self._end_late(offer)
            if state == "READY" and offer.ready_at is None:
                offer.ready_at = now
            offer.servers_sleep &= not awaiting
            needed = offer.servers_sleep or any(not self._is_refused(server, offer.number) for server in awaiting - offer.served)
            if not offer.ended and (why := self._why_over(offer, state, now, needed)):
                offer.end(why)
                self._changed.emit()

    def _end_ahead_if_over(self, offer: Offer, state: str, sealed: bool) -> None:
        """End transfers that are late, and an offer to servers that take it before READY once none of them needs it."""
        with self._lock:
            reach = self._reach(offer)
        now, taking = self._clock(), self._taking(offer.model, offer.number, reach)
        with self._lock:
            self._end_late(offer)
            if sealed and offer.held_since is None:
                offer.held_since = now
            if offer.ended:
                return
            missed = self._missed if offer.held_since is not None else frozenset()
            needing = {server for server in taking - offer.served - missed if self._may_try(server, offer.number)}
            busy = offer.running or offer.turns or any(group.starting for group in self._groups_of(offer))
            bound = offer.wait_seconds + (self.seconds if busy else 0.0)
            if state not in ("UPLOADING", "READY"):
                offer.end(f"version {offer.number} is {state}")
            elif not needing and not busy and (sealed or not self._meets(offer)):
                offer.end("no server takes it before it is READY")
            elif offer.held_since is not None and now - offer.held_since > bound:
                offer.end(f"the publisher waits for {bound:g} s after its delivery")
                self._missed = self._missed | (needing - offer.joined)
            if offer.ended:
                self._changed.emit()

    def _why_over(self, offer: Offer, state: str, now: float, needed: bool) -> str:
        """Return why an offer is over; empty if it is not. Workers that wait for the begin of a transfer are waited for."""
        if state != "READY" or offer.ready_at is None:
            return "" if state == "UPLOADING" else f"version {offer.number} is {state}"
        waited, seconds = now - offer.ready_at, self.seconds
        starting = any(group.starting for group in self._groups_of(offer))
        bound = offer.wait_seconds + (seconds if offer.running or offer.turns or starting else 0.0)
        if waited > bound:
            return f"the publisher waits for {bound:g} s after READY"
        if offer.running or offer.turns or starting:
            return ""
        if not needed:
            return "no server waits for it"
        return f"not every rank offered it within {seconds:g} s after READY" if waited > seconds and not offer.complete else ""

    # Groups, which workers join

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
        server = member.owner.removeprefix("servers/")
        deadline = self._clock() + self.seconds
        with self._lock:
            self._plans.check(member, memory)
            current, workers = self._joined.get(server, ("", {}))
            if current != install:
                workers = {}
                self._joined[server] = install, workers
            workers[member.rank] = (member, memory)
            self._missed -= {server}
            self._changed.emit()
        processes, hosts = self.check_worker(member), self._hosts(server)
        while True:
            seen = self._changed.count
            with self._lock:
                offer = self._usable(server, model, number, hosts)
                if offer is not None:
                    offer.joined.add(server)
                there = {rank: worker.process for rank, (worker, _) in workers.items()} == processes
                if there and offer is not None and offer.complete and server not in self._planning:
                    ranks = {rank: (m, memory) for rank, (m, memory, _) in offer.ranks.items()}
                    key = (tuple(sorted(ranks.items())), tuple(sorted(workers.items())))
                    group = self._groups.get(server)
                    if group is not None and group.key == key and not group.error:
                        if held in (None, group.id) or member not in group.linked:
                            return group.link(member)
                        self._end(group, f"{member.owner}, rank {member.rank} has dropped its link")  # as after a sleep
                    if offer.hosts and offer.hosts != hosts:
                        self._refuse(server, number, "not_offered", "its link to the ranks has to be tried again")
                    self._planning.add(server)
                    break
                if self._clock() > deadline:
                    self._refuse(server, number, "late", f"not all ranks and workers joined within {self.seconds:g} s")
            yield self._changed.pause(seen, _LOOK)
        return self._make_group(offer, server, key, ranks, workers, member, trial=False)

    def meet(self, member: Member, memory: str, held: str, seconds: float) -> Waiting[Link | None]:
        """Return the link of a worker to ranks on other hosts, outside of an install; None if it has none.

        Waits for the ranks' next offer if a link is to be tried.

        Args:
            member: The worker.
            memory: Fingerprint of its declared layout.
            held: Group whose link the worker has, "" for none.
            seconds: Seconds that a version would take over it; 0 if that is not known.

        Raises:
            FailedPrecondition: MEMORY_UNKNOWN, NOT_OFFERED.
        """
        server, deadline = member.owner.removeprefix("servers/"), self._clock() + self.seconds
        self._plans.check(member, memory)
        processes, hosts, model = self.check_worker(member), self._hosts(server), self._model_of(server)
        with self._lock:
            self._note_trial(member, held, seconds)
        publisher = self._publisher_to_try(server, model, hosts)
        try:
            while True:
                seen = self._changed.count
                with self._lock:
                    group, offer = self._groups.get(server), self._offers.get(model)
                    if group is not None and self._holds(group, member, publisher):
                        if held == group.id or (group.trial and member not in group.linked):
                            return group.link(member)
                        if group.trial:
                            self._end(group, f"{member.owner}, rank {member.rank} has dropped its link")
                    if not publisher or self._clock() > deadline:
                        return None
                    _, workers = self._meeting.setdefault(server, (model, {}))
                    workers[member.rank] = (member, memory)
                    there = {rank: worker.process for rank, (worker, _) in workers.items()} == processes
                    usable = offer is not None and offer.publisher == publisher and offer.elsewhere and not offer.ended
                    if there and offer is not None and usable and offer.complete and server not in self._planning:
                        ranks = {rank: (m, known) for rank, (m, known, _) in offer.ranks.items()}
                        workers = dict(workers)
                        key = (tuple(sorted(ranks.items())), tuple(sorted(workers.items())))
                        self._planning.add(server)
                        break
                yield self._changed.pause(seen, _LOOK)
            return self._make_group(offer, server, key, ranks, workers, member, trial=True)
        finally:
            with self._lock:
                _, waiting = self._meeting.get(server, ("", {}))
                if waiting.get(member.rank) == (member, memory):
                    del waiting[member.rank]
                if not waiting:
                    self._meeting.pop(server, None)

    def _holds(self, group: Group, member: Member, publisher: str) -> bool:
        """Return whether a group is of this worker and of ranks that may offer versions: of `publisher`, if there is one."""
        owner = group.members[0].owner
        return not group.error and member in group.members and publisher in ("", owner) and self._plans.current(group.members)

    def _publisher_to_try(self, server: str, model: str, hosts: frozenset[str]) -> str:
        """Return the publisher to whose ranks a server's link is to be tried; empty if there is none."""
        publisher, elsewhere = self._plans.offering_elsewhere(model)
        if not self.open_network or not elsewhere or hosts == elsewhere or not self._may_try(server, 0):
            return ""
        return publisher if server in self._taking(model, _ANY, Reach()) else ""

    def _note_trial(self, member: Member, held: str, seconds: float) -> None:
        """Record how long a version would take over a worker's link. The lock is held."""
        group = next((group for group in self._groups.values() if group.id == held and group.trial and not group.error), None)
        if group is None or member not in group.members[group.senders :] or not seconds > 0:
            return
        if seconds > _LONGEST_TRANSFER:
            why = f"a version would take {seconds:.1f} s over its link to the ranks, longer than {_LONGEST_TRANSFER:g} s"
            self._fail(group, "late", why)
        elif member.rank not in group.tried:
            group.tried[member.rank] = seconds
            if group.proven:
                self._unlinked.pop(group.server, None)
                _log.info("direct_linked", server=group.server, group=group.id, seconds=max(group.tried.values()))

    def _meets(self, offer: Offer) -> bool:
        """Return whether workers wait for a link to an offer's ranks. The lock is held."""
        return any(model == offer.model for model, _ in self._meeting.values())

    def _make_group(
        self, offer: Offer, server: str, key: Hashable, ranks: Side, workers: Side, member: Member, *, trial: bool
    ) -> Link:
        """Plan a group, without the lock, and return a worker's link to it. Raises FailedPrecondition (NOT_OFFERED)."""
        with self._lock:
            place = self._number(server, offer.model)
        try:
            planned = self._plans.plan(ranks, workers, place)
        except (LayoutError, ValueError) as error:
            with self._lock:
                self._refuse(server, offer.number, "layout", f"{error}")
        finally:
            with self._lock:
                self._planning.discard(server)
                self._changed.emit()
        with self._lock:
            return self._new_group(offer, server, key, planned, ranks, workers, trial=trial).link(member)

    def _number(self, server: str, model: str) -> int:
        """Return a server's number among the servers that follow a model, by which they divide its publisher's replicas."""
        known = self._numbers.get(server)
        if known is None or known[0] != model:
            taken = {number for other, number in self._numbers.values() if other == model}
            known = self._numbers[server] = model, next(number for number in itertools.count() if number not in taken)
        return known[1]

    def _new_group(
        self, offer: Offer, server: str, key: Hashable, planned: Planned, ranks: Side, workers: Side, *, trial: bool
    ) -> Group:
        former = self._groups.get(server)
        if former is not None and former.key == key and not former.error:
            return former
        if offer.ended:
            self._refuse(server, offer.number, "offer_over", f"its offer is over: {offer.over}")
        if former is not None:  # its ranks were not notified if their offer had ended
            self._end(former, former.error or "other members have taken its place")
        members = (*(ranks[rank][0] for rank in planned.senders), *(workers[rank][0] for rank in sorted(workers)))
        group = Group(secrets.token_hex(12), server, key, members, len(planned.senders), planned, trial=trial)
        self._groups[server] = group
        self._offered_versions.set_at_once(offer.model, self._disjoint_groups(offer))
        offer.queue_task(group, direct_pb2.DirectTask.LINK, link=True)
        _log.info("direct_group", server=server, group=group.id, senders=group.senders, members=len(members))
        return group

    def _disjoint_groups(self, offer: Offer) -> int:
        """Count groups of an offer's publisher that share no rank, at least 1. Groups of earlier publishers may remain."""
        busy, found = set[Member](), 0
        for group in self._groups.values():
            if not group.error and group.members[0].owner == offer.publisher and busy.isdisjoint(group.ranks):
                busy |= group.ranks
                found += 1
        return max(1, found)

    # Transfers

    def start(self, member: Member, id: str, install: str, *, kept: bool = False) -> Waiting[bool]:
        """Return once the transfer of a worker's group has begun, and whether it leaves out frozen boxes.

        It does if all workers of the server have them: `kept`.

        Raises FailedPrecondition (NOT_OFFERED), InvalidArgument (WORKER).
        """
        with self._lock:
            group = self._group_of_worker(member, id)
            if group.install != install:
                group.install, group.started, group.finished, group.received = install, set(), set(), 0
                group.keeping, group.kept = set(), False
            offer, deadline = self._offer_of(group), self._clock() + self.seconds
            group.started.add(member.rank)
            group.keeping |= {member.rank} if kept and group.planned.frozen else set()
            if len(group.started) == len(group.members) - group.senders:
                offer.turns.append(group)
                self._start_next(offer)
        try:
            while True:
                seen = self._changed.count
                with self._lock:
                    if group.granted == install:
                        return group.kept
                    self._check_offered(group, offer)
                    if group not in offer.turns and self._clock() > deadline:
                        self._fail(group, "late", f"not every worker was ready within {self.seconds:g} s")
                    self._end_late(offer)  # in case no rank asks for its tasks
                yield self._changed.pause(seen, _LOOK)
        finally:
            with self._lock:
                if group.install == install and group.granted != install:
                    group.keeping.discard(member.rank)
                    group.started.discard(member.rank)  # the offer does not wait for a worker that has left

    def finish(self, member: Member, id: str, ok: bool, error: str, size_bytes: int) -> None:
        """Record that a member has finished, or failed with `error`.

        `size_bytes` counts the bytes that a worker received; it is ignored for ranks. Raises FailedPrecondition (NOT_OFFERED),
        InvalidArgument (WORKER).
        """
        with self._lock:
            group = self._group(id)
            if member not in group.members:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a member of group {id}")
            if not ok:
                self._fail(group, "member_failed", f"{member.owner}, rank {member.rank}: {error[:500]}")
                return
            group.finished.add(member)
            group.received += size_bytes if member in group.members[group.senders :] else 0
            offer = self._offers.get(group.members[0].owner.split("/")[1])
            if len(group.finished) == len(group.members) and offer is not None and id in offer.running:
                self._succeed(group, offer)

    def digests(
        self, member: Member, id: str, number: int, *, during_transfer: bool = False, frozen: bool = False
    ) -> Waiting[list[int]]:
        """Return the digest of every box of a worker's memory, derived from the digests that the ranks report.

        With `during_transfer`, have the ranks report them during the next transfer, and return nothing unless they have. With
        `frozen`, return those of frozen boxes alone.

        Raises:
            FailedPrecondition: NOT_OFFERED.
            InvalidArgument: WORKER.
        """
        with self._lock:
            group = self._group_of_worker(member, id)
            offer, deadline = self._offer_of(group), self._clock() + self.seconds
            if offer.number != number:
                raise FailedPrecondition("NOT_OFFERED", f"version {number}: its offer is over: version {offer.number} is offered")
            if group.reports[frozen].of != number:
                offer.queue_digests(group, during_transfer=during_transfer, frozen=frozen)
        while True:
            seen = self._changed.count
            with self._lock:
                reports = group.reports[frozen]
                if len(reports.found) >= group.senders and reports.of == number:
                    reported, target = dict(reports.found), group.members.index(member) - group.senders
                    break
                self._check_offered(group, offer)
                if during_transfer:
                    return []
                if reports.of != number:
                    self._refuse(group.server, number, "offer_over", f"digests of version {reports.of} are asked for")
                if self._clock() > deadline:
                    self._fail(group, "late", f"not every rank reported its digests within {self.seconds:g} s")
            yield self._changed.pause(seen, _LOOK)
        return group.planned.held_by(target, reported, frozen=frozen)

    def report(self, member: Member, id: str, number: int, digests: Sequence[int], *, frozen: bool = False) -> None:
        """Record a rank's digests of the boxes that it sends, or of frozen ones alone, in the plan's order.

        Raises FailedPrecondition (NOT_OFFERED), InvalidArgument (WORKER, DIGESTS).
        """
        with self._lock:
            group = self._group(id)
            if member not in group.members[: group.senders]:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a sender of group {id}")
            expected = group.planned.sent_count(member.rank, frozen=frozen)
            if len(digests) != expected:
                raise InvalidArgument("DIGESTS", f"rank {member.rank} sends {expected} boxes, got {len(digests)} digests")
            if group.reports[frozen].of == number:
                group.reports[frozen].found[member.rank] = np.array(digests, np.uint64)
                self._changed.emit()

    def _check_offered(self, group: Group, offer: Offer) -> None:
        """Raise FailedPrecondition (NOT_OFFERED) if not all workers of a group will receive a version."""
        if group.error or offer.ended:
            self._refuse(group.server, offer.number, "offer_over", group.error or f"its offer is over: {offer.over}")
        if self._is_refused(group.server, offer.number):  # the others must not wait, with their server paused
            self._refuse(group.server, offer.number, "late", "another worker takes that path")

    def _group_of_worker(self, member: Member, id: str) -> Group:
        group = self._group(id)
        if member not in group.members[group.senders :]:
            raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a worker of group {id}")
        return group

    # Keys of a group, by which its members form communicators as `torch.distributed` does

    def set_key(self, id: str, key: str, value: bytes) -> None:
        """Set a key of a group. Raises FailedPrecondition (NOT_OFFERED), ResourceExhausted (TOO_MANY_KEYS)."""
        with self._lock:
            group = self._group(id)
            others = [len(known) for name, known in group.keys.items() if name != key]
            large = len(value) > _KEY_BYTES or len(key) > 1024
            if large or len(others) >= _KEYS or sum(others) + len(value) > _ALL_KEYS_BYTES:
                raise ResourceExhausted(
                    "TOO_MANY_KEYS",
                    f"expected at most {_KEYS} keys of {_KEY_BYTES} bytes, {_ALL_KEYS_BYTES} in all, got {len(value)} bytes more "
                    f"of group {id}",
                )
            group.keys[key] = value
            self._changed.emit()

    def get_key(self, id: str, key: str, wait_seconds: float) -> Waiting[bytes | None]:
        """Return the value of a key; None if it is not set in time.

        Raises FailedPrecondition (NOT_OFFERED) after the group's end.
        """
        deadline = self._clock() + wait_seconds
        while True:
            seen = self._changed.count
            with self._lock:
                group = self._group(id)
                if group.error:
                    raise FailedPrecondition("NOT_OFFERED", f"group {id} is over: {group.error}")
                left = deadline - self._clock()
                if key in group.keys or left <= 0:
                    return group.keys.get(key)
            yield self._changed.pause(seen, min(left, 1.0))

    # Below, the lock is held

    def _group(self, id: str) -> Group:
        """Return a group by its id. Raises FailedPrecondition (NOT_OFFERED)."""
        group = next((group for group in self._groups.values() if group.id == id), None)
        if group is None:
            raise FailedPrecondition("NOT_OFFERED", f"group {id[:64]} is over")
        return group

    def _offer_of(self, group: Group) -> Offer:
        """Return the current offer of a group's ranks. Raises FailedPrecondition (NOT_OFFERED)."""
        offer = next(iter(self._offers_to(group)), None)
        if offer is None or offer.ended:
            why = f": {offer.over}" if offer is not None else ""
            raise FailedPrecondition("NOT_OFFERED", f"group {group.id}: the offer of its version is over{why}")
        return offer

    def _offers_to(self, group: Group) -> list[Offer]:
        return [offer for offer in self._offers.values() if offer.publisher == group.members[0].owner]

    def _groups_of(self, offer: Offer) -> list[Group]:
        """Return the groups of an offer's publisher."""
        return [group for group in self._groups.values() if group.members[0].owner == offer.publisher]

    def _is_refused(self, server: str, number: int) -> bool:
        """Return whether a server takes a version over the staged path."""
        return self._refused.get(server) == number

    def _check_attempts(self, server: str, number: int) -> None:
        """Raise FailedPrecondition (NOT_OFFERED) if a transfer to a server has failed and is not due again."""
        if self._is_refused(server, number):
            self._refuse(server, number, "member_failed", "it has failed before")
        failures, again = self._failures.get(server, (0, 0.0))
        if (left := again - self._clock()) > 0:
            why = f"{failures} transfers in a row failed; the next is due in {left:.0f} s"
            self._refuse(server, number, "member_failed", why)

    def _may_try(self, server: str, number: int) -> bool:
        """Return whether a server does not take a version over the staged path after failures."""
        return not self._is_refused(server, number) and self._failures.get(server, (0, 0.0))[1] <= self._clock()

    def _refuse(self, server: str, number: int, cause: Cause, why: str) -> NoReturn:
        """Make a server take a version over the staged path, and raise FailedPrecondition (NOT_OFFERED)."""
        self._give_up(server, number, cause)
        self._changed.emit()
        raise FailedPrecondition("NOT_OFFERED", f"version {number} goes to server {server} over the staged path: {why}")

    def _give_up(self, server: str, number: int, cause: Cause) -> None:
        if not self._is_refused(server, number):  # observed once, however many workers call
            self._refused[server] = number
            self.transferred.emit(0.0, cause)

    def _start_next(self, offer: Offer) -> None:
        """Start the queued transfers whose ranks are idle."""
        for group in list(offer.turns):
            if not group.error and not offer.has_room(group):
                continue
            offer.turns.remove(group)
            if not group.error:
                offer.running[group.id] = group
                group.granted, group.began = group.install, self._clock()
                group.kept = len(group.keeping) == len(group.members) - group.senders
                offer.queue_task(group, direct_pb2.DirectTask.RUN)
                _log.info("direct_turn", server=group.server, version=offer.number, group=group.id)
                self._changed.emit()

    def _succeed(self, group: Group, offer: Offer) -> None:
        """End a transfer that every member has finished."""
        del offer.running[group.id]
        took = self._clock() - group.began
        _log.info(
            "direct_transfer",
            server=group.server,
            version=offer.number,
            group=group.id,
            seconds=took,
            size_bytes=group.received,
        )
        self.transferred.emit(took, None)
        self._failures.pop(group.server, None)
        offer.served.add(group.server)
        offer.look_at = 0.0
        self._start_next(offer)
        self._changed.emit()

    def _fail(self, group: Group, cause: Cause, why: str) -> None:
        """End a group after a failure, which delays further attempts of its server. A no-op for a group that has ended."""
        if group.error:
            return
        count = self._failures.get(group.server, (0, 0.0))[0] + 1
        self._failures[group.server] = count, self._clock() + backoff(count - 1, _PAUSE, _LONGEST_PAUSE)
        self._unlinked[group.server] = why
        _log.warning("direct_failed", server=group.server, group=group.id, reason=why)
        for offer in self._offers_to(group):
            if not offer.ended:
                self._give_up(group.server, offer.number, cause)
        self._end(group, why)

    def _end(self, group: Group, why: str) -> None:
        """End a group, which need not mean failure, and start the next queued transfers."""
        group.error = why
        for offer in self._offers_to(group):
            offer.queue_task(group, direct_pb2.DirectTask.DROP)
            offer.running.pop(group.id, None)
            self._start_next(offer)
        self._changed.emit()

    def _end_late(self, offer: Offer, slack: float = 5.0) -> None:
        """End transfers that take longer than their bound and `slack` seconds."""
        for group in list(offer.running.values()):
            if self._clock() > group.began + self.seconds + slack:
                self._fail(group, "late", f"not every member finished within {self.seconds + slack:g} s")

    def _forget(self, server: str) -> None:
        """Remove all state of a server."""
        self._groups.pop(server, None)
        self._unlinked.pop(server, None)
        self._missed -= {server}
        self._refused.pop(server, None)
        self._failures.pop(server, None)
