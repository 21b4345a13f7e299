"""Servers and fleets for display: their states, and why each is in its state, in one sentence."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from resharder.converters.units import size_text
from resharder.server.fleets.reconciler.gate import went_half_way
from resharder.server.fleets.reconciler.installs import target, why_not_ahead
from resharder.server.fleets.updates import latest, wanted
from resharder.server.state.fleet import Fleet, Move, View
from resharder.server.state.server import ASLEEP, Failure, Server, Settings
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Power

_GOING = {
    Power.AWAKE: "it is waking up",
    Power.WEIGHTS_AWAKE: "it is waking its weights up",
    Power.ASLEEP_1: "it is going to sleep at level 1",
    Power.ASLEEP_2: "it is going to sleep at level 2",
}


@dataclass(frozen=True)
class ServerView:
    """A server for display. Times are in seconds since 1970."""

    server: Server
    state: int
    reason: str
    lease_expires: float
    to_wall: float
    """Seconds to add to the reconciler's times."""


@dataclass(frozen=True)
class FleetView:
    """A fleet for display. `moving_for` is in seconds, since the current move began."""

    fleet: Fleet
    wanted_version: int
    servers: tuple[str, ...]
    reason: str
    moving_for: float = 0.0
    returning: tuple[str, ...] = ()
    base: str = ""


def state_of(server: Server) -> int:
    """Return the value of the protocol's `Server.State`."""
    install = server.install
    if server.lost_at is not None:
        return resources_pb2.Server.LOST
    if install is not None and install.state == resources_pb2.Install.APPLYING:
        return resources_pb2.Server.APPLYING
    staging = install is not None and install.state == resources_pb2.Install.STAGING
    if server.controls and (server.power not in (Power.AWAKE, Power.POWER_UNSPECIFIED) or _goes_to_sleep(server)):
        return resources_pb2.Server.ASLEEP
    if server.agreed and not server.opened and not server.goal.open:
        return resources_pb2.Server.DRAINED
    waits = server.agreed and not server.opened and not server.goal.permits(server.agreed)
    if waits or (server.staged and not server.goal.apply):
        return resources_pb2.Server.WAITING
    if server.opened and server.resumed:
        return resources_pb2.Server.STAGING if staging else resources_pb2.Server.SERVING
    if server.torn:
        return resources_pb2.Server.FAILED
    if server.opened:
        return resources_pb2.Server.APPLYING if server.installs else resources_pb2.Server.BOOTING
    broken = any(worker.state == resources_pb2.Worker.FAILED for worker in server.workers.values())
    if not staging and (broken or (server.complete and server.failures)):
        return resources_pb2.Server.FAILED
    return resources_pb2.Server.BOOTING


def _goes_to_sleep(server: Server) -> bool:
    return server.change is not None and server.change.power in ASLEEP


def explain(server: Server, now: float, settings: Settings) -> str:
    """Return why a server is in `state_of(server)`, and what it waits for."""
    if server.lost_at is not None:
        booting = "its claim was not renewed" if server.renews else "no control side attached"
        who = "its control side has been silent" if server.attached else booting
        return f"{server.failure}, {now - server.seen:.0f} s ago" if server.failure else f"{who} for {now - server.seen:.0f} s"
    if server.ending:
        why = server.install.error if server.install is not None else ""
        return f"{_serving(server, settings)}it is ending, to start again with the version's config: {why}"
    if not server.controls and server.attached:
        left = max(0.0, server.seen + settings.lease - now)
        if server.left:
            return f"{_serving(server, settings)}its API servers have ended; it is forgotten in {left:.0f} s, when its lease ends"
        if server.failure:
            return f"{server.failure}; it is LOST in {left:.0f} s, when its lease ends"
        return f"{_serving(server, settings)}no control side is attached; its lease ends in {left:.0f} s"
    return _serving(server, settings) + _doing(server, now, settings) + _slow_reads(server) + _warnings(server)


def _slow_reads(server: Server) -> str:
    """Return why workers read versions in another way than the best one; empty if none does."""
    for rank, worker in sorted(server.workers.items()):
        if worker.transport_reason:
            way = "by gRPC" if worker.transport == "grpc" else "by HTTP from the daemon"
            return f"; worker {rank} read its version {way}: {worker.transport_reason}"
    return ""


def _warnings(server: Server) -> str:
    """Return the goal's warning, and the refusals that workers' environments have turned into warnings, each once."""
    found: dict[str, int] = {}
    for rank, worker in sorted(server.workers.items()):
        for text in worker.warnings:
            found.setdefault(text, rank)
    texts = [f"worker {rank}: {text}" for text, rank in found.items()]
    return "".join(f"; {text}" for text in [server.goal.warning, *texts] if text)


