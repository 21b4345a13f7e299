"""Events of control sides: claims, attachments, reports, leadership."""

from dataclasses import replace

from resharder.server.fleets.reconciler.gate import close, close_gate, closed_because, hold_order, resume_order, went_half_way
from resharder.server.fleets.reconciler.installs import (
    all_ranks,
    end_install,
    fail,
    note_failure,
    power_changed,
    power_order,
    stage_order,
    why_failed,
)
from resharder.server.state.server import Control, OrderFailure, Server, Settings, processes
from resharder.server.state.server_events import Attached, Claimed, Order, Reported
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power


def claimed(server: Server, event: Claimed, now: float, settings: Settings) -> Server:
    """Apply a claim: assign the boot version, and reset a server whose processes have all ended.

    If they ended in an install, it has failed, although the server is back before its lease ends.
    """
    if not server.attached:
        server = replace(server, seen=now, lost_at=None, failure="", renews=server.renews or event.renews)
    if not event.boot or (server.boot_version in server.ready and (server.booting or server.controls)):
        return server
    if server.controls or (server.booting and not server.boot_version):
        return replace(server, boot_version=server.boots)
    # A server that booted before and has no process left: the same id starts again.
    crashed = {}
    if server.install is not None and server.changes_now:
        version, error = server.install.version, server.failure or _ended_while(server)
        crashed = {version: note_failure(server, version, error, now, settings).failures[version]}
    return Server(
        id=server.id,
        model=server.model,
        fleet=server.fleet,
        life=server.life,
        seen=now,
        renews=event.renews,
        ready=server.ready,
        boot_version=server.boots,
        gone=server.gone | processes(server),
        installs=server.installs,
        failures=crashed,
        goal=server.goal,
        restarts=server.restarts,
        changes=server.changes,
        term=server.term,
    )


def attached(server: Server, event: Attached, now: float, orders: list[Order]) -> Server:
    """Apply the attachment of a control side. The first one leads; each gets the orders that are in effect."""
    control = Control(event.control, event.address, now, event.busy, event.in_flight, closing=bool(event.serving))
    server = replace(server, lingers=event.serving or server.lingers)
    leader = server.controls[0].nonce if server.controls else event.control
    if any(c.nonce == event.control for c in server.controls):
        controls = tuple(control if c.nonce == event.control else c for c in server.controls)
    else:
        controls = (*server.controls, control)
    if event.world_size != server.world_size:
        server = _resized(server, event.world_size, now, orders)
    server = replace(server, controls=controls, seen=now, attached=True, lost_at=None, left=False, failure="", ending=False)
    server = replace(server, address=event.address or server.address, passes_kv=event.passes_kv)
    server = _powered(server, event.control, event.power)
    orders.append(Order(event.control, server_pb2.Order.RENEWED))
    if event.term > server.term:  # assigned by a daemon on another store; the engine refuses lower terms
        server = replace(server, term=event.term)
        if event.control != leader:
            server = _lead(server, leader, orders)
    return _greet(server, control, orders, leads=event.control == leader)


def _lead(server: Server, leader: str, orders: list[Order]) -> Server:
    """Begin a new term; the engine refuses orders of earlier ones."""
    orders.append(Order(leader, server_pb2.Order.LEAD))
    return replace(server, term=server.term + 1)


def _powered(server: Server, control: str, power: Power) -> Server:
    """Record the power state that the leader reports, except during a change. Dropped weights count as torn."""
    if control != server.controls[0].nonce or not power or server.change is not None:
        return server
    dropped = power == Power.ASLEEP_2 and server.power != Power.ASLEEP_2
    return replace(server, power=power, torn=all_ranks(server) if dropped else server.torn)


def _resized(server: Server, world_size: int, now: float, orders: list[Order]) -> Server:
    workers = {rank: worker for rank, worker in server.workers.items() if rank < world_size}
    torn = frozenset(rank for rank in server.torn if rank < world_size)
    if server.install is not None and server.install.active:
        server = end_install(server, server.install, f"the server now has {world_size} workers", now)
    return close_gate(replace(server, workers=workers, torn=torn, world_size=world_size), orders)


def _greet(server: Server, control: Control, orders: list[Order], *, leads: bool) -> Server:
    """Send a control side its role and the current orders."""
    if leads:
        server = _lead(server, control.nonce, orders)
    if server.busy_elsewhere(control):
        return server
    install, change = server.install, server.change
    if leads and change is not None and control.busy != change.id:
        orders.append(power_order(server, control))
    if server.opened:
        if server.serves(server.opened):  # else its gate keeps its position
            orders.append(resume_order(server, control))
    elif install is not None and install.state == resources_pb2.Install.APPLYING:
        if not leads:  # a leader gets APPLY below, or executes it: its gate may be closed after a failure
            orders.append(hold_order(install, control))
    elif server.torn:
        reason = "its last install was not completed" if went_half_way(server) else closed_because(server)
        orders.append(Order(control.nonce, server_pb2.Order.CLOSE, reason=reason))
    elif (server.goal.strict or not server.goal.in_service) and not (server.lingers and server.goal.permits(server.lingers)):
        orders.append(Order(control.nonce, server_pb2.Order.CLOSE, reason=closed_because(server)))
    if not leads or install is None or not install.active or control.busy == install.id:
        return server
    if install.state == resources_pb2.Install.STAGING:
        orders.append(stage_order(server, install))
    else:
        orders.append(Order(control.nonce, server_pb2.Order.APPLY, install.id, install.version, profile=install.profiled))
    return replace(server, install=replace(install, control_done=False))


