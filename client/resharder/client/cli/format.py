"""The daemon's answers as text: rows of tables, sentences, events, and a move as a picture. Pure functions.

    move 5  2 → 3  HOLDING  ████████············  1 of 2 on version 3
    left   canary  ████████████  3  SERVING
    right  later   ············  2  SERVING

The first half of a bar is staging, the second half is applying; it is full when the server serves the version.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from resharder.client.cli.terminal import Cell, Columns, Row, alarm, paint, styled
from resharder.client.operator.answers import (
    BaseBinding,
    Event,
    Fleet,
    Install,
    Move,
    PublisherStatus,
    Server,
    UpdateStrategy,
    Version,
    VersionTarget,
    Worker,
)
from resharder.converters import badges
from resharder.converters.badges import Badge, Health, ServerState, Severity, badge, health, publisher_badge, server_badge
from resharder.converters.event_text import details_text
from resharder.converters.units import size_text as size
from rich.text import Text

PUBLISHERS = Columns(("publisher", "state", "ranks", "job"), texts=0)
FLEETS = Columns(
    ("fleet", "health", "model", "wants", "at", "serving", "behind", "moves", "move", "reason"),
    ("fleet", "health", "wants", "at", "serving", "behind", "move", "reason"),
)
SERVERS = Columns(
    ("server", "fleet", "state", "serves", "wants", "workers", "apply", "pause", "reason"),
    ("server", "fleet", "state", "serves", "wants", "workers", "reason"),
)
_TROUBLES = (Server.State.LOST, Server.State.FAILED)
_WORST: tuple[Severity, ...] = ("bad", "warn", "busy", "good", "idle")
_IN_SERVICE = (Server.State.SERVING, Server.State.STAGING, Server.State.APPLYING, Server.State.WAITING)
VERSIONS = Columns(("model", "version", "state", "step", "size", "ready", "served by", "reason"), noun="versions")
_BAR, _SERVER_BAR, _LONGEST_ID = 20, 12, 24
_FULL, _EMPTY = "█", "·"


def publisher_table(publishers: Sequence[PublisherStatus]) -> tuple[Columns, list[Row]]:
    """Return the columns and rows of a table of publishers, with the bases of adapters if there are any."""
    return _with_bases(PUBLISHERS, _publisher_rows(publishers), [p.base for p in publishers])


def _publisher_rows(publishers: Iterable[PublisherStatus]) -> Iterator[Row]:
    for p in publishers:
        yield p.name, paint(publisher_badge(p.state.value, p.job)), f"{p.registered_slots}/{p.world_size}", p.job


def problems(servers: Iterable[Server], fleets: Iterable[Fleet] = ()) -> Iterator[Text]:
    """Yield a line for each fleet with lost servers, with failed ones, and with a move that has stopped."""
    members: dict[str, list[Server]] = {}
    for server in servers:
        members.setdefault(server.fleet, []).append(server)
    for fleet, group in sorted(members.items()):
        for trouble in _TROUBLES:
            if reasons := {_id(server.name): server.reason for server in group if server.state == trouble}:
                yield alarm(badges.trouble(fleet, trouble.value, reasons, len(group)))
    for each in fleets:
        if each.move and each.move.state == Move.State.STOPPED:
            yield alarm(f"fleet {each.name}: its move has STOPPED: {each.reason or each.move.reason}")


def fleet_health(fleet: Fleet, servers: Iterable[Server]) -> Health:
    """Return a fleet's health. `servers` are those of all fleets."""
    of = {
        _id(s.name): ServerState(s.state.value, s.version, s.install is not None and s.install.state == Install.State.STAGING)
        for s in servers
        if s.fleet == fleet.name
    }
    if fleet.move is None:
        return health(of, fleet.wanted_version)
    return health(of, fleet.wanted_version, fleet.move.state.value, [*map(_id, fleet.move.failed)])


