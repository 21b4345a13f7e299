"""Generations: the periods in which servers use the GPUs that they share with a trainer.

    publish, READY -> memory offloaded -> every rank has arrived -> rank 0 orders AWAKE -> every live server serves the
    version -> the body -> every rank has left, or one has failed -> asleep -> memory restored -> train modes and RNG states
    restored

Two rules separate the memory of ranks and servers. Only rank 0 wakes servers, after every rank has offloaded its memory. A
rank restores its memory only after it has found all servers asleep at a time when rank 0 no longer wakes them.

On the direct path, the servers' weights (but no KV cache) wake beside the ranks' memory, from which they are installed:

    every rank has entered, READY -> rank 0 orders WEIGHTS_AWAKE -> weights installed from the ranks' memory -> memory
    offloaded -> as above
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from resharder.client.errors import GenerationEnded, ServersNotAsleep, UsageError, WaitTimeout
from resharder.client.operator import Operator
from resharder.client.operator.answers import Fleet, Power, Server, VersionTarget
from resharder.client.trainer.delivery import Wake
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.identity import RankIdentity
from resharder.converters.wire.backoff import Backoff

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ASLEEP = {1: Power.ASLEEP_1, 2: Power.ASLEEP_2}

Restore = Callable[[], None]
_EVENTS = ("entered", "offloaded", "settled", "left", "failed", "ended")
_meetings: Counter[str] = Counter()  # numbers, so that a key of the store has one meaning for the life of the process
_ADVICE = (
    "they may use memory of this trainer's GPUs, so offloaded memory was not restored: put them to sleep or end them, then "
    "call publisher.bring_back()"
)


@dataclass(frozen=True)
class Generation:
    """Period in which servers use the GPUs.

    Attributes:
        version: Each server serves this version or a newer one; 0 for the version of their fleet.
        servers: Addresses of the servers.
    """

    version: int
    servers: tuple[str, ...]


class SharedFleet:
    """Servers of the fleet that shares the GPUs, during one generation."""

    def __init__(self, operator: Operator, name: str) -> None:
        self._operator, self.name = operator, name
        self._known: set[str] = set()

    def model(self) -> str:
        """Return the model that the fleet follows; an empty string for a fleet that no server has joined."""
        return next((fleet.model for fleet in self._operator.fleets() if fleet.name == self.name), "")

    def wake(self) -> None:
        """Order all servers of the fleet to wake."""
        self._operator.wake(self.name)

    def wake_weights(self) -> None:
        """Order all servers of the fleet to wake their weights, without their KV cache."""
        self._operator.wake(self.name, tag="weights")

    def sleep(self, level: int) -> None:
        """Order all servers of the fleet to sleep, at level 1 or 2."""
        self._operator.sleep(self.name, level=level)

    def look(self) -> list[Server]:
        """Return the live servers, and those lost since the first look.

        Servers lost before that remain in the daemon's lists and are left out.
        """
        listed = self._operator.servers(self.name)
        self._known |= {server.name for server in listed if server.state != Server.State.LOST}
        return [server for server in listed if server.name in self._known]

    def returning(self) -> dict[str, str]:
        """Return, by server, that a restarted daemon still awaits it: its power is unknown meanwhile."""
        fleets = (fleet for fleet in self._operator.fleets() if fleet.name == self.name)
        return {name: "has not returned since the daemon's restart" for fleet in fleets for name in fleet.returning}

    def occupying(self, *, but_lost: bool = False) -> dict[str, str]:
        """Return `occupying` servers, and those whose power is unknown."""
        return self.returning() | occupying(self.look(), but_lost=but_lost)

    def lagging(self, version: int) -> dict[str, str]:
        """Return `lagging` servers. Raises UsageError if they lag because the fleet does not take the version."""
        late = lagging(self.look(), version) | self.returning()
        if late and (why := next((refuses(f, version) for f in self._operator.fleets() if f.name == self.name), "")):
            raise UsageError(f"fleet {self.name} does not take version {version}: {why}")
        return late


class GenerationPart:
    """One rank's part in one generation.

    Args:
        ranks: Meeting of all ranks.
        fleet: Servers that share the GPUs.
        level: Sleep level of the servers afterwards.
        timeout: Bound in seconds on each wait, except that for other ranks' bodies.
        offload: Moves this rank's memory to the host.
        bring_back: Restores it.
        direct: Wake the servers' weights before memory is offloaded.
    """

    def __init__(
        self,
        ranks: "Ranks",
        fleet: SharedFleet,
        *,
        level: int,
        timeout: float,
        offload: Callable[[], None],
        bring_back: Callable[[], None],
        direct: bool = False,
    ) -> None:
        self._ranks, self._fleet = ranks, fleet
        self._level, self._timeout = level, timeout
        self._direct, self._woken = direct, False
        self._offload, self._bring_back = offload, bring_back

    @contextmanager
    def held(
        self, publish: Callable[[Wake | None], Handle | None], keep: Iterable[Callable[[], Restore]]
    ) -> Iterator[Generation]:
        """Hold the generation while the block runs.

        Errors are raised inside, so that the other ranks are informed.

        Args:
            publish: Returns the version that servers should serve; None for any version. Its argument, on the direct path, wakes
                the servers' weights once this rank has delivered the version.
            keep: Functions that save state and return its restoration, which always runs.
        """
        with ExitStack() as kept:
            for keeping in keep:
                kept.callback(keeping())
            try:
                if self._level not in ASLEEP:
                    raise UsageError(f"expected sleep level 1 or 2, got {self._level}")
                if self._direct:
                    self._ranks.report("entered")
                version = self._ready(publish(self._wake_weights if self._direct else None))
            except BaseException:
                if self._woken:
                    self._leave(failed=True)
                else:
                    self._fail()
                raise
            try:
                yield self._come(version)
            except BaseException:
                self._leave(failed=True)
                raise
            self._leave(failed=False)

    def _ready(self, handle: Handle | None) -> int:
        if handle is None:
            return 0
        self._wait(partial(ready, handle), f"{handle.name} to be READY", lambda: f"found {handle.progress()}")
        return handle.version

    def _wake_weights(self, handle: Handle) -> None:
        """Order the servers' weights awake once all ranks have entered and the version is READY. A no-op except on rank 0."""
        if not self._ranks.first:
            return
        self._wait(lambda: self._ranks.all_reported("entered"), "every rank to join this generation", self._ranks.absent)
        self._ready(handle)
        self._woken = True
        self._fleet.wake_weights()

    def _come(self, version: int) -> Generation:
        self._offload()
        self._ranks.report("offloaded")
        if self._ranks.first:
            self._wait(lambda: self._ranks.all_reported("offloaded"), "every rank to join this generation", self._ranks.absent)
            self._ranks.forget_earlier()
            self._fleet.wake()
        else:
            self._wait(lambda: self._ranks.reported("settled"), f"rank 0 to wake fleet {self._fleet.name}", lambda: "it has not")
        wanted = f"version {version} or newer" if version else "a version"
        self._wait(
            lambda: not self._fleet.lagging(version),
            f"every live server of fleet {self._fleet.name} to serve {wanted}",
            lambda: listed(self._fleet.lagging(version)),
        )
        if self._ranks.first:
            self._ranks.report("settled")
        servers = [server.address for server in self._fleet.look() if serves(server, version)]
        return Generation(version, tuple(servers))

    def _leave(self, *, failed: bool) -> None:
        """Put servers to sleep, then restore memory. Raises ServersNotAsleep; memory then stays offloaded."""
        try:
            self._agree_to_end(failed)
            self._until(lambda: not self._fleet.occupying(but_lost=True))
            occupied = self._fleet.occupying()
        except Exception as error:
            raise ServersNotAsleep(f"fleet {self._fleet.name} could not be put to sleep: {error}; {_ADVICE}") from error
        finally:
            if self._ranks.first:
                self._ranks.report("ended")
        if occupied:
            raise ServersNotAsleep(
                f"servers of fleet {self._fleet.name} are still awake after {self._timeout:g} s: {listed(occupied)}; {_ADVICE}"
            )
        self._bring_back()

    def _agree_to_end(self, failed: bool) -> None:
        """Return once servers are ordered to sleep and rank 0 no longer wakes them."""
        ranks = self._ranks
        if failed:
            self._fail()
            self._until(lambda: ranks.reported("settled"))
        ranks.report("left")
        if not failed:
            self._until(lambda: ranks.all_reported("left") or ranks.reported("failed"), timeout=None)
        if ranks.first or failed:
            self._fleet.sleep(self._level)
        else:
            self._until(lambda: ranks.reported("ended") or ranks.reported("failed"))

    def _fail(self) -> None:
        self._ranks.report("failed")
        if self._ranks.first:
            self._ranks.report("settled")

    def _wait(self, holds: Callable[[], object], what: str, found: Callable[[], str]) -> None:
        """Wait for other ranks or servers. Raises WaitTimeout, and GenerationEnded as soon as a rank has failed."""

        def over() -> object:
            if self._ranks.reported("failed"):
                raise GenerationEnded(f"stopped waiting for {what}: another rank has left this generation with an error")
            return holds()

        if not self._until(over):
            raise WaitTimeout(f"waited {self._timeout:g} s for {what}: {found()}")

    def _until(self, holds: Callable[[], object], timeout: float | None = 0.0) -> bool:
        """Return whether a condition holds within `_timeout` seconds; with None, wait without a bound."""
        backoff = Backoff(float("inf") if timeout is None else self._timeout, longest=1.0)
        while not holds():
            if not backoff.wait():
                return False
        return True


