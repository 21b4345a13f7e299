"""A move of a fleet as text: a line for each server with its wave, a bar, its version and its state.

    move 5  2 → 3  HOLDING  ████████············  1 of 2 on version 3
    left   canary  ████████████  3  SERVING
    right  later   ············  2  SERVING

The first half of a bar is staging, the second half is applying; it is full when the server serves the version. Pure functions:
no terminal, no colour, at most `WIDTH` columns.
"""

from collections.abc import Sequence

from resharder.client.cli.output import number
from resharder.client.operator.answers import (
    FleetStatus,
    MovePhase,
    MoveStatus,
    ServerState,
    ServerStatus,
    StrategyKind,
    WorkerReport,
)

WIDTH = 80
_BAR, _SERVER_BAR, _LONGEST_ID = 20, 12, 24
_FULL, _EMPTY = "█", "·"


def move_lines(fleet: FleetStatus, servers: Sequence[ServerStatus]) -> list[str]:
    """Return the lines of a fleet's current or last move; none without a move.

    Args:
        fleet: The fleet.
        servers: Its servers.
    """
    move = fleet.move
    if move is None:
        return []
    version = destination(move)
    live = [server for server in servers if server.state != ServerState.LOST]
    there = sum(server.version == version and server.state == ServerState.SERVING for server in live)
    bar = _bar(sum(done(server, version) for server in live) / max(1, len(live)), _BAR)
    head = f"move {move.id}  {number(move.from_version)} → {number(move.to_version)}  {move.state.value}"
    return [f"{head}  {bar}  {there} of {len(live)} on version {number(version)}"[:WIDTH], *_server_lines(move, servers, version)]


def destination(move: MoveStatus) -> int:
    """Return the version that servers of a move install: the previous one if the move returns."""
    return move.from_version if move.state in (MovePhase.BACK, MovePhase.FAILED) else move.to_version


def done(server: ServerStatus, version: int) -> float:
    """Return how far a server is with a version, from 0 to 1: half of it staging, half of it applying."""
    if server.version == version and server.state == ServerState.SERVING:
        return 1.0
    install = server.install
    if install is None or install.version != version:
        return 0.0
    reports = [worker.state for worker in server.workers if worker.install == install.id]
    applied = reports.count(WorkerReport.APPLIED)
    return (2 * applied + reports.count(WorkerReport.STAGED)) / (2 * max(1, server.world_size))


def wave(move: MoveStatus, server_id: str) -> str:
    """Return the wave in which a server moves: `canary`, a number from 1, or `later` if it may not move yet."""
    admitted, strategy = [_id(server) for server in move.servers], move.strategy
    if strategy.kind in (StrategyKind.ALL_AT_ONCE, StrategyKind.ATOMIC):
        return "1"
    if server_id not in admitted:
        return "later"
    position = admitted.index(server_id)
    canaries = max(1, strategy.canaries) if strategy.kind == StrategyKind.CANARY else 0
    if position < canaries:
        return "canary"
    return str((position - canaries) // (strategy.at_a_time or len(admitted)) + (2 if canaries else 1))


def _server_lines(move: MoveStatus, servers: Sequence[ServerStatus], version: int) -> list[str]:
    order = {_id(name): position for position, name in enumerate(move.servers)}
    servers = sorted(servers, key=lambda server: (order.get(_id(server.name), len(order)), server.name))
    failed = {_id(name): error for name, error in move.failed.items()}
    rows = []
    for server in servers:
        name = _id(server.name)
        state = f"{server.state.value}, {failed[name]}" if name in failed else server.state.value
        rows.append((_short(name), wave(move, name), _bar(done(server, version), _SERVER_BAR), number(server.version), state))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[4]])[:WIDTH] for row in rows]


def _bar(share: float, width: int) -> str:
    full = int(share * width)  # full only at the end
    return _FULL * full + _EMPTY * (width - full)


def _id(name: str) -> str:
    return name.rpartition("/")[2]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_ID else f"{name[: _LONGEST_ID - 1]}…"
