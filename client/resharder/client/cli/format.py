"""Fleets, servers, moves and events as text and as rows of tables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from resharder.client.cli.output import number, several, size, time_of
from resharder.client.cli.table import Cell, Columns, Row, alarm, paint
from resharder.client.operator.answers import (
    FleetStatus,
    MovePhase,
    MoveStatus,
    PublisherStatus,
    ServerPower,
    ServerState,
    ServerStatus,
    StrategyKind,
    TargetKind,
    UpdateStrategy,
    VersionState,
    VersionStatus,
    VersionTarget,
)
from rich.text import Text

PUBLISHERS = Columns(("publisher", "state", "ranks", "job"), texts=0)
FLEETS = Columns(
    ("fleet", "model", "wants", "at", "moves", "move", "serving it", "reason"),
    ("fleet", "wants", "at", "move", "serving it", "reason"),
)
SERVERS = Columns(
    ("server", "fleet", "state", "serves", "wants", "workers", "apply", "pause", "reason"),
    ("server", "fleet", "state", "serves", "wants", "workers", "reason"),
)
_URGENCY = {ServerState.LOST: 0, ServerState.FAILED: 1}
_IN_SERVICE = (ServerState.SERVING, ServerState.STAGING, ServerState.APPLYING, ServerState.WAITING)
VERSIONS = Columns(("model", "version", "state", "step", "size", "ready", "served by", "reason"))


def publisher_rows(publishers: Iterable[PublisherStatus]) -> Iterator[Row]:
    """Yield the rows of a table with columns `PUBLISHERS`."""
    for p in publishers:
        yield p.name, paint(p.state.value), f"{p.registered_slots}/{p.world_size}", p.job


def problems(servers: Iterable[ServerStatus]) -> Iterator[Text]:
    """Yield a line for each fleet that has lost servers."""
    fleets: dict[str, list[ServerStatus]] = {}
    for server in servers:
        fleets.setdefault(server.fleet, []).append(server)
    for fleet, members in sorted(fleets.items()):
        lost = [server for server in members if server.state == ServerState.LOST]
        if lost:
            each = ", ".join(f"{server.name.partition('/')[2]} ({server.reason})" for server in lost)
            yield alarm(f"fleet {fleet} has LOST {len(lost)} of {several(len(members), 'server')}: {each}")


def fleet_rows(fleets: Iterable[FleetStatus], servers: Sequence[ServerStatus]) -> Iterator[Row]:
    """Yield the rows of a table with columns `FLEETS`, those with lost servers first. `servers` are those of all fleets."""
    lost = Counter(server.fleet for server in servers if server.state == ServerState.LOST)
    for f in sorted(fleets, key=lambda fleet: not lost[fleet.name]):
        there = sum(s.fleet == f.name and s.version == f.wanted_version and s.state == ServerState.SERVING for s in servers)
        selected = f" ({f.wanted_version})" if f.target.kind != TargetKind.NUMBER and f.wanted_version else ""
        serving: Cell = f"{there}/{len(f.servers)}"
        serving = alarm(f"{serving}, {lost[f.name]} LOST") if lost[f.name] else serving
        yield (
            f.name, f.model, target(f.target) + selected, number(f.settled_version), strategy(f.strategy),
            paint(move(f.move), f.move.state.value if f.move else ""), serving,
            f.reason,
        )  # fmt: skip


def server_rows(servers: Iterable[ServerStatus]) -> Iterator[Row]:
    """Yield the rows of a table with columns `SERVERS`, lost and failed servers first; `apply` is that of the slowest worker."""
    for s in sorted(servers, key=lambda server: _URGENCY.get(server.state, len(_URGENCY))):
        apply = max((w.apply_seconds for w in s.workers), default=0.0)
        pause, error = (s.install.pause_seconds, s.install.error) if s.install else (0.0, "")
        yield (
            s.name, s.fleet, paint(state(s)), number(s.version), number(s.wanted_version), f"{len(s.workers)}/{s.world_size}",
            f"{apply:.3f} s", f"{pause:.3f} s", s.reason or error,
        )  # fmt: skip


def version_rows(versions: Iterable[VersionStatus], servers: Iterable[ServerStatus] = ()) -> Iterator[Row]:
    """Yield the rows of a table with columns `VERSIONS`; an UPLOADING version has its progress in place of a time.

    Args:
        versions: Versions to show.
        servers: All servers, of which those on exactly a version are counted.
    """
    on = Counter((server.model, server.version) for server in servers if server.state in _IN_SERVICE)
    for v in versions:
        yield (
            v.model, number(v.number), paint(v.state.value), str(v.step), size(v.size_bytes),
            time_of(v.ready_time) if v.ready_time else _arrived(v),
            _served(v, on[v.model, v.number]), v.reason or _notes(v),
        )  # fmt: skip


def _notes(version: VersionStatus) -> str:
    aside = version.set_aside and version.state in (VersionState.READY, VersionState.UPLOADING)
    text = f"set aside: latest skips it, `update {version.number}` serves it" if aside else ""
    return "; ".join(filter(None, (text, *version.warnings)))


def _served(version: VersionStatus, on: int) -> str:
    served = f"{on}/{version.servers_following}"
    if version.state == VersionState.READY:
        return served
    return f"{served}, ahead" if version.state == VersionState.UPLOADING and on else "–"


def target(it: VersionTarget) -> str:
    """Return a fleet's target in words."""
    if it.kind == TargetKind.NUMBER:
        return f"version {it.version}"
    if it.kind == TargetKind.LATEST:
        return "latest" + (f", one move in {it.every_seconds:g} s" if it.every_seconds else "")
    return "none"


