"""The reconciler of a server, event by event: late and repeated reports, failures, and control sides that attach."""

from dataclasses import replace

import pytest
from resharder.server.fleets.explain import explain, state_of
from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Ahead, Change, Failure, Goal, Install, Server, Worker
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Detached,
    Order,
    Reported,
    Ticked,
    VersionsChanged,
    Wanted,
    WorkerReported,
)
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.reconciler_versions import SETTINGS, STORE, fingerprint, report_worker, serving, versions


@pytest.mark.parametrize(("renews", "lasts"), [(True, SETTINGS.lease), (False, SETTINGS.boot)])
def test_a_boot_lasts_as_long_as_its_claim_and_is_taken_up_again(renews: bool, lasts: float) -> None:
    server, _ = step(Server("s", "m", "m", "life", 0.0, versions(1)), Claimed(boot=True, renews=renews), 0, SETTINGS)
    server, _ = step(server, Ticked(), lasts, SETTINGS)
    assert server.lost_at is None
    lost, _ = step(server, Ticked(), lasts + 1, SETTINGS)
    assert lost.lost_at == lasts + 1
    again, _ = step(lost, Claimed(boot=False, renews=renews), lasts + 2, SETTINGS)
    worker = Worker(0, resources_pb2.Worker.BOOTED, 1, process="p0", fingerprint=fingerprint(1))
    reported, _ = step(lost, WorkerReported(worker), lasts + 2, SETTINGS)
    assert (again.lost_at, again.boot_version) == (None, 1)
    assert reported.lost_at is None


def test_a_control_side_has_its_whole_lease_and_no_server_with_one_is_lost() -> None:
    served = serving(1)
    kept, _ = step(served, Ticked(), served.controls[0].seen + SETTINGS.lease, SETTINGS)
    late, _ = step(served, Ticked(), served.controls[0].seen + SETTINGS.lease + 0.1, SETTINGS)
    assert (kept.controls, late.controls) == (served.controls, ())
    old, _ = step(replace(served, seen=-SETTINGS.boot), Ticked(), served.controls[0].seen + 0.1, SETTINGS)
    assert old.lost_at is None


@pytest.mark.parametrize("state", [resources_pb2.Install.STAGING, resources_pb2.Install.COMMITTED])
def test_a_server_is_lost_with_its_gate_its_change_and_the_install_that_was_active(state: resources_pb2.Install.State) -> None:
    install = Install("life-1", 2, state, 0.0, 0.0)
    change = Change("life-2", Power.ASLEEP_1, 0.0)
    known = replace(serving(1), controls=(), lingers=1, change=change, install=install)
    lost, _ = step(known, Ticked(), 1000.0, SETTINGS)
    assert (lost.lost_at, lost.opened, lost.resumed, lost.lingers, lost.change) == (1000.0, 0, False, 0, None)
    ended = replace(install, state=resources_pb2.Install.FAILED, error="the server's lease ended", ended=1000.0)
    assert lost.install == (install if state == resources_pb2.Install.COMMITTED else ended)


def applying() -> Server:
    """It served version 1, and applies version 2 as install life-1."""
    server, _ = step(serving(1), VersionsChanged(versions(1, 2)), 1, SETTINGS)
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.STAGED, 2, "life-1")
    assert server.install is not None
    assert (server.install.state, server.opened) == (resources_pb2.Install.APPLYING, 0)
    return server


def committed() -> Server:
    server = applying()
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.APPLIED, 2, "life-1")
    assert server.opened == 0, "the control side has not said that it is done"
    server, orders = step(server, Reported("a", "life-1", server_pb2.Order.APPLY), 1, SETTINGS)
    assert [order.kind for order in orders] == [server_pb2.Order.RENEWED, server_pb2.Order.RESUME]
    return server


def test_a_late_staged_does_not_undo_what_was_applied() -> None:
    server = report_worker(applying(), 0, resources_pb2.Worker.APPLIED, 2, "life-1")
    assert report_worker(server, 0, resources_pb2.Worker.STAGED, 2, "life-1") == server


