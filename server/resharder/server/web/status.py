"""Data of the status page, from a snapshot and the journal."""

from collections.abc import Iterator, Sequence
from typing import Any

from resharder.converters.badges import Badge, Health, ServerState, badge, health, publisher_badge, server_badge, trouble
from resharder.converters.event_text import details_text
from resharder.converters.units import size_text
from resharder.server.fleets.explain import FleetView, ServerView
from resharder.server.infra.event_log import Event
from resharder.server.ingest.publisher import PublisherRecord, current
from resharder.server.observability.snapshot import Snapshot
from resharder.server.state.fleet import Move, UpdateStrategy, VersionTarget
from resharder.server.state.server import Install, Server, Settings, Worker
from resharder.server.state.version import UPLOADING, VersionRecord
from resharder.v1 import resources_pb2

_VERSIONS = 12  # newest versions of each model
_PROBLEMS = (resources_pb2.Server.LOST, resources_pb2.Server.FAILED)


def status(now: Snapshot, events: Sequence[Event], **daemon: object) -> dict[str, Any]:
    """Return the data. Times are in seconds since 1970, 0 for none. A badge is {"text", "severity"}."""
    shown = current(publisher for publisher, _ in now.publishers)
    publishers = {publisher.model: (publisher, live) for publisher, live in now.publishers if publisher is shown[publisher.model]}
    return {
        "time": now.time,
        "daemon": daemon,
        "problems": [*map(str, _problems(now))],
        "store": {"used": now.store_used, "limit": now.store_limit, "badge": _store_badge(now)},
        "moving": [*_uploads(now), *_installs(now)],
        "fleets": [_fleet(now, view) for view in sorted(now.fleets, key=lambda view: _rank(now, view))],
        "models": [
            {
                "name": model,
                "base": next((record.base for record in records if record.base), ""),
                "publisher": _publisher(*publishers[model]) if model in publishers else None,
                "versions": [_version(now, record) for record in records[: -_VERSIONS - 1 : -1]],
                "older": max(0, len(records) - _VERSIONS),
            }
            for model, records in now.versions.items()
        ],
        "nodes": [_node(node) for node in now.nodes],
        "events": [_event(event) for event in reversed(events)],
    }


def _problems(now: Snapshot) -> Iterator[str]:
    """Yield a sentence for each problem: of the store, fleets, publishers, versions, and nodes."""
    if now.store_problem:
        yield f"the store is lost: {now.store_problem}"
    for view in now.fleets:
        yield from _fleet_problems(now, view)
    for publisher, live in now.publishers:
        if publisher.shown_state(live) == "REJECTED":
            yield f"model {publisher.model}: job {publisher.job} was rejected: {publisher.error}"
    for model in now.versions:
        yield from (f"{record.name} is {record.reason}" for record in now.not_retired(model))
    for path, size in now.stuck.items():
        yield f"{path} cannot be removed, and takes {size_text(size)} of the store: remove what protects it"
    for node in now.nodes:
        if node.state == resources_pb2.Node.LOST:
            yield f"node {node.name.removeprefix('nodes/')} is LOST: it has not called within its lease"
        for copy in (copy for copy in node.copies if copy.problem and copy.wanted):
            yield f"node {node.name.removeprefix('nodes/')}: {copy.version} does not arrive: {copy.problem}"
    for each in now.following:
        if each.problem:
            what = f"models/{each.model} is not followed" if each.model else "the archive cannot be followed"
            yield f"{what}: {each.problem}"
    for each in now.shortages:
        yield f"{each.version}{' is not READY' if each.waits else ''}: {each.problem}"


def _fleet_problems(now: Snapshot, view: FleetView) -> Iterator[str]:
    group, name = now.servers.get(view.fleet.name, ()), view.fleet.name
    for state in _PROBLEMS:
        if found := {server.server.id: server.reason for server in group if server.state == state}:
            yield trouble(name, resources_pb2.Server.State.Name(state), found, len(group))
    behind = {server.server.id: server.reason for server in group if server.state not in _PROBLEMS and _gave_up(server.server)}
    if behind:
        yield trouble(name, "gave up an install", behind, len(group))
    move = view.fleet.move
    if move is not None and move.state == resources_pb2.Move.STOPPED:
        yield f"fleet {name}: its move has STOPPED: {view.reason}"
    if move is not None and move.state == resources_pb2.Move.BACK:
        yield f"fleet {name}: its move is {resources_pb2.Move.State.Name(move.state)}: {view.reason}"


def _health(now: Snapshot, view: FleetView) -> Health:
    servers = {
        one.server.id: ServerState(
            resources_pb2.Server.State.Name(one.state),
            one.server.opened or one.server.agreed,
            one.server.install is not None and one.server.install.state == resources_pb2.Install.STAGING,
        )
        for one in now.servers.get(view.fleet.name, ())
    }
    move = view.fleet.move
    if move is None:
        return health(servers, view.wanted_version)
    return health(servers, view.wanted_version, resources_pb2.Move.State.Name(move.state), move.failed)


