"""State of a fleet: target, update strategy, current move. `fleets/updates.py` changes it."""

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import GetPydanticSchema
from pydantic_core import core_schema
from resharder.server.state.server import Server, Settings
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import BaseBinding, PauseMode, Power

NOBODY = (1, 0)  # an empty range of versions: no server may serve


def _known(values: Iterable[int]) -> GetPydanticSchema:
    """Return the metadata by which pydantic reads an enumeration of the protocol in a stored fleet: its numbers except 0."""
    return GetPydanticSchema(lambda source, handler: core_schema.literal_schema([value for value in values if value]))


_Power = Annotated[Power, _known(Power.values())]


@dataclass(frozen=True)
class VersionTarget:
    """Version target. `version` is for NUMBER. `every_seconds`, for LATEST, is the shortest time between two moves' starts."""

    kind: Annotated[resources_pb2.VersionTarget.Kind, _known(resources_pb2.VersionTarget.Kind.values())] = (
        resources_pb2.VersionTarget.LATEST
    )
    version: int = 0
    every_seconds: float = 0.0


@dataclass(frozen=True)
class UpdateStrategy:
    """Update strategy. An `at_a_time` of 0 means all servers; other counts of 0 mean 1."""

    kind: Annotated[resources_pb2.UpdateStrategy.Kind, _known(resources_pb2.UpdateStrategy.Kind.values())] = (
        resources_pb2.UpdateStrategy.ALL_AT_ONCE
    )
    at_a_time: int = 0
    max_failures: int = 0
    canaries: int = 0
    hold_seconds: float = 0.0
    approval: bool = False
    check: str = ""


@dataclass(frozen=True)
class Move:
    """Move of a fleet to a version. `started` and `ended` are in seconds since 1970 and only for display."""

    id: int
    state: Annotated[resources_pb2.Move.State, _known(resources_pb2.Move.State.values())]
    back_to: int  # 0: none
    to: int
    strategy: UpdateStrategy
    started: float
    reason: str = ""
    servers: tuple[str, ...] = ()  # canaries first, then all that have moved
    counted: frozenset[str] = frozenset()  # servers that it began with or that joined it: without them it is not DONE
    short: bool = False  # STOPPED at its end, because counted servers are missing; it is DONE once none is
    failed: Mapping[str, str] = field(default_factory=dict)
    began: float = 0.0  # monotonic, like `held`; durations are measured from these
    held: float = 0.0  # time of the change to HOLDING
    approved: bool = False
    checked: bool = False
    tries: int = 0  # how often an operator approved a retry
    ended: float = 0.0
    seconds: float = 0.0  # duration of the move

    def hold_left(self, now: float) -> float:
        """Return the seconds until the canaries' hold time ends; 0 if none runs."""
        return max(0.0, self.held + self.strategy.hold_seconds - now) if self.state == resources_pb2.Move.HOLDING else 0.0

    @property
    def active(self) -> bool:
        """Whether the move is neither DONE nor FAILED. A STOPPED move awaits an operator or missing servers, and is active."""
        return self.state not in (resources_pb2.Move.DONE, resources_pb2.Move.FAILED)

    @property
    def canaries(self) -> tuple[str, ...]:
        """Servers that the move reaches first: at least one, once `servers` has been filled."""
        return self.servers[: max(1, self.strategy.canaries)]

    @property
    def checking(self) -> bool:
        """Whether its check is due or running."""
        return self.state == resources_pb2.Move.HOLDING and bool(self.strategy.check) and not self.checked


