"""What an operator reads of an install that fails in each of its phases, whatever arrives first."""

from dataclasses import replace

import pytest
from resharder.server.fleets.explain import explain
from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Server, Worker
from resharder.server.state.server_events import (
    Attached,
    Detached,
    Event,
    Reported,
    Ticked,
    VersionsChanged,
    WorkerReported,
)
from resharder.v1 import resources_pb2, server_pb2

from tests.support.reconciler_versions import SETTINGS, fingerprint, serving, versions

DIGESTS = "InstallError: a digest differs: model.norm.weight"
ONCE = f"version 2 failed once: worker 1: {DIGESTS}"
HALF_WAY = (
    "out of service: version 2 could not be installed (attempt 1 of 3): {}; returning to version 1: staging, 0 of 2 workers done"
)


def staging() -> Server:
    """A server of two workers that serves version 1 and stages version 2 as install `life-1`."""
    return step(serving(1), VersionsChanged(versions(1, 2)), 10, SETTINGS)[0]


def applying() -> Server:
    """The same server, ordered to apply version 2."""
    return after(staging(), *(worker(rank, resources_pb2.Worker.STAGED) for rank in range(2)))


def worker(rank: int, state: resources_pb2.Worker.State, error: str = "", *, version: int = 2) -> WorkerReported:
    shown = version if state == resources_pb2.Worker.APPLIED else 0
    return WorkerReported(Worker(rank, state, shown, "life-1", error, f"p{rank}", fingerprint(shown)))


def after(server: Server, *events: Event, now: float = 10) -> Server:
    for event in events:
        server, _ = step(server, event, now, SETTINGS)
    return server


def outcome(kind: server_pb2.Order.Kind, error: str = "", *, workers_failed: bool = False) -> Reported:
    return Reported("a", "life-1", kind, ok=not error, error=error, workers_failed=workers_failed)


def read(server: Server, now: float = 10) -> str:
    return explain(server, now, SETTINGS)


@pytest.mark.parametrize("outcome_first", [True, False])
def test_a_worker_that_refuses_to_stage_is_named_with_its_error(outcome_first: bool) -> None:
    both: list[Event] = [
        outcome(server_pb2.Order.STAGE, f"worker 1: {DIGESTS}", workers_failed=True),
        worker(1, resources_pb2.Worker.FAILED, DIGESTS),
    ]
    assert read(after(staging(), *(both if outcome_first else both[::-1]))) == f"serving version 1; {ONCE}; tries again in 1 s"


def test_a_worker_that_fails_while_it_stages_is_named_with_its_error() -> None:
    failed = after(staging(), outcome(server_pb2.Order.STAGE), worker(1, resources_pb2.Worker.FAILED, DIGESTS))
    assert read(failed) == f"serving version 1; {ONCE}; tries again in 1 s"


@pytest.mark.parametrize("outcome_first", [True, False])
def test_a_worker_that_fails_to_apply_is_named_with_its_error(outcome_first: bool) -> None:
    both: list[Event] = [
        outcome(server_pb2.Order.APPLY, f"worker 1: {DIGESTS}", workers_failed=True),
        worker(1, resources_pb2.Worker.FAILED, DIGESTS),
    ]
    failed = after(applying(), *(both if outcome_first else both[::-1]))
    assert failed.failures[2].error == f"worker 1: {DIGESTS}"
    assert read(failed) == HALF_WAY.format(f"worker 1: {DIGESTS}")


def test_of_a_worker_whose_report_does_not_arrive_the_control_side_tells_the_error() -> None:
    waits = after(applying(), outcome(server_pb2.Order.APPLY, f"worker 1: {DIGESTS}", workers_failed=True), Ticked())
    assert read(waits) == "not serving; applying version 2, 0 of 2 workers done"
    failed = after(waits, Reported("a"), Ticked(), now=15.5)
    assert failed.failures[2].error == f"worker 1: {DIGESTS}"


@pytest.mark.parametrize("kind", [server_pb2.Order.STAGE, server_pb2.Order.APPLY])
def test_what_the_control_side_could_not_do_is_told_as_its_own(kind: server_pb2.Order.Kind) -> None:
    server = staging() if kind == server_pb2.Order.STAGE else applying()
    failed = after(server, outcome(kind, "TimeoutError: the engine did not pause"))
    verb = server_pb2.Order.Kind.Name(kind).lower()
    assert failed.failures[2].error == f"the control side could not {verb} it: TimeoutError: the engine did not pause"
    error = failed.failures[2].error
    if kind == server_pb2.Order.STAGE:
        assert read(failed) == f"serving version 1; version 2 failed once: {error}; tries again in 1 s"
    else:
        assert read(failed) == HALF_WAY.format(error)


def test_a_worker_that_applied_another_version_is_named() -> None:
    failed = after(replace(applying(), ready=versions(1, 2, 3)), worker(1, resources_pb2.Worker.APPLIED, version=3))
    assert failed.failures[2].error == "worker 1 applied version 3 instead"


@pytest.mark.parametrize(
    ("server", "error"),
    [
        (staging(), "staging took longer than 50 s; done: workers [0]"),
        (applying(), "applying took longer than 50 s; done: workers []"),
    ],
)
def test_a_step_that_takes_too_long_names_the_workers_that_are_done(server: Server, error: str) -> None:
    begun = after(server, worker(0, resources_pb2.Worker.STAGED))
    assert after(begun, Reported("a"), Ticked(), now=61).failures[2].error == error


def test_a_worker_that_another_process_has_replaced_is_named() -> None:
    other = WorkerReported(Worker(1, resources_pb2.Worker.BOOTED, 1, process="another", fingerprint=fingerprint(1)))
    assert after(staging(), other).install.error == "worker 1 ended, and another process has taken its place"  # type: ignore[union-attr]


def test_other_workers_than_before_end_an_install() -> None:
    resized = after(staging(), Attached("a", 1))
    assert resized.ended is not None
    assert resized.ended.error == "the server now has 1 workers"


def test_a_server_that_is_lost_in_an_install_ends_it() -> None:
    lost = after(after(applying(), Detached("a")), Ticked(), now=30)
    assert lost.ended is not None
    assert lost.ended.error == "the server's lease ended"
    assert read(lost, 30) == "its control side has been silent for 30 s"


def test_an_engine_that_does_not_resume_is_told_with_the_version() -> None:
    applied = after(
        applying(), *(worker(rank, resources_pb2.Worker.APPLIED) for rank in range(2)), outcome(server_pb2.Order.APPLY)
    )
    failed = after(applied, outcome(server_pb2.Order.RESUME, "EngineDeadError: the engine has ended"))
    assert failed.failures[2].error == "could not resume on version 2: EngineDeadError: the engine has ended"
