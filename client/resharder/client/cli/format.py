"""Fleets, servers, moves and events in words and as rows of tables."""

from collections.abc import Iterable, Iterator, Sequence

from resharder.client.cli.output import Row, number, several, size, time_of
from resharder.v1 import operator_pb2, resources_pb2

Fleet, Motion, Move, Server, Want = (
    resources_pb2.Fleet,
    resources_pb2.Motion,
    resources_pb2.Move,
    resources_pb2.Server,
    resources_pb2.Want,
)

PUBLISHERS = ("publisher", "state", "ranks", "job")
FLEETS = ("fleet", "model", "wants", "at", "moves", "move", "serving it", "reason")
SERVERS = ("server", "fleet", "state", "serves", "wants", "workers", "apply", "pause", "reason")
VERSIONS = ("model", "version", "state", "step", "size", "ready", "served by", "reason")


def publisher_rows(publishers: Iterable[resources_pb2.Publisher]) -> Iterator[Row]:
    for p in publishers:
        yield p.name, resources_pb2.Publisher.State.Name(p.state), f"{p.registered_slots}/{p.world_size}", p.job


def fleet_rows(fleets: Iterable[resources_pb2.Fleet], servers: Sequence[resources_pb2.Server]) -> Iterator[Row]:
    for f in fleets:
        there = sum(s.fleet == f.name and s.version == f.wanted_version and s.state == Server.SERVING for s in servers)
        wants = f"{want(f.want)} ({f.wanted_version})" if f.want.kind != Want.NUMBER and f.wanted_version else want(f.want)
        serving = f"{there}/{len(f.servers)}"
        yield f.name, f.model, wants, number(f.settled_version), motion(f.motion), move(f.move), serving, f.reason


def server_rows(servers: Iterable[resources_pb2.Server]) -> Iterator[Row]:
    for s in servers:
        apply = max((w.apply_seconds for w in s.workers), default=0)
        yield (
            s.name, s.fleet, state(s), number(s.version), number(s.wanted_version), f"{len(s.workers)}/{s.world_size}",
            f"{apply:.3f} s", f"{s.install.pause_seconds:.3f} s", s.reason or s.install.error,
        )  # fmt: skip


def version_rows(versions: Iterable[resources_pb2.Version]) -> Iterator[Row]:
    for v in versions:
        yield (
            v.model, number(v.number), resources_pb2.Version.State.Name(v.state), str(v.step), size(v.size_bytes),
            time_of(v.ready_time) if v.HasField("ready_time") else _arrived(v),
            _served(v), v.reason,
        )  # fmt: skip


def _served(version: resources_pb2.Version) -> str:
    served = f"{version.servers_serving}/{version.servers_following}"
    if version.state == resources_pb2.Version.READY:
        return served
    return f"{served}, ahead" if version.state == resources_pb2.Version.STAGING and version.servers_serving else "–"


def event_line(event: operator_pb2.Event) -> str:
    details = " ".join(f"{name}={value}" for name, value in sorted(event.details.items()))
    return "  ".join(filter(None, (time_of(event.time), event.subject, event.what, details, event.reason)))


def want(it: resources_pb2.Want) -> str:
    if it.kind == Want.NUMBER:
        return f"version {it.version}"
    if it.kind == Want.LATEST:
        return "latest" + (f", one move in {it.every_seconds:g} s" if it.every_seconds else "")
    return "none"


def motion(it: resources_pb2.Motion) -> str:
    if it.kind == Motion.ROLLING:
        return _rolling(it)
    if it.kind == Motion.CANARY:
        until = [f"{it.hold_seconds:g} s"] * bool(it.hold_seconds) + ["approval"] * it.approval
        until += [f"check {it.check}"] * bool(it.check)
        first = several(it.canaries or 1, "server")
        return f"{first} first{', held for ' + ' and '.join(until) if until else ''}, then {_rolling(it)}"
    return "atomically" if it.kind == Motion.ATOMIC else "all at once"


def _rolling(it: resources_pb2.Motion) -> str:
    return (
        f"{f'{it.at_a_time} at a time' if it.at_a_time else 'the rest'}, stops after {several(it.max_failures or 1, 'failure')}"
    )


def move(it: resources_pb2.Move) -> str:
    return f"{number(it.from_version)} → {it.to_version} {Move.State.Name(it.state)}" if it.id else "–"


def state(server: resources_pb2.Server) -> str:
    name: str = Server.State.Name(server.state)
    if server.state == Server.ASLEEP:
        powers = {
            resources_pb2.ASLEEP_1: ", level 1",
            resources_pb2.ASLEEP_2: ", level 2",
            resources_pb2.WEIGHTS_AWAKE: ", weights awake",
        }
        return name + powers.get(server.power, "")
    if server.ahead and server.state in (Server.SERVING, Server.STAGING):
        return f"{name}, ahead"
    return f"{name}, {server.in_flight} in flight" if server.state == Server.DRAINED and server.in_flight else name


def progress(fleet: resources_pb2.Fleet, servers: Sequence[resources_pb2.Server]) -> str:
    """One line of where a fleet is: its move, and the servers that are not there, with why."""
    live = [s for s in servers if s.state != Server.LOST]
    there = sum(s.state == Server.SERVING and s.version == fleet.wanted_version for s in live)
    others = (f"{s.name} {state(s)}" for s in live if s.state != Server.SERVING or s.version != fleet.wanted_version)
    line = f"{fleet.name}: {move(fleet.move)}, {there}/{len(live)} serve {number(fleet.wanted_version)}"
    return "; ".join(filter(None, (line, *others, fleet.reason)))


def states(servers: Iterable[resources_pb2.Server]) -> str:
    """One line of what servers are at."""
    return "; ".join(f"{server.name} {state(server)}" for server in servers) or "no servers"


def outcome(fleet: resources_pb2.Fleet) -> str:
    """One line of what a fleet wants and why it is where it is."""
    failed = fleet.move.failed if fleet.move.state == Move.DONE else {}
    reasons = (fleet.reason, *(f"failed: {server}: {error}" for server, error in sorted(failed.items())))
    line = f"{fleet.name} wants {want(fleet.want)}, is at {number(fleet.settled_version)}"
    return ": ".join(filter(None, (line, "; ".join(filter(None, reasons)))))


def _arrived(version: resources_pb2.Version) -> str:
    received = sum(slot.received_bytes for slot in version.slots)
    return f"{100 * received // max(1, version.size_bytes)} %" if version.state == resources_pb2.Version.STAGING else "–"