def lent_model(fleet: SharedFleet, models: Sequence[str], *, publish: bool) -> str:
    """Return the model of a generation's versions.

    An empty string stands for a fleet of a model that is not among the publisher's `models`.

    Raises UsageError for such a fleet if the generation publishes.
    """
    found = fleet.model() or (fleet.name if fleet.name in models else models[0])
    if found in models:
        return found
    if publish:
        raise UsageError(f"fleet {fleet.name} follows {found}, not {' or '.join(models)}: pass a fleet of one of these")
    return ""


def ready(handle: Handle) -> bool:
    """Return whether a version is READY, after at most a second. Raises the errors of `Handle.wait_ready` except WaitTimeout."""
    with suppress(WaitTimeout):
        handle.wait_ready(1.0)
        return True
    return False


def serves(server: Server, version: int) -> bool:
    """Return whether a server serves the version or a newer one."""
    return server.state in (Server.State.SERVING, Server.State.STAGING) and server.version >= version


def lagging(servers: Sequence[Server], version: int) -> dict[str, str]:
    """Return, by server, why live and undrained servers do not serve the version or a newer one."""
    live = [server for server in servers if server.state != Server.State.LOST and not server.drained]
    if not live:
        return {"the fleet": "has no live server"}
    return {server.name: seen(server) for server in live if not serves(server, version)}