def test_a_late_report_of_an_earlier_version_changes_nothing() -> None:
    server = committed()
    assert report_worker(server, 0, resources_pb2.Worker.BOOTED, 1, "") == server
    assert report_worker(server, 0, resources_pb2.Worker.APPLIED, 1, "life-0") == server


def test_a_process_that_another_replaced_is_not_heard_again() -> None:
    server = report_worker(committed(), 0, resources_pb2.Worker.BOOTED, 1, "", process="another")
    assert server.opened == 0
    assert report_worker(server, 0, resources_pb2.Worker.APPLIED, 2, "life-1") == server


def test_a_late_report_of_a_servers_former_life_does_not_take_the_place_of_a_worker_that_has_booted_since() -> None:
    server, _ = step(serving(1), Detached("a"), 1, SETTINGS)
    server, _ = step(server, Claimed(boot=True), 1, SETTINGS)
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.BOOTED, 1, "", process=f"q{rank}")
    assert report_worker(server, 1, resources_pb2.Worker.BOOTED, 1, "") == server


def test_a_boot_claim_that_arrives_twice_does_not_lock_out_the_workers_of_that_boot() -> None:
    server, _ = step(serving(1), Detached("a"), 1, SETTINGS)
    server, _ = step(server, Claimed(boot=True), 1, SETTINGS)
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.BOOTED, 1, "")
    assert {worker.process for worker in server.workers.values()} == {"p0", "p1"}


def test_a_worker_whose_place_a_late_report_took_returns_with_its_report_on_the_next_install() -> None:
    server = report_worker(serving(1), 1, resources_pb2.Worker.BOOTED, 2, "", process="late")
    server, _ = step(server, VersionsChanged(versions(1, 2)), 1, SETTINGS)
    assert server.install is not None
    assert (server.opened, server.install.id, server.gone) == (0, "life-1", {"p1"})
    server = report_worker(server, 1, resources_pb2.Worker.STAGED, 2, "life-1")
    assert (server.workers[1].process, server.gone) == ("p1", {"late"})
    assert server.install is not None
    assert (server.install.state, server.install.id, server.failures) == (resources_pb2.Install.STAGING, "life-2", {})
    for state in (resources_pb2.Worker.STAGED, resources_pb2.Worker.APPLIED):
        for rank in range(2):
            server = report_worker(server, rank, state, 2, "life-2")
    assert step(server, Reported("a", "life-2", server_pb2.Order.APPLY), 2, SETTINGS)[0].opened == 2


def test_a_worker_whose_place_the_first_report_of_a_dead_one_took_returns_when_that_has_been_silent_for_a_lease() -> None:
    server = report_worker(serving(1), 1, resources_pb2.Worker.BOOTED, 1, "", process="late")
    living = WorkerReported(Worker(1, resources_pb2.Worker.BOOTED, 1, process="p1", fingerprint=fingerprint(1)))
    for now in (3.0, 7.0, 1 + SETTINGS.lease):
        server, _ = step(server, living, now, SETTINGS)
        assert server.workers[1].process == "late"
    server, _ = step(server, living, 1.1 + SETTINGS.lease, SETTINGS)
    assert (server.workers[1].process, server.gone, server.opened) == ("p1", {"late"}, 1)


def test_a_worker_that_fails_after_the_commit_closes_the_gate() -> None:
    server = committed()
    worker = Worker(0, resources_pb2.Worker.FAILED, 2, "life-1", "its memory is gone", "p0")
    server, orders = step(server, WorkerReported(worker), 2, SETTINGS)
    assert server.opened == 0
    assert Order("a", server_pb2.Order.CLOSE, reason="not every worker holds version 2") in orders


