"""Changes of power: sleep and wake, one order at a time."""

from dataclasses import replace

from resharder.server.fleets.reconciler.installs import all_ranks, target
from resharder.server.infra.backoff import backoff
from resharder.server.state.server import Change, Control, Failure, OrderKind, Power, Server, Settings
from resharder.server.state.server_events import Order, Reported


def change_power(server: Server, now: float, settings: Settings, orders: list[Order]) -> Server:
    """Order the next change of power, one at a time, with the gate closed and no install in progress."""
    if server.change is not None:
        if now <= server.change.began + settings.install_step:
            return server
        late = Reported("", server.change.id, ok=False, error=f"no answer in {settings.install_step:g} s")
        server = power_changed(server, server.change, late, now, settings)
    power = _next_power(server, now, settings)
    if power is None or server.opened or (server.install is not None and server.install.active):
        return server
    number = server.changes + 1
    server = replace(server, change=Change(f"{server.life}-p{number}", power, now), changes=number)
    if power == Power.ASLEEP_2:
        server = replace(server, torn=all_ranks(server))
    orders.append(power_order(server, server.controls[0]))
    return server


def _next_power(server: Server, now: float, settings: Settings) -> Power | None:
    have, goal = server.power, server.goal.power
    if have == Power.UNKNOWN or (server.change_failed is not None and now < server.change_failed.retry_at):
        return None
    if goal.asleep:
        return None if have.asleep else goal
    if have.asleep:
        return Power.WEIGHTS_AWAKE
    if have == Power.WEIGHTS_AWAKE and goal == Power.AWAKE and server.serves(server.agreed):
        version = target(server, settings)
        waits = version in server.failures and now < server.failures[version].retry_at
        return Power.AWAKE if not version or waits else None
    return None


def power_order(server: Server, leader: Control) -> Order:
    """Return the order of the current change of power."""
    assert server.change is not None
    kind = OrderKind.SLEEP if server.change.power.asleep else OrderKind.WAKE
    return Order(leader.nonce, kind, server.change.id, power=server.change.power, reason="the fleet's power state")


def power_changed(server: Server, change: Change, event: Reported, now: float, settings: Settings) -> Server:
    """End the current change by its outcome. A failure sets the time of the next attempt."""
    if event.ok:
        return replace(server, change=None, change_failed=None, power=change.power)
    count = server.change_failed.count + 1 if server.change_failed else 1
    wait = backoff(count, settings.first_retry, settings.last_retry)
    failed = Failure(count, f"could not go {change.power.name}: {event.error}", now + wait)
    server = replace(server, change=None, change_failed=failed)
    return replace(server, power=event.power) if event.power else server