def _rank(now: Snapshot, view: FleetView) -> int:
    """Return the place of a fleet in the list: those that need somebody come first."""
    if any(_fleet_problems(now, view)):
        return 0
    return {"bad": 0, "warn": 1, "busy": 2}.get(_health(now, view).badge.severity, 3)


def _store_badge(now: Snapshot) -> dict[str, str] | None:
    """Return the store's badge; None while it has room."""
    if now.store_problem:
        return _badge(Badge("LOST", "bad"))
    if now.store_used > now.store_limit:
        return _badge(Badge("FULL", "bad"))
    return _badge(Badge("ALMOST FULL", "warn")) if now.without_room() else None


def _badge(badge: Badge) -> dict[str, str]:
    return badge._asdict()


def _uploads(now: Snapshot) -> list[dict[str, Any]]:
    """Return the progress of uploads. Bytes in mapped files count with their slot's seal."""
    found = []
    for records in now.versions.values():
        for record in (record for record in records if record.state == UPLOADING):
            slots = now.arriving[record.name]
            took = max(1e-3, now.time - record.create_time)
            found.append(
                {
                    "kind": "publish",
                    "name": record.name,
                    "badge": _badge(badge("version", record.state)),
                    "step": record.step,
                    "since": record.create_time,
                    "sealed": slots.sealed,
                    "slots": slots.slots,
                    "received": slots.received,
                    "size": slots.size,
                    "bytes_per_second": slots.received / took,
                }
            )
    return found


def _installs(now: Snapshot) -> list[dict[str, Any]]:
    found = []
    for fleet, views in now.servers.items():
        for view in views:
            install = view.server.install
            if install is not None and install.active and view.server.lost_at is None:
                found.append(
                    {
                        "kind": "install",
                        "fleet": fleet,
                        "server": view.server.id,
                        "version": install.version,
                        "badge": _badge(badge("install", resources_pb2.Install.State.Name(install.state))),
                        "since": install.started + view.to_wall,
                        "done": _done(view.server, install),
                        "workers": view.server.world_size,
                    }
                )
    return found


def _done(server: Server, install: Install) -> int:
    """Return the workers that have finished the current half of an install."""
    wanted = (
        (resources_pb2.Worker.STAGED, resources_pb2.Worker.APPLIED)
        if install.state == resources_pb2.Install.STAGING
        else (resources_pb2.Worker.APPLIED,)
    )
    return sum(worker.state in wanted for worker in _about(server, install))


def _about(server: Server, install: Install) -> list[Worker]:
    return [worker for worker in server.workers.values() if worker.install == install.id]


def _fleet(now: Snapshot, view: FleetView) -> dict[str, Any]:
    fleet, lag, found = view.fleet, now.lag(view), _health(now, view)
    group = now.servers.get(fleet.name, ())
    return {
        "name": fleet.name,
        "model": fleet.model,
        "base": view.base,
        "health": {**found._asdict(), "badge": _badge(found.badge)},
        "reason": view.reason,
        "target": _set_target(fleet.target),
        "strategy": _strategy(fleet.strategy),
        "wanted": view.wanted_version,
        "settled": fleet.settled,
        "refused": sorted(fleet.refused),
        "lag": {"versions": lag.versions, "seconds": max(0.0, now.time - lag.since) if lag.since else 0.0},
        "move": _move(fleet.move, group) if fleet.move is not None else None,
        "servers": [_server(server) for server in sorted(group, key=_urgency)],
    }


def _set_target(target: VersionTarget) -> str:
    match target.kind:
        case resources_pb2.VersionTarget.NUMBER:
            return f"version {target.version}"
        case resources_pb2.VersionTarget.NONE:
            return "no other version"
    return "the latest" + (f", at most every {target.every_seconds:g} s" if target.every_seconds else "")


def _strategy(strategy: UpdateStrategy) -> str:
    at_a_time = f"{strategy.at_a_time} at a time" if strategy.at_a_time else "the rest at once"
    return {
        resources_pb2.UpdateStrategy.ALL_AT_ONCE: "all at once",
        resources_pb2.UpdateStrategy.ROLLING: f"rolling, {at_a_time}" if strategy.at_a_time else "rolling",
        resources_pb2.UpdateStrategy.CANARY: f"canary of {max(1, strategy.canaries)}, then {at_a_time}",
        resources_pb2.UpdateStrategy.ATOMIC: "atomically",
    }[strategy.kind]


def _move(move: Move, group: Sequence[ServerView]) -> dict[str, Any]:
    return {
        "state": resources_pb2.Move.State.Name(move.state),
        "badge": _badge(badge("move", resources_pb2.Move.State.Name(move.state))),
        "active": move.active,
        "from": move.back_to,
        "to": move.to,
        "reason": move.reason,
        "started": move.started,
        "ended": move.ended,
        "there": sum(view.server.serving == move.to for view in group),
    }


def _gave_up(server: Server) -> bool:
    return any(failure.count >= Settings.attempts for failure in server.failures.values())


def _urgency(view: ServerView) -> int:
    """Return the place of a server in its list: lost ones, failed ones, others that gave up an install, the rest."""
    if view.state in _PROBLEMS:
        return _PROBLEMS.index(view.state)
    return len(_PROBLEMS) + (not _gave_up(view.server))