def alter(server: Server, install: str, rank: int = 0) -> tuple[Server, tuple[Order, ...]]:
    """A worker has found other contents in its memory."""
    worker = Worker(rank, resources_pb2.Worker.FAILED, 0, install, "1 tensor differs: a", f"p{rank}", altered=True)
    return step(server, WorkerReported(worker), 2, SETTINGS)


@pytest.mark.parametrize("begin", ["booted", "committed", "an install failed since"])
def test_a_worker_whose_memory_was_altered_is_torn_and_the_version_is_installed_before_the_gate_opens(begin: str) -> None:
    server = serving(1) if begin == "booted" else committed()
    version = server.opened
    if begin == "an install failed since":
        server, _ = step(server, VersionsChanged(versions(1, 2, 3)), 2, SETTINGS)
        server, _ = step(server, Reported("a", "life-2", server_pb2.Order.STAGE, ok=False, error="no"), 2, SETTINGS)
    server, orders = alter(server, "" if begin == "booted" else "life-1")
    assert (server.opened, server.torn, server.altered) == (0, {0}, {0: "1 tensor differs: a"})
    assert [order.kind for order in orders][:1] == [server_pb2.Order.CLOSE]
    assert state_of(server) == resources_pb2.Server.FAILED
    assert "worker 0: 1 tensor differs: a" in explain(server, 2, SETTINGS)
    install = server.install
    assert install is not None
    assert (install.state, install.version) == (resources_pb2.Install.STAGING, version)
    again, orders = alter(server, "" if begin == "booted" else "life-1")
    assert (again.torn, orders) == ({0}, ()), "said again"
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.STAGED, version, install.id)
    for rank in range(2):
        server = report_worker(server, rank, resources_pb2.Worker.APPLIED, version, install.id)
    server, orders = step(server, Reported("a", install.id, server_pb2.Order.APPLY), 3, SETTINGS)
    assert (server.opened, server.torn, server.altered) == (version, frozenset(), {})


def test_what_a_worker_has_staged_stays_staged_when_it_is_found_altered() -> None:
    server, _ = step(serving(1), VersionsChanged(versions(1, 2)), 1, SETTINGS)
    server = report_worker(server, 0, resources_pb2.Worker.STAGED, 2, "life-1")
    server, _ = alter(server, "")
    assert server.opened == 0
    server = report_worker(server, 1, resources_pb2.Worker.STAGED, 2, "life-1")
    assert server.install is not None
    assert server.install.state == resources_pb2.Install.APPLYING


def test_the_leader_that_comes_back_in_the_middle_is_told_to_apply_again_and_one_that_is_at_it_is_not() -> None:
    server, _ = step(applying(), Detached("a"), 1, SETTINGS)
    _, orders = step(server, Attached("a", 2), 2, SETTINGS)
    assert Order("a", server_pb2.Order.APPLY, "life-1", 2) in orders
    busy, orders = step(server, Attached("a", 2, busy="life-1"), 2, SETTINGS)
    assert server_pb2.Order.APPLY not in {order.kind for order in orders}
    for rank in range(2):
        busy = report_worker(busy, rank, resources_pb2.Worker.APPLIED, 2, "life-1")
    assert step(busy, Reported("a", "life-1", server_pb2.Order.APPLY), 3, SETTINGS)[0].opened == 2


def test_a_control_side_still_at_an_order_of_an_earlier_daemon_gets_no_others_until_it_is_done() -> None:
    server, _ = step(Server("s", "m", "m", "life", 0.0, versions(1, 2)), Claimed(boot=False), 0, SETTINGS)
    server, _ = step(server, Attached("a", 1, busy="before-7"), 0, SETTINGS)
    booted = Worker(0, resources_pb2.Worker.BOOTED, 1, process="p0", fingerprint=fingerprint(1))
    server, orders = step(server, WorkerReported(booted), 0, SETTINGS)
    assert (orders, server.opened) == ((), 0)
    server = report_worker(server, 0, resources_pb2.Worker.APPLIED, 2, "before-7")
    server, orders = step(server, Reported("a", "before-7", server_pb2.Order.APPLY), 1, SETTINGS)
    assert orders[-1] == Order("a", server_pb2.Order.RESUME, "life-0", 2)