def occupying(servers: Iterable[Server], *, but_lost: bool = False) -> dict[str, str]:
    """Return, by server, the state of servers that may use GPU memory, because they were not asleep as last reported.

    With `but_lost`, lost servers are left out.
    """
    return {
        server.name: seen(server)
        for server in servers
        if server.power not in ASLEEP.values() and not (but_lost and server.state == Server.State.LOST)
    }


def refuses(fleet: Fleet, version: int) -> str:
    """Return why the fleet does not take this version; an empty string if it does."""
    if fleet.target.kind == VersionTarget.Kind.NUMBER and fleet.target.version < version:
        return f"its target is version {fleet.target.version}"
    if fleet.target.kind == VersionTarget.Kind.NONE and version:
        return "it has no target"
    refused = {refusal.version: refusal.reason for refusal in fleet.refused}
    if version in refused and fleet.wanted_version <= version:
        return f"it has refused that: {refused[version]}"
    return ""


def seen(server: Server) -> str:
    """Return a server's state as text, with its address, version, power and reason."""
    lost = "its lease ended in this generation and its processes may still run" if server.state == Server.State.LOST else ""
    why = server.reason or lost
    return f"{server.state} at {server.address} with version {server.version}, {server.power}" + (f" ({why})" if why else "")


def listed(found: dict[str, str]) -> str:
    """Return servers and their states as one line."""
    return "; ".join(f"{name}: {why}" for name, why in found.items())


class Ranks:
    """Meeting of all ranks: on each of them, the `number`-th of its `scope`.

    Ranks report their progress as counters in the store of torch's default process group, without a collective. One short call
    shows whether all ranks have reported. A rank reports each event once.
    """

    def __init__(self, store: "Store", rank: int, world_size: int, scope: str, number: int) -> None:
        self.first = rank == 0
        self._rank, self._world_size = rank, world_size
        self._store, self._scope, self._number = store, scope, number
        self._mark, self._reported = str(number), set[str]()

    def report(self, event: str) -> None:
        """Report an event; a no-op if this rank has reported it."""
        if event not in self._reported:
            self._reported.add(event)
            self._store.set(f"{self._scope}/rank {self._rank}", self._mark)
            self._store.add(self._key(self._number, event), 1)

    def reported(self, event: str) -> int:
        """Return the number of ranks that have reported an event."""
        return self._store.add(self._key(self._number, event), 0)

    def all_reported(self, event: str) -> bool:
        """Return whether all ranks have reported an event."""
        return self.reported(event) == self._world_size

    def absent(self) -> str:
        """Return, as text, the ranks that have not reported anything at this meeting."""
        keys = {rank: f"{self._scope}/rank {rank}" for rank in range(self._world_size)}
        came = {rank for rank, key in keys.items() if self._store.check([key]) and self._store.get(key) == self._mark.encode()}
        return f"ranks {', '.join(map(str, sorted(keys.keys() - came)))} have not"

    def forget_earlier(self) -> None:
        """Delete the counters of the previous meeting. All ranks must have joined this one."""
        for event in _EVENTS:
            self._store.delete_key(self._key(self._number - 1, event))

    def _key(self, number: int, event: str) -> str:
        return f"{self._scope}/{number}/{event}"


def meet(identity: RankIdentity, model: str) -> Ranks:
    """Return the next meeting, which every rank must join. Raises UsageError if torch.distributed does not span all ranks."""
    scope = f"resharder/{identity.job}/{model}"
    return Ranks(_store(identity), identity.rank, identity.world_size, scope, _number(scope))


def _number(scope: str) -> int:
    _meetings[scope] += 1
    return _meetings[scope]


def _store(identity: RankIdentity) -> "Store":
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    if identity.world_size == 1:
        return HashStore()
    if not (dist.is_initialized() and dist.get_world_size() == identity.world_size):
        raise UsageError(
            f"ranks report their progress in the store of torch.distributed, which is not initialised over all "
            f"{identity.world_size} ranks: call init_process_group before generation"
        )
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