def fleet_rows(fleets: Iterable[Fleet], servers: Sequence[Server]) -> Iterator[Row]:
    """Yield the rows of a table with columns `FLEETS`, those with the worst health first. `servers` are those of all fleets."""
    found = [(fleet_health(fleet, servers), fleet) for fleet in fleets]
    for well, f in sorted(found, key=lambda each: _WORST.index(each[0].badge.severity)):
        selected = f" ({f.wanted_version})" if f.target.kind != VersionTarget.Kind.NUMBER and f.wanted_version else ""
        moved: Cell = paint(badge("move", f.move.state.value), move(f.move)) if f.move else move(f.move)
        yield (
            f.name, paint(well.badge), f.model, target(f.target) + selected, number(f.settled_version),
            f"{well.serving}/{max(well.servers, len(f.servers))}", str(well.behind), strategy(f.strategy), moved, f.reason,
        )  # fmt: skip


def server_rows(servers: Iterable[Server]) -> Iterator[Row]:
    """Yield the rows of a table with columns `SERVERS`, lost and failed servers first; `apply` is that of the slowest worker."""
    for s in sorted(servers, key=lambda server: (*_TROUBLES, server.state).index(server.state)):
        apply = max((w.apply_seconds for w in s.workers), default=0.0)
        pause, error = (s.install.pause_seconds, s.install.error) if s.install else (0.0, "")
        yield (
            s.name, s.fleet, paint(state_badge(s)), number(s.version), number(s.wanted_version),
            f"{len(s.workers)}/{s.world_size}", f"{apply:.3f} s", f"{pause:.3f} s", s.reason or error,
        )  # fmt: skip


def version_table(versions: Sequence[Version], servers: Iterable[Server] = ()) -> tuple[Columns, list[Row]]:
    """Return the columns and rows of a table of versions, with the bases of adapters if there are any.

    Args:
        versions: Versions to show.
        servers: All servers, of which those on exactly a version are counted.
    """
    bases = [f"{v.base} {v.base_version}" if v.base_version else v.base for v in versions]
    return _with_bases(VERSIONS, version_rows(versions, servers), bases)


def _with_bases(columns: Columns, rows: Iterable[Row], bases: Sequence[str]) -> tuple[Columns, list[Row]]:
    """Return a table with a column of bases after the first one, or as it is if no row has a base."""
    if not any(bases):
        return columns, list(rows)
    titles, narrow = ((all_[0], "base", *all_[1:]) if all_ else () for all_ in (columns.titles, columns.narrow))
    more: list[Row] = [(row[0], base, *row[1:]) for row, base in zip(rows, bases, strict=True)]
    return replace(columns, titles=titles, narrow=narrow), more


def version_rows(versions: Iterable[Version], servers: Iterable[Server] = ()) -> Iterator[Row]:
    """Yield the rows of a table with columns `VERSIONS`; an UPLOADING version has its progress in place of a time.

    Args:
        versions: Versions to show.
        servers: All servers, of which those on exactly a version are counted.
    """
    on = Counter((server.model, server.version) for server in servers if server.state in _IN_SERVICE)
    for v in versions:
        yield (
            v.model, number(v.number), paint(badge("version", v.state.value)), str(v.step), size(v.size_bytes),
            time_of(v.ready_time) if v.ready_time else _arrived(v),
            _served(v, on[v.model, v.number]), v.reason or _notes(v),
        )  # fmt: skip


def _notes(version: Version) -> str:
    skipped = version.skipped and version.state in (Version.State.READY, Version.State.UPLOADING)
    text = f"skipped by latest: `update {version.number}` serves it" if skipped else ""
    less = 0 < version.sent_bytes < version.size_bytes
    sent = f"sent {size(version.sent_bytes)} of {size(version.size_bytes)}" if less else ""
    return "; ".join(filter(None, (text, sent, *version.warnings)))


def _served(version: Version, on: int) -> str:
    served = f"{on}/{version.servers_following}"
    if version.state == Version.State.READY:
        return served
    return f"{served}, ahead" if version.state == Version.State.UPLOADING and on else "–"