def _server(view: ServerView) -> dict[str, Any]:
    server, state = view.server, resources_pb2.Server.State.Name(view.state)
    in_flight = sum(control.in_flight for control in server.controls)
    shown = server_badge(
        state,
        power=resources_pb2.Power.Name(server.power),
        ahead=bool(server.opened) and server.unproven,
        in_flight=in_flight,
    )
    return {
        "id": server.id,
        "state": state,
        "badge": _badge(shown),
        "reason": view.reason,
        "version": server.opened or server.agreed,
        "wanted": server.wanted or server.opened or server.agreed,
        "workers": server.world_size,
        "address": server.controls[0].address if server.controls else "",
        "in_flight": in_flight,
        "install": _install(server, server.install) if server.install is not None else None,
        "verification": _verification(server),
    }


def _verification(server: Server) -> dict[str, Any] | None:
    """Return what the workers' last verifications compared; None before the first one."""
    found = server.verifications
    if not found:
        return None
    return {
        "time": min(one.time.seconds for one in found),
        "compared": sum(one.covered_bytes for one in found),
        "needed": sum(one.total_bytes for one in found),
        "why": "; ".join(dict.fromkeys(reason for one in found for reason in _reasons(one))),
    }


def _reasons(one: resources_pb2.Verification) -> list[str]:
    """Return why a verification has not compared all that the worker needs."""
    return [one.skipped] if one.skipped else [left.reason for left in one.uncompared]


def _install(server: Server, install: Install) -> dict[str, Any]:
    """Return an install. Stage and apply are those of the slowest worker."""
    workers = _about(server, install)
    stage = max((worker.stage_seconds for worker in workers), default=0.0)
    size = sum(worker.needed_bytes for worker in workers)
    apply = max((worker.apply_seconds for worker in workers), default=0.0)
    return {
        "version": install.version,
        "state": resources_pb2.Install.State.Name(install.state),
        "error": install.error,
        "stage_seconds": stage,
        "apply_seconds": apply,
        # A server that was closed or asleep before has no pause of its own: less than its workers took cannot be one.
        "pause_seconds": install.pause_seconds if install.pause_seconds >= apply else 0.0,
        "pause_phases": _pause_phases(install, apply),
        "bytes": size,
        "stage_bytes_per_second": size / stage if stage > 0 else 0.0,
        "transport": ", ".join(sorted({worker.transport for worker in workers} - {""})),
    }


def _pause_phases(install: Install, apply: float) -> dict[str, float]:
    """Return the parts of a pause in seconds, which add up to it: for requests, for workers, and the rest."""
    if not 0.0 < apply <= install.pause_seconds:
        return {}
    taken = {phase: sum(t.seconds for t in install.timings if t.phase == phase) for phase in ("pause", "reset", "resume")}
    left = install.pause_seconds - apply
    stopping = min(left, taken["pause"])
    caches = min(left - stopping, taken["reset"] + taken["resume"])
    return {"stopping requests": stopping, "applying": apply, "resuming": caches, "waiting": left - stopping - caches}


def _publisher(publisher: PublisherRecord, live: int) -> dict[str, Any]:
    return {
        "job": publisher.job,
        "epoch": publisher.epoch,
        "state": publisher.shown_state(live),
        "badge": _badge(publisher_badge(publisher.shown_state(live), publisher.job)),
        "ranks": publisher.world_size,
        "live": live,
        "reason": str(publisher.error or ""),
    }


def _version(now: Snapshot, record: VersionRecord) -> dict[str, Any]:
    return {
        "number": record.number,
        "step": record.step,
        "state": record.state,
        "badge": _badge(badge("version", record.state)),
        "reason": record.reason,
        "size": record.size_bytes,
        "created": record.create_time,
        "ready": record.ready_time,
        "ended": record.end_time,
        "skipped": record.skipped,
        "warnings": record.warnings,
        "base_version": record.base_version,
        "serving": now.serving(record.model, record.number),
    }


def _node(node: resources_pb2.Node) -> dict[str, Any]:
    state = resources_pb2.Node.State.Name(node.state)
    return {
        "id": node.name.removeprefix("nodes/"),
        "state": state,
        "badge": _badge(badge("node", state)),
        "address": node.data_address,
        "used": node.used_bytes,
        "limit": node.capacity_bytes,
        "received": {"daemon": node.received_daemon_bytes, "peer": node.received_peer_bytes},
        "sent": node.sent_bytes,
        "versions": [
            {
                "name": copy.version,
                "held": copy.held_pieces,
                "needed": copy.wanted_pieces,
                "pieces": copy.pieces,
                "wanted": copy.wanted,
                "problem": copy.problem,
                "uploading": copy.uploading,
            }
            for copy in node.copies
        ],
    }


def _event(event: Event) -> dict[str, Any]:
    return {
        "id": event.id,
        "time": event.time,
        "kind": event.kind,
        "subject": event.subject,
        "what": event.what,
        "badge": _badge(badge("event", event.what)),
        "details": details_text(event.details),
        "reason": event.reason,
    }