def _serving(server: Server, settings: Settings) -> str:
    if server.controls and server.power not in (Power.AWAKE, Power.POWER_UNSPECIFIED):
        return {
            Power.ASLEEP_1: f"asleep at level 1{_released(server)}; ",
            Power.ASLEEP_2: f"asleep at level 2{_released(server)}; ",
            Power.WEIGHTS_AWAKE: "its weights are awake, its KV cache is not; ",
        }[server.power]
    if not server.opened and server.controls and not server.goal.open:
        left = sum(control.in_flight for control in server.controls)
        requests = "1 request is" if left == 1 else f"{left} requests are"
        return "drained for maintenance; " + (f"{requests} still being answered; " if left else "")
    if server.opened:
        ahead = f" ahead of READY{_way(server)}" if server.unproven else ""
        return f"serving version {server.opened}{ahead}; " if server.resumed else f"opening the gate on version {server.opened}; "
    if _goes_to_sleep(server):
        return "not serving; "
    if server.altered:
        rank, found = min(server.altered.items())
        return f"not serving, worker {rank}: {found}; "
    if not _half_way(server):
        return "not serving; " + _stranger(server)
    if not server.failures:
        return "out of service: an install was not completed; " + _stranger(server)
    version, failure = _latest_failure(server)
    within = failure.count <= settings.attempts
    attempts = f"attempt {failure.count} of {settings.attempts}" if within else f"{failure.count} attempts"
    return f"out of service: version {version} could not be installed ({attempts}): {failure.error}; {_stranger(server)}"


def _released(server: Server) -> str:
    """Return what the workers' sleep released, as measured, as part of a sentence."""
    measured = [worker.released_bytes for worker in server.workers.values() if worker.released_bytes is not None]
    if not measured:
        return ""
    return f", {size_text(sum(measured))} released" if sum(measured) else ", but vLLM released no memory"


def _way(server: Server) -> str:
    """Return the state of a version that is served ahead, as part of a sentence."""
    if server.differs:
        return f", and the store's copy differs: {server.differs}"
    if server.opened in server.ready:
        return ", being compared with the store's copy"
    return "" if server.serves(server.opened) else ", it will not become READY"


def _stranger(server: Server) -> str:
    """Return the error of the first worker that has a version of another store, as part of a sentence."""
    workers = sorted(server.workers.items())
    errors = [
        f"worker {rank}: {worker.error}; "
        for rank, worker in workers
        if worker.state == resources_pb2.Worker.EMPTY and worker.error
    ]
    return errors[0] if errors else ""


def _half_way(server: Server) -> bool:
    return went_half_way(server) and not (server.install is not None and server.install.state == resources_pb2.Install.APPLYING)


def _doing(server: Server, now: float, settings: Settings) -> str:
    missing = [rank for rank in range(server.world_size) if rank not in server.workers]
    if not server.controls:
        return f"waits for its control side; {len(server.workers)} workers have reported"
    if missing:
        return f"waits for workers {_few(missing)} of {server.world_size}"
    install = server.install
    if server.change is not None:
        return _GOING[server.change.power]
    if server.change_failed is not None and now < server.change_failed.retry_at:
        return f"{server.change_failed.error}; tries again in {server.change_failed.retry_at - now:.0f} s"
    if server.power in ASLEEP and server.goal.power in ASLEEP:
        return "asleep by order" + (f"; version {server.wanted} is installed at wake" if target(server, settings) else "")
    if server.staged and not server.goal.apply:
        return f"version {server.staged} is staged; {server.goal.why}"
    if install is not None and install.active:
        done = resources_pb2.Worker.STAGED if install.state == resources_pb2.Install.STAGING else resources_pb2.Worker.APPLIED
        ready = [
            w for w in server.workers.values() if w.install == install.id and w.state in (done, resources_pb2.Worker.APPLIED)
        ]
        what = "staging" if install.state == resources_pb2.Install.STAGING else "applying"
        ready_text = f"{len(ready)} of {server.world_size} workers done"
        if not server.failures:
            return f"{what} version {install.version}, {ready_text}"
        if _half_way(server):  # the failure is in `_serving`
            again = "trying again" if install.version in server.failures else f"returning to version {install.version}"
            return f"{again}: {what}, {ready_text}"
        return f"{what} version {install.version}, {ready_text} after: {_last_failure(server)}"
    return _idle(server, now, settings)


def _idle(server: Server, now: float, settings: Settings) -> str:
    if busy := server.controls[0].busy:
        return f"its control side is still at install {busy}"
    if not server.ready:
        return f"model {server.model} has no READY version"
    if not server.opened and server.agreed and server.goal.open and not server.goal.permits(server.agreed):
        return f"holds version {server.agreed} and may not serve it yet; {server.goal.why or 'the fleet serves another version'}"
    if server.is_ahead(server.wanted) and server.wanted != server.agreed and (why := why_not_ahead(server, server.wanted)):
        return f"waits for version {server.wanted} to be READY: {why}"
    if server.opened and server.opened == server.newest:
        return "it is the newest"
    version = target(server, settings)
    if server.opened and not version and not server.failures:
        return server.goal.why or "it is the fleet's target"
    failed = f"{_last_failure(server)}; " if server.failures and not _half_way(server) else ""  # else `_serving` has it
    if version and version in server.failures:
        return f"{failed}tries again in {max(0.0, server.failures[version].retry_at - now):.0f} s"
    if server.failures:
        return f"{failed}waits for a newer version"
    if version:
        return f"version {version} is next"
    return server.goal.why or (f"holds version {server.agreed}" if server.agreed else "the fleet has no target")