def test_versions_between_are_skipped_and_a_failing_one_is_tried_a_bounded_number_of_times() -> None:
    server, _ = step(serving(1, world_size=1), VersionsChanged(versions(1, 2, 3, 4)), 1, SETTINGS)
    now, tried = 1.0, []
    for _ in range(100):
        install = server.install
        assert install is not None
        if install.active:
            tried.append(install.version)
            failed = Worker(0, resources_pb2.Worker.FAILED, install.version, install.id, "no room", "p0")
            server, _ = step(server, WorkerReported(failed), now, SETTINGS)
        now += 1
        server, _ = step(server, Reported("a"), now, SETTINGS)
    assert tried == [4, 4, 4]
    assert server.serving == 1
    assert explain(server, now, SETTINGS) == (
        "serving version 1; version 4 failed 3 times, last: worker 0: no room; waits for a newer version"
    )
    server, orders = step(server, VersionsChanged(versions(1, 5)), now, SETTINGS)
    assert orders == (Order("a", server_pb2.Order.STAGE, "life-4", 5),)


def come_back(store: str, version: int = 5) -> tuple[Server, tuple[Order, ...]]:
    """A daemon that was started anew has `version` of STORE; a server comes that was proven to hold `version` of `store`."""
    server = Server("s", "m", "m", "life", 0.0, versions(version))
    server, _ = step(server, Claimed(boot=False), 0, SETTINGS)
    server, _ = step(server, Attached("a", 1), 0, SETTINGS)
    worker = Worker(0, resources_pb2.Worker.APPLIED, version, "before-3", process="p0", fingerprint=fingerprint(version, store))
    return step(server, WorkerReported(worker), 0, SETTINGS)


def test_a_version_of_the_same_number_from_a_lost_store_is_not_taken_for_this_stores() -> None:
    _, orders = come_back(STORE)
    assert orders == (Order("a", server_pb2.Order.RESUME, "life-0", 5),)
    server, orders = come_back("a lost store")
    assert orders == (Order("a", server_pb2.Order.STAGE, "life-1", 5),), "installed anew, and not resumed"
    assert (server.workers[0].state, server.workers[0].holds, server.agreed) == (resources_pb2.Worker.EMPTY, 0, 0)
    assert explain(server, 0, SETTINGS) == (
        "not serving; worker 0: it holds version 5 with fingerprint 5 of a lost , and the store has fingerprint 5 of a store; "
        "staging version 5, 0 of 1 workers done"
    )
    server = report_worker(server, 0, resources_pb2.Worker.STAGED, 5, "life-1")
    server = report_worker(server, 0, resources_pb2.Worker.APPLIED, 5, "life-1")
    server, orders = step(server, Reported("a", "life-1", server_pb2.Order.APPLY), 1, SETTINGS)
    assert orders[-1] == Order("a", server_pb2.Order.RESUME, "life-1", 5)


def test_a_number_that_the_store_has_not_reached_yet_proves_nothing_when_it_is_reached() -> None:
    server = Server("s", "m", "m", "life", 0.0, versions(1))
    server, _ = step(server, Attached("a", 1), 0, SETTINGS)
    server, _ = step(
        server, WorkerReported(Worker(0, resources_pb2.Worker.BOOTED, 2, process="p0", fingerprint="lost")), 0, SETTINGS
    )
    server, orders = step(server, VersionsChanged(versions(1, 2)), 0, SETTINGS)
    assert server.opened == 0
    assert server_pb2.Order.RESUME not in {order.kind for order in orders}


def test_an_install_whose_workers_proved_another_fingerprint_fails() -> None:
    worker = Worker(0, resources_pb2.Worker.APPLIED, 2, "life-1", process="p0", fingerprint="another")
    server, _ = step(applying(), WorkerReported(worker), 1, SETTINGS)
    assert server.failures[2].error.startswith("worker 0: it holds version 2 with fingerprint another, and the store has")
    assert server.opened == 0


