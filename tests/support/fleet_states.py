"""States of servers and fleets, written down: for tests of the functions that decide about them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from resharder.server.state.fleet import Fleet, Move, UpdateStrategy, View
from resharder.server.state.server import Control, Failure, Install, Server, Settings, Worker
from resharder.v1 import resources_pb2

SETTINGS = Settings(attempts=2)
NOW = 100.0


def server(id: str, version: int = 1, **changes: Any) -> Server:
    """A server of two workers that serves a version, which the store has."""
    workers = {rank: Worker(rank, resources_pb2.Worker.BOOTED, version, holds=version) for rank in range(2)}
    known = Server(id, "policy", "fleet", "life", NOW, {version: f"print {version}"}, booting=False, attached=True, world_size=2)
    serving = replace(
        known, controls=(Control("leader", "", NOW),), workers=workers, confirmed=version, opened=version, resumed=True
    )
    return replace(serving, **changes)


def out_of_service(id: str, version: int = 1, **changes: Any) -> Server:
    """A server whose workers have a version, and whose gate is closed."""
    return server(id, version, opened=0, resumed=False, **changes)


def install(
    version: int, state: resources_pb2.Install.State = resources_pb2.Install.STAGING, began: float = NOW, **changes: Any
) -> Install:
    return replace(Install(f"install of {version}", version, state, began, began), **changes)


def failed(version: int, count: int = 2, error: str = "no memory") -> dict[int, Failure]:
    """Failures as many as the settings permit, by default."""
    return {version: Failure(count, error, NOW + 5)}


def view(servers: Iterable[Server], ready: Iterable[int] = (1, 2), **changes: Any) -> View:
    return replace(View({each.id: each for each in servers}, set(ready), NOW, SETTINGS), **changes)


def strategy(kind: resources_pb2.UpdateStrategy.Kind, **changes: Any) -> UpdateStrategy:
    return replace(UpdateStrategy(kind), **changes)


def fleet(kind: resources_pb2.UpdateStrategy.Kind = resources_pb2.UpdateStrategy.ALL_AT_ONCE, **changes: Any) -> Fleet:
    """A fleet that has settled on version 1. `at_a_time` and others of a strategy are among the changes."""
    of_strategy = {
        name: changes.pop(name) for name in list(changes) if name in UpdateStrategy.__dataclass_fields__ and name != "kind"
    }
    return replace(Fleet("fleet", "policy", settled=1, strategy=strategy(kind, **of_strategy)), **changes)


def moving(
    state: resources_pb2.Move.State,
    kind: resources_pb2.UpdateStrategy.Kind = resources_pb2.UpdateStrategy.ALL_AT_ONCE,
    **changes: Any,
) -> Fleet:
    """A fleet that moves from version 1 to 2. Changes are those of the fleet, of its strategy, or of its move, in this order."""
    of_move = {name: changes.pop(name) for name in list(changes) if name in Move.__dataclass_fields__ and name not in MINE}
    known = fleet(kind, **changes)
    return replace(known, move=replace(Move(7, state, 1, 2, known.strategy, 0.0, began=NOW - 10), **of_move))


MINE = {"strategy"}
