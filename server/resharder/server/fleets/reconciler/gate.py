"""The gate: when it opens, and when it closes."""

from dataclasses import replace
from typing import Any

from resharder.server.state.server import ASLEEP, Control, Install, Server, Settings
from resharder.server.state.server_events import Order
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power


def closing(server: Server) -> dict[str, Any]:
    """Return the fields that change when control sides are ordered to close the gate."""
    controls = tuple(replace(control, closing=True) for control in server.controls)
    return {"opened": 0, "resumed": False, "lingers": server.opened or server.lingers, "controls": controls}


def hold_order(install: Install, control: Control) -> Order:
    """Return the order to hold requests for an install rather than refuse them."""
    return Order(
        control.nonce, server_pb2.Order.CLOSE, install.id, install.version, f"version {install.version} is being installed"
    )


def close_gate(server: Server, orders: list[Order]) -> Server:
    """Close the gate, unless the server is awake, in service, and every worker has the version that it serves."""
    kept = server.agreed == server.opened and server.power == Power.AWAKE and server.change is None
    if not server.opened or (kept and server.goal.in_service and not server.goal.leaves):
        return server
    return close(server, closed_because(server) if kept else f"not every worker holds version {server.opened}", orders)


def leave_aborted(server: Server, settings: Settings, orders: list[Order]) -> Server:
    """Close the gate on an ABORTED version that was served ahead, if no successor can be installed."""
    lost = server.opened and not server.serves(server.opened) and server.wanted in server.ready
    if not lost or server.attempts(server.wanted) < settings.attempts:
        return server
    return close(server, f"version {server.opened} will not be READY, and no other can be installed", orders)


def close(server: Server, reason: str, orders: list[Order]) -> Server:
    """Order all control sides to close the gate."""
    orders += [Order(control.nonce, server_pb2.Order.CLOSE, reason=reason) for control in server.controls]
    return replace(server, **closing(server))


def closed_because(server: Server) -> str:
    """Return the reason of an order to close the gate, for clients that are refused."""
    if server.goal.power != Power.AWAKE:
        return "an operator put it to sleep"
    if server.goal.leaves:
        return server.goal.leaves
    return "drained for maintenance" if not server.goal.open else "its version is not confirmed yet"


def went_half_way(server: Server) -> bool:
    """Return whether an install, rather than a sleep at level 2, left workers torn."""
    by_sleep = Power.ASLEEP_2 in (server.goal.power, server.power) or server.power == Power.WEIGHTS_AWAKE
    return bool(server.torn) and not by_sleep and not (server.change is not None and server.change.power in ASLEEP)


def open_gate(server: Server, orders: list[Order]) -> Server:
    """Order all control sides to open the gate, if every worker has a version that the goal permits, awake."""
    held = server.agreed
    if server.opened or not server.serves(held) or server.differs or not server.goal.permits(held):
        return server
    if server.power not in (Power.AWAKE, Power.POWER_UNSPECIFIED) or server.change is not None:
        return server
    controls = tuple(replace(control, closing=False) for control in server.controls)
    failures = {version: failure for version, failure in server.failures.items() if version != held}
    server = replace(server, opened=held, confirmed=held, resumed=False, controls=controls, failures=failures)
    server = replace(server, opened_by=_opening(server))
    orders += [resume_order(server, control) for control in server.controls if not server.busy_elsewhere(control)]
    return server


def _opening(server: Server) -> str:
    install = server.install
    fits = install is not None and install.state == resources_pb2.Install.COMMITTED and install.version == server.opened
    return install.id if install is not None and fits else f"{server.life}-0"


def resume_order(server: Server, control: Control) -> Order:
    """Return the order to open the gate on `opened` and, for a paused leader, to resume the engine."""
    bound = server.goal.bound.get(server.opened, 0)
    return Order(control.nonce, server_pb2.Order.RESUME, server.opened_by, server.opened, base_version=bound)