def test_a_follower_that_attaches_while_a_version_is_applied_holds_its_gate_for_that_install() -> None:
    server, orders = step(applying(), Attached("b", 2), 1, SETTINGS)
    hold = Order("b", server_pb2.Order.CLOSE, "life-1", 2, "version 2 is being installed")
    assert orders == (Order("b", server_pb2.Order.RENEWED), hold)
    _, orders = step(server, Attached("b", 2), 2, SETTINGS)
    assert orders == (Order("b", server_pb2.Order.RENEWED), hold), "and when it comes back"


def test_a_follower_that_attaches_after_an_install_that_went_wrong_shuts_its_gate() -> None:
    failed = Worker(0, resources_pb2.Worker.FAILED, 2, "life-1", "a digest differs", "p0")
    server, _ = step(applying(), WorkerReported(failed), 1, SETTINGS)
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[1] == Order("b", server_pb2.Order.CLOSE, reason="its last install was not completed")


def test_a_control_side_that_attaches_during_a_sleep_at_level_2_gives_the_sleep_as_its_reason() -> None:
    asleep = Wanted(Goal(power=Power.ASLEEP_2))
    server, _ = step(serving(1), asleep, 1, SETTINGS)
    assert server.change is not None
    slept = Reported("a", server.change.id, server_pb2.Order.SLEEP, power=Power.ASLEEP_2)
    shut = Order("b", server_pb2.Order.CLOSE, reason="an operator put it to sleep")
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[-1] == shut, "while it falls asleep"
    server, _ = step(server, slept, 1, SETTINGS)
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[-1] == shut, "once it is asleep"
    server, _ = step(server, Wanted(Goal()), 2, SETTINGS)
    _, orders = step(server, Attached("b", 2), 2, SETTINGS)
    assert orders[-1] == Order("b", server_pb2.Order.CLOSE, reason="its version is not confirmed yet"), "and while it wakes"


def test_failures_count_while_their_version_is_there_and_not_past_ready_if_they_were_ahead_of_it() -> None:
    ahead = Ahead("offer", True)
    failures = {version: Failure(1, "no memory", 9.0) for version in range(1, 9)}
    known = Server("s", "m", "m", "life", 0.0, versions(1, 2, 8), ahead=dict.fromkeys((3, 4, 5, 8), ahead), failures=failures)
    later, _ = step(known, VersionsChanged(versions(2, 3, 6, 8), dict.fromkeys((4, 7), ahead)), 1, SETTINGS)
    assert later.failures.keys() == {2, 4, 6, 7, 8}, "1 and 5 are gone, 3 is READY"
    assert (later.ready, later.ahead.keys()) == (versions(2, 3, 6, 8), {4, 7})


def test_an_operators_retry_forgets_failures_and_another_goal_keeps_them() -> None:
    failures = {2: Failure(SETTINGS.attempts, "it was torn", 1e9)}
    failed = replace(serving(1), failures=failures)
    kept, _ = step(failed, Wanted(replace(failed.goal, why="an operator set the target")), 2, SETTINGS)
    assert kept.failures == failures
    again, _ = step(failed, Wanted(replace(failed.goal, retry=(1, 0))), 2, SETTINGS)
    assert again.failures == {}
    same, _ = step(replace(again, failures=failures), Wanted(again.goal), 3, SETTINGS)
    assert same.failures == failures, "the same retry does not count twice"


def test_a_process_that_another_replaces_in_an_install_counts_as_a_failure_of_the_version() -> None:
    server, _ = step(serving(1), VersionsChanged(versions(1, 2)), 1, SETTINGS)
    server = report_worker(server, 1, resources_pb2.Worker.BOOTED, 1, "", process="new")
    assert server.ended is not None
    assert server.ended.error == "worker 1 ended, and another process has taken its place"
    assert server.failures[2].count == 1