def target(it: VersionTarget) -> str:
    """Return a fleet's target in words."""
    if it.kind == VersionTarget.Kind.NUMBER:
        return f"version {it.version}"
    if it.kind == VersionTarget.Kind.LATEST:
        return "latest" + (f", one move in {it.every_seconds:g} s" if it.every_seconds else "")
    return "none"


def strategy(it: UpdateStrategy) -> str:
    """Return an update strategy in words, defaults filled in."""
    if it.kind == UpdateStrategy.Kind.ROLLING:
        return _rolling(it)
    if it.kind == UpdateStrategy.Kind.CANARY:
        until = [f"{it.hold_seconds:g} s"] * bool(it.hold_seconds) + ["approval"] * it.approval
        until += [f"check {it.check}"] * bool(it.check)
        first = several(it.canaries or 1, "server")
        return f"{first} first{', held for ' + ' and '.join(until) if until else ''}, then {_rolling(it)}"
    return "atomically" if it.kind == UpdateStrategy.Kind.ATOMIC else "all at once"


def _rolling(it: UpdateStrategy) -> str:
    return (
        f"{f'{it.at_a_time} at a time' if it.at_a_time else 'the rest'}, stops after {several(it.max_failures or 1, 'failure')}"
    )


def move(it: Move | None) -> str:
    """Return a move as `from → to STATE`; a dash without a move."""
    return f"{number(it.from_version)} → {it.to_version} {it.state.value}" if it else "–"


def serves(fleet: Fleet) -> str:
    """Return the versions that a fleet's servers take, and the rule that decides it."""
    what = "versions that are not READY yet, where it can" if fleet.serve_ahead else "READY versions only"
    return f"{what} ({fleet.serve_ahead_reason})" if fleet.serve_ahead_reason else what


def binding(fleet: Fleet) -> list[tuple[str, str]]:
    """Return how a fleet of an adapter treats another version of the base, as a title and a text; nothing for other fleets."""
    if not fleet.base:
        return []
    hold = "waits until its base is at the version that it was trained on"
    warn = "is served beside any version of its base, with a warning"
    return [("base", f"{fleet.base}; the adapter {warn if fleet.base_binding == BaseBinding.WARN else hold}")]


def state_badge(server: Server) -> Badge:
    """Return a server's badge: its state with its sleep level, requests in progress, or `ahead`."""
    return server_badge(server.state.value, power=server.power.value, ahead=server.ahead, in_flight=server.in_flight)


def state(server: Server) -> str:
    """Return the text of a server's badge."""
    return state_badge(server).text


def progress(fleet: Fleet, servers: Sequence[Server]) -> str:
    """Return a line about a fleet's progress: its move, and the servers that lag, with reasons."""
    there = sum(s.state == Server.State.SERVING and s.version == fleet.wanted_version for s in servers)
    others = (f"{s.name} {state(s)}" for s in servers if s.state != Server.State.SERVING or s.version != fleet.wanted_version)
    line = f"{fleet.name}: {move(fleet.move)}, {there}/{len(servers)} serve {number(fleet.wanted_version)}"
    return "; ".join(filter(None, (line, *others, fleet.reason)))


def states(servers: Iterable[Server]) -> str:
    """Return a line about the states of servers."""
    return "; ".join(f"{server.name} {state(server)}" for server in servers) or "no servers"


def outcome(fleet: Fleet) -> str:
    """Return a line about a fleet's target, its version and the reason."""
    failed = fleet.move.failed if fleet.move and fleet.move.state == Move.State.DONE else {}
    reasons = (fleet.reason, *(f"servers/{_id(server)} failed: {error}" for server, error in sorted(failed.items())))
    line = f"{fleet.name} targets {target(fleet.target)}, is at {number(fleet.settled_version)}"
    return ": ".join(filter(None, (line, "; ".join(filter(None, reasons)))))


def _arrived(version: Version) -> str:
    received = sum(slot.received_bytes for slot in version.slots)
    return f"{100 * received // max(1, version.size_bytes)} %" if version.state == Version.State.UPLOADING else "–"