def reported(server: Server, event: Reported, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Apply a renewal, and the outcome of an order if the report has one. A report of an unknown control side is ignored."""
    control = next((c for c in server.controls if c.nonce == event.control), None)
    if control is None:
        return server
    was_busy = server.busy_elsewhere(control)
    idle = bool(event.done) and event.install == control.busy
    closed = event.done in (server_pb2.Order.CLOSE, server_pb2.Order.APPLY, server_pb2.Order.SLEEP)
    opened = event.done == server_pb2.Order.RESUME and event.ok and bool(server.opened) and event.install == server.opened_by
    control = replace(
        control,
        seen=now,
        busy="" if idle else control.busy,
        in_flight=event.in_flight,
        closing=control.closing and not (closed or opened),
    )
    controls = tuple(control if c.nonce == control.nonce else c for c in server.controls)
    server = replace(server, controls=controls, seen=now)
    server = replace(_powered(server, control.nonce, event.power), lingers=_lingering(server))
    orders.append(Order(control.nonce, server_pb2.Order.RENEWED))
    leads = control.nonce == server.controls[0].nonce
    if event.leaving or event.failure:
        return _ended(server, control, event.failure, now, orders)
    if was_busy and idle:
        return _greet(server, control, orders, leads=leads)
    return _order_done(server, event, now, settings, orders) if leads and event.done else server


def _ended(server: Server, control: Control, failure: str, now: float, orders: list[Order]) -> Server:
    """Detach a control side that ends, with a failure or by an order. Once the last one has, the server has left, or is LOST.

    A server that ends in the middle of a change has not left, unless an operator drained it. Where versions must not mix, it
    is LOST when its lease ends, because clients may still reach a control side of which the daemon has lost sight.
    """
    server = detach(server, {control.nonce}, orders)
    if server.ending:  # to start again on another config, for which its fleet waits
        return server
    failure = failure or server.failure
    if not failure and not server.controls and server.changes_now and server.goal.open:
        failure = _ended_while(server)
    server = replace(server, failure=failure, left=not server.controls and not failure)
    return lose(server, now) if failure and not server.controls and not server.goal.strict else server


def _ended_while(server: Server) -> str:
    if server.change is not None:
        return f"it ended while it changed its power to {Power.Name(server.change.power)}"
    return f"it ended while it installed version {server.install.version if server.install else 0}"


def lose(server: Server, now: float) -> Server:
    """Return the server as LOST. Its install has ended, and no client gets a version from it by order."""
    if server.install is not None and server.install.active:
        server = end_install(server, server.install, server.failure or "the server's lease ended", now)
    return replace(server, lost_at=now, opened=0, resumed=False, lingers=0, change=None, ending=False, restarts=False)


def _order_done(server: Server, event: Reported, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Record the outcome of an order of the leader."""
    install, change = server.install, server.change
    if change is not None and event.install == change.id and event.done in (server_pb2.Order.SLEEP, server_pb2.Order.WAKE):
        return power_changed(server, change, event, now, settings)
    if event.done == server_pb2.Order.RESUME and server.opened and event.install == server.opened_by:
        if not event.ok:
            # The workers are verified, but the engine does not resume: do not serve from it.
            error = f"could not resume on version {server.opened}: {event.error}"
            server = note_failure(server, server.opened, error, now, settings)
            return close_gate(replace(server, torn=all_ranks(server)), orders)
        return replace(_went_on(server, event), resumed=True, restarts=False)
    if install is None or not install.active or event.install != install.id:
        return server
    install = replace(install, timings=event.timings)
    if event.restarting and event.done == server_pb2.Order.STAGE:
        return _restarting(end_install(server, install, event.error, now), orders)
    if not event.ok and event.done in (server_pb2.Order.STAGE, server_pb2.Order.APPLY):
        install = replace(install, order_failed=OrderFailure(event.done, event.error, event.workers_failed, now))
        server = replace(server, install=install)
        error = why_failed(server, install, now)
        return fail(server, install, error, now, settings) if error else server
    if event.done == server_pb2.Order.APPLY and install.state == resources_pb2.Install.APPLYING:
        return replace(server, install=replace(install, control_done=True))
    return server


def _restarting(server: Server, orders: list[Order]) -> Server:
    """Close the gate of a server whose processes end, and wait for them as for a server that boots."""
    server = close(server, "it starts again on another config", orders)
    return replace(server, ending=True, restarts=True, attached=False, renews=False)


def _went_on(server: Server, event: Reported) -> Server:
    """Record the leader's timings of a pause, once; the next install may have begun by then."""
    ended = server.ended
    if server.resumed or ended is None or ended.id != event.install or ended.pause_seconds:
        return server
    ended = replace(ended, pause_seconds=event.pause_seconds, timings=(*ended.timings, *event.timings))
    same = server.install is not None and server.install.id == ended.id
    return replace(server, ended=ended, install=ended if same else server.install)


def detach(server: Server, gone: set[str], orders: list[Order]) -> Server:
    """Remove control sides by nonce. If the leader is among them, the next one leads in a new term."""
    leader = server.controls[0].nonce if server.controls else ""
    controls = tuple(control for control in server.controls if control.nonce not in gone)
    server = replace(server, controls=controls)
    server = replace(server, lingers=_lingering(server) if controls else server.lingers)
    return _greet(server, controls[0], orders, leads=True) if controls and leader in gone else server


def _lingering(server: Server) -> int:
    return server.lingers if any(control.closing for control in server.controls) else 0