@dataclass(frozen=True)
class Fleet:
    """Durable state of a fleet."""

    name: str
    model: str
    pause_mode: Annotated[PauseMode, _known(PauseMode.values())] = PauseMode.KEEP
    target: VersionTarget = VersionTarget()
    strategy: UpdateStrategy = UpdateStrategy()
    max_skew: int = 0
    serve_ahead: bool | None = None  # None: by rule; True only for ALL_AT_ONCE without a skew bound
    settled: int = 0  # version of the last move that ended
    move: Move | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    power: _Power = Power.AWAKE
    powers: Mapping[str, _Power] = field(default_factory=dict)  # of servers with a setting of their own
    drained: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()
    rolled_back: str = ""  # request id of the last rollback
    base_binding: Annotated[BaseBinding, _known(BaseBinding.values())] = BaseBinding.HOLD  # for fleets of an adapter

    @property
    def moving(self) -> Move | None:
        """Active move, or None."""
        return self.move if self.move is not None and self.move.active else None

    @property
    def strict(self) -> bool:
        """Whether versions must not mix beyond a bound, so that gates close when leases expire."""
        return self.max_skew > 0 or self.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC

    @property
    def independent(self) -> bool:
        """Whether servers move all at once, each by itself, which is required to serve ahead."""
        return self.strategy.kind == resources_pb2.UpdateStrategy.ALL_AT_ONCE and not self.max_skew

    @property
    def serves_ahead(self) -> bool:
        """Whether servers may take versions before READY: as set, by default wherever it is possible."""
        return self.independent if self.serve_ahead is None else self.serve_ahead

    def mixes(self, version: int, shown: Iterable[int]) -> bool:
        """Return whether serving this version beside others breaks the skew bound."""
        bound = 0 if self.strategy.kind == resources_pb2.UpdateStrategy.ATOMIC else self.max_skew
        return self.strict and any(abs(version - other) > bound for other in shown)

    def rest_left(self, now: float) -> float:
        """Return the seconds until `target.every_seconds` permits the next move."""
        return max(0.0, self.move.began + self.target.every_seconds - now) if self.move is not None else 0.0

    def power_of(self, server: str) -> Power:
        """Return the power state set for a server, by default that of the fleet."""
        return self.powers.get(server, self.power)

    def needs(self) -> frozenset[int]:
        """Return the versions that the fleet needs."""
        move = self.moving
        if move is None:
            versions = {self.settled}
        else:
            returns = move.strategy.kind != resources_pb2.UpdateStrategy.ALL_AT_ONCE or move.state == resources_pb2.Move.BACK
            versions = {move.to, move.back_to if returns else 0}
        return frozenset(
            versions | ({self.target.version} if self.target.kind == resources_pb2.VersionTarget.NUMBER else set())
        ) - {0}


@dataclass(frozen=True)
class View:
    """Inputs of decisions about a fleet besides its own state. `now` is monotonic; `wall` only labels moves.

    `settling`: the daemon has restarted, and servers that the fleet had before may still return.
    """

    servers: Mapping[str, Server]
    ready: Set[int]
    now: float
    settings: Settings
    settling: bool = False
    ahead: Set[int] = frozenset()  # UPLOADING versions that every rank offers, for a fleet that serves ahead
    wall: float = 0.0  # seconds since 1970
    at_once: int = 1  # servers that ranks can send to at the same time
    skipped: Set[int] = frozenset()  # versions that LATEST skips while there are others
    base: str = ""  # the base of the fleet's model, an adapter; empty for a model of its own
    bases: Mapping[str, int] = field(
        default_factory=dict
    )  # of servers of an adapter, the last version of their base that was confirmed; 0: none
    base_versions: Mapping[int, int] = field(default_factory=dict)  # versions of an adapter that name one of their base
    misplaced: Mapping[str, str] = field(default_factory=dict)  # servers of an adapter on those of another model: a clause each

    @cached_property
    def usable(self) -> Set[int]:
        """Versions that a server may install: READY, or ahead of READY."""
        return self.ready | self.ahead

    @cached_property
    def shown(self) -> dict[int, set[str]]:
        """Every version that clients may get, with the servers that may serve it."""
        found: dict[int, set[str]] = {}
        for id, server in self.servers.items():
            for version in server.shown:
                found.setdefault(version, set()).add(id)
        return found
