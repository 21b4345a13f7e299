"""Gates that may still be open on an earlier version than the one that the daemon ordered."""

from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Server, Settings, Worker
from resharder.server.state.server_events import Attached, Event, Reported, VersionsChanged, WorkerReported
from resharder.v1 import resources_pb2, server_pb2


def after(server: Server, *events: Event) -> Server:
    """Return the server after events at time 1."""
    for event in events:
        server, _ = step(server, event, 1.0, Settings())
    return server


def serving() -> Server:
    """Return a server whose only control side, `a`, has resumed on version 5."""
    held = Worker(0, resources_pb2.Worker.BOOTED, 5, process="p", fingerprint="five")
    server = after(
        Server("s", "policy", "policy", "life", 0.0), VersionsChanged({5: "five"}), Attached("a", 1), WorkerReported(held)
    )
    assert server.opened == 5
    return after(server, Reported("a", server.opened_by, server_pb2.Order.RESUME))


def test_a_control_side_that_returns_with_its_gate_open_lingers_until_it_has_resumed() -> None:
    """Found by simulation: it lingered for ever, and the fleet's move did not end."""
    server = after(serving(), Attached("b", 1, serving=2))
    assert server.shown == {2, 5}
    server = after(server, Reported("b"))
    assert server.shown == {2, 5}
    server = after(server, Reported("b", server.opened_by, server_pb2.Order.RESUME))
    assert server.shown == {5}


def test_a_control_side_that_cannot_resume_or_has_resumed_on_an_earlier_order_still_lingers() -> None:
    server = after(serving(), Attached("b", 1, serving=2))
    for report in (
        Reported("b", server.opened_by, server_pb2.Order.RESUME, ok=False),
        Reported("b", "another", server_pb2.Order.RESUME),
    ):
        assert after(server, report).shown == {2, 5}