def time_of(moment: datetime | None) -> str:
    """Format a time in UTC, to the second; None is the epoch."""
    return (moment or datetime.fromtimestamp(0, UTC)).strftime("%Y-%m-%d %H:%M:%SZ")


def number(version: int) -> str:
    """Format a version's number; a dash for 0, no version."""
    return str(version) if version else "–"


def several(count: int, what: str) -> str:
    """Format a count with its noun, in the plural unless the count is 1."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def event_line(event: Event) -> Text:
    """Return an event as one line: time, subject, what happened, versions and other details, and the reason."""
    line = styled(f"{time_of(event.time)}  {event.subject}  ")
    line.append_text(paint(badge("event", event.what)))
    details = details_text(event.details)
    line.append_text(styled(f" ({details})" if details else ""))
    return line.append_text(styled(f": {event.reason}" if event.reason else ""))


def move_lines(fleet: Fleet, servers: Sequence[Server], width: int) -> list[str]:
    """Return the lines of a fleet's current or last move; none without a move.

    Args:
        fleet: The fleet.
        servers: Its servers.
        width: Columns of the terminal, at which a line is cut off.
    """
    move = fleet.move
    if move is None:
        return []
    version = _destination(move)
    live = [server for server in servers if server.state != Server.State.LOST]
    there = sum(server.version == version and server.state == Server.State.SERVING for server in live)
    bar = _bar(sum(_done(server, version) for server in live) / max(1, len(live)), _BAR)
    head = f"move {move.id}  {number(move.from_version)} → {number(move.to_version)}  {move.state.value}"
    return [
        f"{head}  {bar}  {there} of {len(live)} on version {number(version)}"[:width],
        *_server_lines(move, servers, version, width),
    ]


def _destination(move: Move) -> int:
    """Return the version that servers of a move install: the previous one if the move returns."""
    return move.from_version if move.state in (Move.State.BACK, Move.State.FAILED) else move.to_version


def _done(server: Server, version: int) -> float:
    """Return how far a server is with a version, from 0 to 1: half of it staging, half of it applying."""
    if server.version == version and server.state == Server.State.SERVING:
        return 1.0
    install = server.install
    if install is None or install.version != version:
        return 0.0
    reports = [worker.state for worker in server.workers if worker.install == install.id]
    applied = reports.count(Worker.State.APPLIED)
    return (2 * applied + reports.count(Worker.State.STAGED)) / (2 * max(1, server.world_size))


def _wave(move: Move, server_id: str) -> str:
    """Return the wave in which a server moves: `canary`, a number from 1, or `later` if it may not move yet."""
    admitted, strategy = [_id(server) for server in move.servers], move.strategy
    if strategy.kind in (UpdateStrategy.Kind.ALL_AT_ONCE, UpdateStrategy.Kind.ATOMIC):
        return "1"
    if server_id not in admitted:
        return "later"
    position = admitted.index(server_id)
    canaries = max(1, strategy.canaries) if strategy.kind == UpdateStrategy.Kind.CANARY else 0
    if position < canaries:
        return "canary"
    return str((position - canaries) // (strategy.at_a_time or len(admitted)) + (2 if canaries else 1))


def _server_lines(move: Move, servers: Sequence[Server], version: int, width: int) -> list[str]:
    order = {_id(name): position for position, name in enumerate(move.servers)}
    servers = sorted(servers, key=lambda server: (order.get(_id(server.name), len(order)), server.name))
    failed = {_id(name): error for name, error in move.failed.items()}
    rows = []
    for server in servers:
        name = _id(server.name)
        state = f"{server.state.value}, {failed[name]}" if name in failed else server.state.value
        rows.append((_short(name), _wave(move, name), _bar(_done(server, version), _SERVER_BAR), number(server.version), state))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    return ["  ".join([*(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=False)), row[4]])[:width] for row in rows]


def _bar(share: float, width: int) -> str:
    full = int(share * width)  # full only at the end
    return _FULL * full + _EMPTY * (width - full)


def _id(name: str) -> str:
    return name.rpartition("/")[2]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_ID else f"{name[: _LONGEST_ID - 1]}…"