def strategy(it: UpdateStrategy) -> str:
    """Return an update strategy in words, defaults filled in."""
    if it.kind == StrategyKind.ROLLING:
        return _rolling(it)
    if it.kind == StrategyKind.CANARY:
        until = [f"{it.hold_seconds:g} s"] * bool(it.hold_seconds) + ["approval"] * it.approval
        until += [f"check {it.check}"] * bool(it.check)
        first = several(it.canaries or 1, "server")
        return f"{first} first{', held for ' + ' and '.join(until) if until else ''}, then {_rolling(it)}"
    return "atomically" if it.kind == StrategyKind.ATOMIC else "all at once"


def _rolling(it: UpdateStrategy) -> str:
    return (
        f"{f'{it.at_a_time} at a time' if it.at_a_time else 'the rest'}, stops after {several(it.max_failures or 1, 'failure')}"
    )


def move(it: MoveStatus | None) -> str:
    """Return a move as `from → to STATE`; a dash without a move."""
    return f"{number(it.from_version)} → {it.to_version} {it.state.value}" if it else "–"


def serves(fleet: FleetStatus) -> str:
    """Return the versions that a fleet's servers take, and the rule that decides it."""
    what = "versions that are not READY yet, where it can" if fleet.serve_ahead else "READY versions only"
    return f"{what} ({fleet.serve_ahead_reason})" if fleet.serve_ahead_reason else what


def state(server: ServerStatus) -> str:
    """Return a server's state with its sleep level, requests in progress, or `ahead`."""
    name = server.state.value
    if server.state == ServerState.ASLEEP:
        powers = {
            ServerPower.ASLEEP_1: ", level 1",
            ServerPower.ASLEEP_2: ", level 2",
            ServerPower.WEIGHTS_AWAKE: ", weights awake",
        }
        return name + powers.get(server.power, "")
    if server.ahead and server.state in (ServerState.SERVING, ServerState.STAGING):
        return f"{name}, ahead"
    return f"{name}, {server.in_flight} in flight" if server.state == ServerState.DRAINED and server.in_flight else name


def progress(fleet: FleetStatus, servers: Sequence[ServerStatus]) -> str:
    """Return a line about a fleet's progress: its move, and the servers that lag, with reasons."""
    there = sum(s.state == ServerState.SERVING and s.version == fleet.wanted_version for s in servers)
    others = (f"{s.name} {state(s)}" for s in servers if s.state != ServerState.SERVING or s.version != fleet.wanted_version)
    line = f"{fleet.name}: {move(fleet.move)}, {there}/{len(servers)} serve {number(fleet.wanted_version)}"
    return "; ".join(filter(None, (line, *others, fleet.reason)))


def states(servers: Iterable[ServerStatus]) -> str:
    """Return a line about the states of servers."""
    return "; ".join(f"{server.name} {state(server)}" for server in servers) or "no servers"


def outcome(fleet: FleetStatus) -> str:
    """Return a line about a fleet's target, its version and the reason."""
    failed = fleet.move.failed if fleet.move and fleet.move.state == MovePhase.DONE else {}
    reasons = (fleet.reason, *(f"failed: {server}: {error}" for server, error in sorted(failed.items())))
    line = f"{fleet.name} targets {target(fleet.target)}, is at {number(fleet.settled_version)}"
    return ": ".join(filter(None, (line, "; ".join(filter(None, reasons)))))


def _arrived(version: VersionStatus) -> str:
    received = sum(slot.received_bytes for slot in version.slots)
    return f"{100 * received // max(1, version.size_bytes)} %" if version.state == VersionState.UPLOADING else "–"