def _latest_failure(server: Server) -> tuple[int, Failure]:
    return max(server.failures.items(), key=lambda item: item[1].retry_at)


def _last_failure(server: Server) -> str:
    version, failure = _latest_failure(server)
    often = "once" if failure.count == 1 else f"{failure.count} times, last"
    return f"version {version} failed {often}: {failure.error}"


def _few(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", …" if len(ranks) > 8 else "")


def explain_fleet(fleet: Fleet, view: View) -> str:
    """Return why a fleet is at its version."""
    move = fleet.moving
    if view.settling:
        return "the daemon has just started; it waits for its servers to come back"
    if move is not None:
        return _explain_move(move, view)
    refused = "".join(f"; version {version} is refused: {why}" for version, why in sorted(fleet.refused.items()))
    match fleet.target.kind:
        case resources_pb2.VersionTarget.NONE:
            return f"stays at version {fleet.settled}" if fleet.settled else "has no version to serve"
        case resources_pb2.VersionTarget.NUMBER if fleet.target.version != fleet.settled:
            why = "is refused" if fleet.target.version in fleet.refused else "is not READY"
            return f"its target is version {fleet.target.version}, which {why}{refused}"
        case resources_pb2.VersionTarget.NUMBER:
            return f"pinned to version {fleet.target.version}{_except(fleet, view)}{refused}"
    if not view.ready:
        return f"model {fleet.model} has no READY version"
    if fleet.settled in view.ahead:
        return f"at version {fleet.settled}, ahead of READY{refused}"
    newest = latest(fleet, replace(view, ahead=frozenset()), fleet.settled)
    if newest and newest != fleet.settled and wanted(fleet, view) == fleet.settled:
        left = fleet.rest_left(view.now)
        return f"version {newest} is READY and due in {left:.0f} s: at most one move in {fleet.target.every_seconds:g} s{refused}"
    newest = max(view.skipped & view.ready - fleet.refused.keys(), default=0)
    skipped = f"; version {newest} is skipped: `update {newest}` serves it" if newest > fleet.settled else ""
    return f"at its target version{_except(fleet, view)}{skipped}{refused}"


def _except(fleet: Fleet, view: View) -> str:
    """Return which servers have another version than the fleet, or none because an install failed; empty for none."""
    version = fleet.settled
    found = [
        id
        for id, server in view.servers.items()
        if server.confirmed != version and (server.confirmed or version in server.failures)
    ]
    if len(found) > 1:
        return f", except {len(found)} servers"
    return f", except {_named(found)}" if found else ""


def explain_serve_ahead(fleet: Fleet) -> str:
    """Return the rule by which a fleet serves versions ahead of READY, or does not."""
    if fleet.serve_ahead is not None:
        return "set by an operator"
    if fleet.max_skew:
        return f"default of a fleet with a skew bound of {fleet.max_skew}"
    bound = " without a skew bound" if fleet.serves_ahead else ""
    return f"default of a fleet that moves {resources_pb2.UpdateStrategy.Kind.Name(fleet.strategy.kind)}{bound}"


def _named(ids: Iterable[str]) -> str:
    """Return servers by their resource names: an id alone may be any word, such as `left`."""
    return ", ".join(f"servers/{id}" for id in ids)


def _explain_move(move: Move, view: View) -> str:
    there = sum(server.serving == move.to for server in view.servers.values())
    ahead = " ahead of READY" if move.to in view.ahead else ""
    way = f"from version {move.back_to or '–'} to {move.to}{ahead}, {there} of {len(view.servers)} servers there"
    why = f" ({move.reason})" if move.reason else ""
    match move.state:
        case resources_pb2.Move.HOLDING:
            left = move.hold_left(view.now)
            waits = [
                f"for another {left:.0f} s" if left else "",
                "for an operator's approval" if move.strategy.approval and not move.approved else "",
                f"for check {move.strategy.check}" if move.checking else "",
            ]
            canaries = _named(move.canaries)
            return f"{way}; canaries {canaries} serve it and the rest waits {' and '.join(filter(None, waits)) or 'a moment'}"
        case resources_pb2.Move.TRYING:
            return f"{way}; canaries {_named(move.canaries) or '(none is in service)'} go first"
        case resources_pb2.Move.STAGING:
            return f"{way}; all servers stage it before any applies{why}"
        case resources_pb2.Move.APPLYING:
            return f"{way}; all servers apply it before any serves it{why}"
        case resources_pb2.Move.BACK:
            return f"going back to version {move.back_to}: {move.reason}"
        case resources_pb2.Move.STOPPED:
            if move.short:
                return f"{way}; stopped: {move.reason}; it is done when they are back, `approve` ends it without them"
            return f"{way}; stopped: {move.reason}; `approve` goes on, `back` goes back"
    failed = "".join(f"; servers/{id} failed: {error}" for id, error in sorted(move.failed.items()))
    return f"{way}{why}{failed}"
