"""One step of a server: an event, then everything that follows from it."""

from dataclasses import replace

from resharder.server.fleets.reconciler.control_sides import attached, claimed, detach, lose, reported
from resharder.server.fleets.reconciler.gate import close_gate, leave_aborted, open_gate
from resharder.server.fleets.reconciler.installs import (
    advance_install,
    begin_install,
    change_power,
    drop_unwanted,
    is_at_rest,
    stage,
)
from resharder.server.fleets.reconciler.worker_reports import worker_reported
from resharder.server.state.server import Server, Settings
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reinstalled,
    Reported,
    Ticked,
    VersionsChanged,
    Wanted,
    WorkerReported,
)


def step(server: Server, event: Event, now: float, settings: Settings) -> tuple[Server, tuple[Order, ...]]:
    """Return the state after `event`, and the orders to send, in order."""
    orders: list[Order] = []
    match event:
        case Claimed():
            server = claimed(server, event, now, settings)
        case Attached():
            server = attached(server, event, now, orders)
        case Reported():
            server = reported(server, event, now, settings, orders)
        case Detached():
            server = detach(server, {event.control}, orders)
        case WorkerReported():
            server = worker_reported(server, event.worker, now, settings)
        case VersionsChanged():
            server = _versions_changed(server, event)
        case Ticked():
            server = _ticked(server, now, settings, orders)
        case Wanted():
            again = event.goal.retry != server.goal.retry
            server = replace(server, goal=event.goal, failures={} if again else server.failures)
        case Reinstalled() if is_at_rest(server):
            server = stage(server, server.serving, now, orders, profiled=True)
    acts = server.lost_at is None and bool(server.controls) and server.complete and not server.ending
    if acts and not server.busy_elsewhere(server.controls[0]):
        server = advance_install(drop_unwanted(replace(server, booting=False), now, orders), now, settings, orders)
        server = change_power(close_gate(server, orders), now, settings, orders)
        server = open_gate(server, orders)
        server = begin_install(server, now, settings, orders)
    return leave_aborted(close_gate(server, orders), settings, orders), tuple(orders)


def _versions_changed(server: Server, event: VersionsChanged) -> Server:
    """Record new versions. A failure ahead of READY does not count against the store's copy."""
    fresh = event.ready.keys() & server.ahead.keys() - server.ready.keys()
    there = (event.ready.keys() | event.ahead.keys()) - fresh
    kept = {version: failure for version, failure in server.failures.items() if version in there}
    return replace(server, ready=event.ready, ahead=event.ahead, failures=kept)


def _ticked(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    server = detach(server, {c.nonce for c in server.controls if now > c.seen + settings.lease}, orders)
    if server.controls or server.lost_at is not None or now <= server.seen + server.lease(settings):
        return server
    return lose(server, now)
