"""Explanations of a server's state."""

from resharder.server.fleets.explain import explain, explain_fleet
from resharder.server.fleets.reconciler.step import step
from resharder.server.state.fleet import VersionTarget
from resharder.server.state.server import Goal, Server, Settings, Worker
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Event,
    Reported,
    VersionsChanged,
    Wanted,
    WorkerReported,
)
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Move, Power, UpdateStrategy

from tests.support.fleet_states import failed, fleet, moving, server, view

SETTINGS = Settings(attempts=3, first_retry=1)


def after(*events: Event) -> Server:
    """A server of one worker that serves version 1, and then `events`."""
    server = Server("s", "m", "m", "life", 0.0, {1: "one"})
    booted = Worker(0, resources_pb2.Worker.BOOTED, 1, process="p0", fingerprint="one")
    begun = (Claimed(boot=True), WorkerReported(booted), Attached("a", 1), Reported("a", "life-0", server_pb2.Order.RESUME))
    for event in (*begun, *events):
        server, _ = step(server, event, 0, SETTINGS)
    return server


def explanation(*events: Event) -> str:
    return explain(after(*events), 0, SETTINGS)


def test_a_server_that_goes_to_sleep_speaks_of_sleep_alone() -> None:
    assert explanation(Wanted(Goal(power=Power.ASLEEP_2))) == "not serving; it is going to sleep at level 2"


def test_a_drained_server_says_what_it_holds() -> None:
    assert explanation(Wanted(Goal(version=1, open=False))) == "drained for maintenance; holds version 1"
    closing = Wanted(Goal(version=1, open=False)), Reported("a", in_flight=1)
    assert explanation(*closing) == "drained for maintenance; 1 request is still being answered; holds version 1"


def test_one_failure_is_said_as_one() -> None:
    newer = VersionsChanged({1: "one", 2: "two"})
    install = after(newer).install
    assert install is not None
    failed = Worker(0, resources_pb2.Worker.FAILED, 2, install.id, "no room", "p0")
    assert explanation(newer, WorkerReported(failed)).startswith(
        "serving version 1; version 2 failed once: worker 0: no room; tries again"
    )


def test_a_server_named_left_is_told_apart_from_the_word() -> None:
    tried = moving(Move.HOLDING, UpdateStrategy.CANARY, servers=("left",), canaries=1)
    assert "; canaries servers/left serve it and the rest waits" in explain_fleet(tried, view([]))
    failed = moving(Move.MOVING, failed={"left": "no room"})
    assert explain_fleet(failed, view([])).endswith("; servers/left failed: no room")


def test_what_a_sleep_released_is_said_as_measured() -> None:
    def asleep(released: int | None) -> str:
        worker = Worker(0, resources_pb2.Worker.EMPTY, process="p0", released_bytes=released)
        goal = Wanted(Goal(power=Power.ASLEEP_2))
        change = after(goal).change
        assert change is not None
        slept = Reported("a", change.id, server_pb2.Order.SLEEP, power=Power.ASLEEP_2)
        return explanation(goal, slept, WorkerReported(worker)).split(";")[0]

    assert asleep(None) == "asleep at level 2"
    assert asleep(0) == "asleep at level 2, but vLLM released no memory"
    assert asleep(60 << 30) == "asleep at level 2, 60.00 GiB released"


def test_a_sleep_that_failed_is_not_reported_as_an_install_that_went_wrong() -> None:
    goal = Wanted(Goal(power=Power.ASLEEP_2))
    change = after(goal).change
    assert change is not None
    failed = Reported("a", change.id, server_pb2.Order.SLEEP, ok=False, error="the engine has ended")
    assert explanation(goal, failed).startswith("not serving; could not go ASLEEP_2: the engine has ended; tries again")


def test_refusals_that_a_workers_environment_allows_are_said_with_it_and_once() -> None:
    allowed = ("allowed by RESHARDER_ALLOW=some: lm_head.weight is not written",)
    worker = Worker(0, resources_pb2.Worker.BOOTED, 1, process="p0", fingerprint="one", warnings=allowed * 2)
    assert explanation(WorkerReported(worker)) == f"serving version 1; it is the newest; worker 0: {allowed[0]}"


def test_a_worker_that_read_by_the_slower_way_is_named_with_the_reason() -> None:
    worker = Worker(
        0, resources_pb2.Worker.BOOTED, 1, process="p0", fingerprint="one", transport="grpc", transport_reason="refused"
    )
    assert explanation(WorkerReported(worker)).endswith("; worker 0 read its version by gRPC: refused")


def test_a_fleet_names_the_servers_that_are_not_at_its_version() -> None:
    servers = [server("done", 2), *(server(f"broken-{at}", 1, failures=failed(2)) for at in range(5))]
    settled = fleet(settled=2)
    assert explain_fleet(settled, view(servers[:1])) == "at its target version"
    assert explain_fleet(settled, view(servers[:2])) == "at its target version, except servers/broken-0"
    pinned = fleet(settled=2, target=VersionTarget(resources_pb2.VersionTarget.NUMBER, 2))
    assert explain_fleet(pinned, view(servers)) == "pinned to version 2, except 5 servers"
