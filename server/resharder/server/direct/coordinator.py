"""The direct path's coordinator: who sends to whom, and whose turn it is. `memories.py` knows what members hold, and plans.

An *offer* is a version that the ranks of a publisher still hold in memory. A *group* is one server's workers and the ranks that
send to them, planned once and kept from version to version while its processes live. A *turn* is one group's transfer: a rank
sends to one at a time, so that it needs no buffers but one transfer's. Groups whose ranks are others, as those of another
replica, have theirs at the same time.

    worker: join (staging) ......... [digests] ..... start (paused) - turn - finish
    rank:   offer ... LINK: meets the group ... [DIGEST: says] .. RUN: sends - finish ... end: memory may change

The part in brackets is for a version that is served ahead of READY: a worker then proves what it got by what the ranks say of it.

Nothing here decides what a server installs: it asks the fleets whom an offer is still good for. Whatever goes wrong ends the
group, and the server's install goes on over the staged path.
"""

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
import structlog
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.piece_arrays import Pieces
from resharder.server.direct.digest_sums import held_by, sent_count
from resharder.server.direct.layouts import Memories, Side
from resharder.server.direct.state import Act, Group, Link, Member, Offer, Planned, Task
from resharder.server.infra.backoff import backoff
from resharder.server.infra.change_signal import ChangeSignal, Pause, Waiting
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ResourceNotFound

_log = structlog.get_logger("resharder.direct")
_LOOK = 0.25  # seconds between looks whether an offer is still good for anybody
_SLACK = 5.0  # beyond a transfer's own bound
_KEYS, _KEY_BYTES, _ALL_KEYS_BYTES = 4096, 1 << 16, 16 << 20
_OFFERED = 4  # versions of a model that are remembered to have been offered
_PAUSE, _LONGEST_PAUSE = 30.0, 600.0  # seconds, from the second failure in a row on; doubles with each


class Servers(Protocol):
    """What is asked of the fleets."""

    def awaiting(self, model: str, number: int) -> frozenset[str]:
        """Servers that are to install this version next and can be written to directly."""

    def processes(self, server: str) -> dict[int, str]:
        """Of every worker by rank; empty where not all of them are known. Raises NotFound (SERVER_UNKNOWN)."""


Cause = Literal["not_offered", "offer_over", "layout", "late", "member_gone", "member_failed"]


class Heard(Protocol):
    """Told of every transfer that ended well, and with `cause` of every version that a server takes over the staged path. It must
    not wait."""

    def __call__(self, seconds: float, cause: Cause | None) -> None: ...


def _unheard(seconds: float, cause: Cause | None) -> None:
    pass


class Direct:
    """Thread-safe. Its lock comes after all others but that of `memories`: the fleets are asked without it.

    `staging_bytes`: of memory beyond the weights, that each member may use. `seconds`: for members to meet, and for a transfer.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        staging_bytes: int = 1 << 30,
        seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.staging_bytes, self.seconds = staging_bytes, seconds
        self._servers, self._clock = servers, clock
        self.heard: Heard = _unheard
        self.offered_whole: Callable[[], None] = lambda: None  # called when `offered` may answer otherwise; it must not wait
        self._whole: dict[str, tuple[int, ...]] = {}  # replaced, never changed: whoever looks takes no lock
        self.memories = Memories()
        self._lock, self._changed = threading.RLock(), ChangeSignal()
        self._offers: dict[str, Offer] = {}  # the newest of each model
        self._withheld: dict[str, int] = {}  # the newest version of each model that no rank offers
        self._joined: dict[str, tuple[str, dict[int, tuple[Member, str]]]] = {}  # server -> install, workers and their memories
        self._groups: dict[str, Group] = {}  # by server
        self._numbers: dict[str, tuple[str, int]] = {}  # server -> model, and which of the servers that follow it
        self._at_once: dict[str, int] = {}  # replaced, never changed
        self._planning: set[str] = set()
        self._refused: dict[str, int] = {}  # server -> the version that it takes over the staged path
        self._failures: dict[str, tuple[int, float]] = {}  # server -> how many in a row, and when it may be tried again

    # Who holds something

    def declare(self, member: Member, fingerprint: str, pieces: Pieces[int]) -> None:
        gone = {
            owner: server
            for owner in self.memories.owners()
            if (server := owner.removeprefix("servers/")) != owner and not self._is_known(server)
        }
        self.memories.forget(gone.keys())
        self.memories.declare(member, fingerprint, pieces)
        with self._lock:
            for server in gone.values():
                for known in (self._joined, self._groups, self._numbers, self._refused, self._failures):
                    known.pop(server, None)

    def check_worker(self, member: Member) -> dict[int, str]:
        """The processes of its server, which it is one of. Raises NotFound (SERVER_UNKNOWN), FailedPrecondition (NOT_OFFERED)."""
        processes = self._servers.processes(member.owner.removeprefix("servers/"))
        if processes.get(member.rank) != member.process:
            raise FailedPrecondition("NOT_OFFERED", f"{member.owner[:200]}: not all of its workers are known yet")
        return processes

    def _is_known(self, server: str) -> bool:
        try:
            self._servers.processes(server)
        except ResourceNotFound:
            return False
        return True

    # Offers

    def offer(self, member: Member, memory: str, model: str, number: int, world_size: int, wait_seconds: float) -> Offer:
        """Enters one rank's offer. Raises FailedPrecondition (MEMORY_UNKNOWN, NOT_OFFERED: a later version's has begun)."""
        with self._lock:
            self.memories.check(member, memory)
            offer = self._offers.get(model)
            if offer is None or offer.publisher != member.owner or offer.number < number:
                if offer is not None:
                    offer.end()
                offer = self._offers[model] = Offer(model, number, member.owner, world_size, wait_seconds, self._changed)
            if offer.number > number or offer.ended:
                raise FailedPrecondition("NOT_OFFERED", f"version {number} of {model}: its offer is over")
            offer.wait_seconds = min(offer.wait_seconds, wait_seconds)
            offer.ranks[member.rank] = (member, memory, deque())
            whole = self._whole.get(model, ())
            if offer.complete and number not in whole:
                self._whole = self._whole | {model: (*whole, number)[-_OFFERED:]}
                self.offered_whole()
            self._changed.notify()
            return offer

    def withhold(self, model: str, number: int) -> None:
        """No rank offers this version, nor any before it that is not offered by now."""
        with self._lock:
            self._withheld[model] = max(number, self._withheld.get(model, 0))
            self._changed.notify()

    def changed(self, model: str) -> None:
        """The state of a version of this model."""
        with self._lock:
            if offer := self._offers.get(model):
                offer.look_at = 0.0
                self._changed.notify()

    def offered(self, model: str) -> Collection[int]:
        """The last versions that every rank has offered, whatever has become of them."""
        return self._whole.get(model, ())

    def at_once(self, model: str) -> int:
        """How many servers its ranks can send to at the same time, by the groups that there are; 1 where there is none."""
        return self._at_once.get(model, 1)

    def _count(self, offer: Offer) -> None:
        """Groups of earlier publishers may still be there."""
        busy, found = set[Member](), 0
        for group in self._groups.values():
            if not group.error and group.members[0].owner == offer.publisher and busy.isdisjoint(group.ranks):
                busy |= group.ranks
                found += 1
        self._at_once = self._at_once | {offer.model: max(1, found)}

    def tasks(self, offer: Offer, rank: int, state: Callable[[], str]) -> Iterator[Task | Pause]:
        """The rank's tasks, until its memory may change. `state()` is the version's."""
        while True:
            seen = self._changed.count
            if rank == min(offer.ranks) and self._clock() >= offer.look_at:  # one of them is enough
                offer.look_at = self._clock() + _LOOK
                self._look(offer, state())
            tasks = offer.ranks[rank][2]
            while tasks:
                task = tasks.popleft()
                if task is None:
                    return
                yield task
            yield self._changed.pause(seen, _LOOK)

    def leave(self, offer: Offer, rank: int) -> None:
        """The rank is done with the offer, or gone: then it sends no more."""
        with self._lock:
            member, _, _ = offer.ranks[rank]
            if offer.ended:
                return
            for group in [g for g in self._groups.values() if member in g.members]:
                self._fail(group, "member_gone", f"rank {rank} of {member.owner} is gone")
            offer.end()
            self._changed.notify()

    def _look(self, offer: Offer, state: str) -> None:
        """Ends what nobody is expected to need any more, and what takes too long."""
        now = self._clock()
        awaited = self._servers.awaiting(offer.model, offer.number) if state == "READY" else frozenset()
        with self._lock:
            self._end_late(offer)
            if state == "READY" and offer.ready_at is None:
                offer.ready_at = now
            wanted = any(self._refused.get(server) != offer.number for server in awaited - offer.served)
            if not offer.ended and self._is_over(offer, state, now, wanted):
                offer.end()
                self._changed.notify()

    def _end_late(self, offer: Offer) -> None:
        for group in list(offer.running.values()):
            if self._clock() > group.began + self.seconds + _SLACK:
                self._fail(group, "late", f"not every member was done after {self.seconds + _SLACK:g} s")

    def _is_over(self, offer: Offer, state: str, now: float, wanted: bool) -> bool:
        if state != "READY" or offer.ready_at is None:
            return state != "UPLOADING"
        waited = now - offer.ready_at
        if offer.running or offer.turns:
            return waited > offer.wait_seconds + self.seconds
        return waited > offer.wait_seconds or not wanted or (waited > self.seconds and not offer.complete)

    # Workers

    def join(self, member: Member, memory: str, model: str, number: int, install: str, held: str | None = None) -> Waiting[Link]:
        """A worker's link, once all ranks and all workers are there. `held`: the group that it has a link of, "" for none, None
        where it does not say. Raises FailedPrecondition (MEMORY_UNKNOWN, NOT_OFFERED)."""
        server, deadline = member.owner.removeprefix("servers/"), self._clock() + self.seconds
        with self._lock:
            self.memories.check(member, memory)
            current, workers = self._joined.get(server, ("", {}))
            if current != install:
                workers = {}
                self._joined[server] = install, workers
            workers[member.rank] = (member, memory)
            self._changed.notify()
        processes = self.check_worker(member)
        while True:
            seen = self._changed.count
            with self._lock:
                offer = self._good_offer(server, model, number)
                there = {rank: worker.process for rank, (worker, _) in workers.items()} == processes
                if there and offer is not None and offer.complete and server not in self._planning:
                    ranks = {rank: (m, memory) for rank, (m, memory, _) in offer.ranks.items()}
                    key = (tuple(sorted(ranks.items())), tuple(sorted(workers.items())))
                    group = self._groups.get(server)
                    if group is not None and group.key == key and not group.error:
                        if held in (None, group.id) or member not in group.linked:
                            return group.link(member)
                        self._end(group, f"{member.owner}, rank {member.rank} has let go of it")  # as those do that fall asleep
                    self._planning.add(server)
                    place = self._number(server, model)
                    break
                if self._clock() > deadline:
                    self._refuse(server, number, "late", "not all ranks and workers came in time")
            yield self._changed.pause(seen, _LOOK)
        try:
            planned = self.memories.plan(ranks, workers, place)
        except (LayoutError, ValueError) as error:
            with self._lock:
                self._refuse(server, number, "layout", f"{error}")
        finally:
            with self._lock:
                self._planning.discard(server)
                self._changed.notify()
        with self._lock:
            return self._make(offer, server, key, planned, ranks, workers).link(member)

    def _number(self, server: str, model: str) -> int:
        """Which of the servers that follow a model it is: they share out its publisher's replicas by that."""
        known = self._numbers.get(server)
        if known is None or known[0] != model:
            taken = {number for other, number in self._numbers.values() if other == model}
            known = self._numbers[server] = model, next(number for number in itertools.count() if number not in taken)
        return known[1]

    def _good_offer(self, server: str, model: str, number: int) -> Offer | None:
        """The one of this version, None where it may still come. Raises FailedPrecondition (NOT_OFFERED)."""
        offer = self._offers.get(model)
        if self._refused.get(server) == number:
            self._refuse(server, number, "member_failed", "it has failed before")
        failures, again = self._failures.get(server, (0, 0.0))
        if (left := again - self._clock()) > 0:
            self._refuse(server, number, "member_failed", f"{failures} transfers in a row failed; none is tried for {left:.0f} s")
        if offer is not None and (offer.number > number or (offer.number == number and offer.ended)):
            self._refuse(server, number, "offer_over", "its offer is over")
        if offer is None or offer.number != number:
            able = any(owner.startswith(f"models/{model}/publishers/") for owner in self.memories.owners())
            if not able or number <= self._withheld.get(model, 0):
                self._refuse(server, number, "not_offered", "no publisher offers it")
            return None
        return offer

    def _give_up(self, server: str, number: int, cause: Cause) -> None:
        """Heard of once for each version, however many of its workers ask."""
        if self._refused.get(server) != number:
            self._refused[server] = number
            self.heard(0.0, cause)

    def _refuse(self, server: str, number: int, cause: Cause, why: str) -> None:
        """Always raises."""
        self._give_up(server, number, cause)
        self._changed.notify()
        raise FailedPrecondition("NOT_OFFERED", f"version {number} goes to server {server} over the staged path: {why}")

    def _make(
        self,
        offer: Offer,
        server: str,
        key: Hashable,
        planned: Planned,
        ranks: Side,
        workers: Side,
    ) -> Group:
        former = self._groups.get(server)
        if former is not None and former.key == key and not former.error:
            return former
        if offer.ended:
            self._refuse(server, offer.number, "offer_over", "its offer is over")
        if former is not None:  # ranks may not have heard of its end in an offer that was over
            self._end(former, former.error or "other members have taken its place")
        members = (*(ranks[rank][0] for rank in planned.senders), *(workers[rank][0] for rank in sorted(workers)))
        group = Group(secrets.token_hex(12), server, key, members, len(planned.senders), planned)
        self._groups[server] = group
        self._count(offer)
        offer.tell(group, Act.LINK, link=True)
        _log.info("direct_group", server=server, group=group.id, senders=group.senders, members=len(members))
        return group

    # The proof of what is not READY

    def digests(self, member: Member, id: str, number: int) -> Waiting[list[int]]:
        """Of every box of a worker's memory, by what the ranks say. Raises FailedPrecondition (NOT_OFFERED)."""
        with self._lock:
            group = self._group(id)
            if member not in group.members[group.senders :]:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a worker of group {id}")
            offer, deadline = self._offer_of(group), self._clock() + self.seconds
            if offer.number != number:
                raise FailedPrecondition("NOT_OFFERED", f"version {number}: its offer is over")
            if group.said_of != number:
                group.said_of, group.said = number, {}
                offer.ask(group)
        while True:
            seen = self._changed.count
            with self._lock:
                if len(group.said) >= group.senders and group.said_of == number:
                    said, target = dict(group.said), group.members.index(member) - group.senders
                    break
                if group.error or offer.ended or group.said_of != number:
                    self._refuse(group.server, number, "offer_over", group.error or "its offer is over")
                if self._clock() > deadline:
                    self._fail(group, "late", f"not every rank has said what it sends after {self.seconds:g} s")
            yield self._changed.pause(seen, _LOOK)
        return held_by(group.planned.plan, target, said)

    def say(self, member: Member, id: str, number: int, digests: Sequence[int]) -> None:
        """A rank's, of what it sends. Raises FailedPrecondition (NOT_OFFERED), InvalidArgument (WORKER, DIGESTS)."""
        with self._lock:
            group = self._group(id)
            if member not in group.members[: group.senders]:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a sender of group {id}")
            expected = sent_count(group.planned.plan, member.rank)
            if len(digests) != expected:
                raise InvalidArgument("DIGESTS", f"rank {member.rank} sends {expected} boxes, got {len(digests)} digests")
            if group.said_of == number:
                group.said[member.rank] = np.array(digests, np.uint64)
                self._changed.notify()

    def start(self, member: Member, id: str, install: str) -> Waiting[None]:
        """When it returns, the transfer has begun. Raises FailedPrecondition (NOT_OFFERED)."""
        with self._lock:
            group = self._group(id)
            if member not in group.members[group.senders :]:
                raise InvalidArgument("WORKER", f"{member.owner}, rank {member.rank}: not a worker of group {id}")
            if group.install != install:
                group.install, group.started, group.finished, group.received = install, set(), set(), 0
            group.started.add(member.rank)
            offer, deadline = self._offer_of(group), self._clock() + self.seconds
            if len(group.started) == len(group.members) - group.senders:
                offer.turns.append(group)
                self._next(offer)
        while True:
            seen = self._changed.count
            with self._lock:
                if group.granted == install:
                    return
                if group.error or offer.ended:
                    self._refuse(group.server, offer.number, "offer_over", group.error or "its offer is over")
                if group not in offer.turns and self._clock() > deadline:
                    self._fail(group, "late", f"not every worker was ready after {self.seconds:g} s")
                self._end_late(offer)  # also where no rank asks for its tasks
            yield self._changed.pause(seen, _LOOK)

    def _offer_of(self, group: Group) -> Offer:
        offer = next((o for o in self._offers.values() if o.publisher == group.members[0].owner), None)
        if offer is None or offer.ended:
            raise FailedPrecondition("NOT_OFFERED", f"group {group.id}: the offer of its version is over")
        return offer

    def _next(self, offer: Offer) -> None:
        for group in list(offer.turns):
            if not group.error and not offer.has_room(group):
                continue
            offer.turns.remove(group)
            if not group.error:
                offer.running[group.id] = group
                group.granted, group.began = group.install, self._clock()
                offer.tell(group, Act.RUN)
                _log.info("direct_turn", server=group.server, version=offer.number, group=group.id)
                self._changed.notify()

    def finish(self, member: Member, id: str, ok: bool, error: str, seconds: float, size_bytes: int) -> None:
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
                del offer.running[id]
                took = self._clock() - group.began
                _log.info(
                    "direct_transfer",
                    server=group.server,
                    version=offer.number,
                    group=group.id,
                    seconds=took,
                    size_bytes=group.received,
                )
                self.heard(took, None)
                self._failures.pop(group.server, None)
                offer.served.add(group.server)
                offer.look_at = 0.0
                self._next(offer)
                self._changed.notify()

    def _group(self, id: str) -> Group:
        group = next((g for g in self._groups.values() if g.id == id), None)
        if group is None:
            raise FailedPrecondition("NOT_OFFERED", f"group {id[:64]} is over")
        return group

    def _fail(self, group: Group, cause: Cause, why: str) -> None:
        if group.error:
            return
        count = self._failures.get(group.server, (0, 0.0))[0] + 1
        pause = backoff(count - 1, _PAUSE, _LONGEST_PAUSE)
        self._failures[group.server] = count, self._clock() + pause
        _log.warning("direct_failed", server=group.server, group=group.id, reason=why)
        for offer in self._offers_to(group):
            if not offer.ended:
                self._give_up(group.server, offer.number, cause)
        self._end(group, why)

    def _end(self, group: Group, why: str) -> None:
        """Nobody's fault need it be; whoever waits for his turn behind it has his."""
        group.error = why
        for offer in self._offers_to(group):
            offer.tell(group, Act.DROP)
            offer.running.pop(group.id, None)
            self._next(offer)
        self._changed.notify()

    def _offers_to(self, group: Group) -> list[Offer]:
        return [offer for offer in self._offers.values() if offer.publisher == group.members[0].owner]

    # How members meet

    def set_key(self, id: str, key: str, value: bytes) -> None:
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
            self._changed.notify()

    def key(self, id: str, key: str, wait_seconds: float) -> Waiting[bytes | None]:
        """None where nobody sets it in time. Raises FailedPrecondition (NOT_OFFERED) once the group has failed."""
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
