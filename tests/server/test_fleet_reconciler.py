"""The reconciler under random joins, deaths, publishes, failures, and late and repeated reports.

Workers and control sides are models that keep to the plugin's part of the bargain; what they send lies in a mail box from which
the rules deliver it in any order, more than once, or after what it is about is over.
"""

import os
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from resharder.server.fleets.explain import explain, state_of
from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Goal, InstallState, OrderKind, Power, Server, Settings, Worker, WorkerState, in_use
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reported,
    Ticked,
    VersionsChanged,
    Wanted,
    WorkerReported,
)
from resharder.v1 import resources_pb2

STORE = "a store"


def fingerprint(version: int, store: str = STORE) -> str:
    return f"{version} of {store}" if version else ""


def versions(*numbers: int, store: str = STORE) -> dict[int, str]:
    return {number: fingerprint(number, store) for number in numbers}


SETTINGS = Settings(lease=10, grace=10, boot=100, install_step=50, attempts=3, first_retry=1, last_retry=4)


@dataclass
class Process:
    """A worker as it really is: `holds` is None while its parameters are a mix."""

    rank: int
    nonce: str
    holds: int | None
    fingerprint: str = ""
    install: str = ""
    state: WorkerState = WorkerState.EMPTY

    def report(self, **changes: object) -> Worker:
        said = Worker(self.rank, self.state, self.holds or 0, self.install, process=self.nonce, fingerprint=self.fingerprint)
        return replace(said, **changes)  # type: ignore[arg-type]


@dataclass
class Plant:
    """A real server's processes, and the orders that wait at each control side."""

    workers: dict[int, Process]
    queues: dict[str, list[Order]] = field(default_factory=dict)
    open_on: dict[str, int] = field(default_factory=dict)
    applied: set[str] = field(default_factory=set)  # installs that a control side carried through, caches reset


class Reconciling(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.life = 0
        self.names = 0
        self.number = 0
        self.stores = 0
        self.ready: dict[int, str] = {}
        self.mail: list[tuple[Event, int]] = []

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    @initialize(world_size=st.integers(1, 3), boot=st.booleans())
    def start(self, world_size: int, boot: bool) -> None:
        self.world_size = world_size
        self.plant = Plant({})
        self.server = self.unknown()
        if boot:
            self.publish()
            self.happen(Claimed(boot=True))
        for rank in range(world_size):
            self.start_worker(rank, self.server.boot_version)

    def unknown(self) -> Server:
        self.life += 1
        return Server("s", "m", "m", f"life{self.life}", self.now, dict(self.ready))

    def start_worker(self, rank: int, version: int) -> None:
        if rank in self.plant.workers:
            self.forget_unheard(self.plant.workers[rank].nonce)
        state = WorkerState.BOOTED if version else WorkerState.EMPTY
        self.plant.workers[rank] = Process(rank, self.name("process"), version, self.ready.get(version, ""), state=state)
        self.post(WorkerReported(self.plant.workers[rank].report()))

    def forget_unheard(self, nonce: str) -> None:
        """A process that dies before its first word is heard stays unheard: a worker waits for that call before it goes on."""
        heard = {worker.process for worker in self.server.workers.values()} | self.server.gone
        if nonce not in heard:
            kept = [(e, life) for e, life in self.mail if not (isinstance(e, WorkerReported) and e.worker.process == nonce)]
            self.mail = kept

    def post(self, event: Event) -> None:
        self.mail.append((event, self.life))

    def happen(self, event: Event) -> None:
        before, held = self.server, in_use(self.server, self.now, SETTINGS)
        self.server, orders = step(before, event, self.now, SETTINGS)
        assert held <= self.ready.keys()
        for order in orders:
            self.check(order)
            if order.control in self.plant.queues and order.kind not in (OrderKind.RENEWED, OrderKind.LEAD):
                self.plant.queues[order.control].append(order)

    def check(self, order: Order) -> None:
        """What holds for every order at the moment it is given."""
        server = self.server
        assert any(control.nonce == order.control for control in server.controls)
        if order.kind in (OrderKind.STAGE, OrderKind.APPLY):
            assert order.control == server.controls[0].nonce, "only the leader installs"
            assert order.version in self.ready
        if order.kind == OrderKind.APPLY:
            assert server.opened == 0, "closed while it applies"
        if order.kind == OrderKind.RESUME:
            assert order.version in self.ready
            assert not server.torn, "a torn server is never resumed"
            said = [server.workers[rank] for rank in range(self.world_size)]
            assert all(worker.holds == order.version for worker in said), "every worker confirmed that same version"
            for real in self.plant.workers.values():
                replaced = server.workers[real.rank].process != real.nonce
                assert replaced or real.holds == order.version, "and tells the truth"
                assert replaced or real.fingerprint == self.ready[order.version], "of this store's version"
            assert order.install.endswith("-0") or order.install in self.plant.applied, "caches are reset"

    # Faults and progress

    @rule()
    def publish(self) -> None:
        self.number += 1
        self.ready[self.number] = fingerprint(self.number, f"store {self.stores}")
        self.happen(VersionsChanged(dict(self.ready)))

    @precondition(lambda self: self.ready)
    @rule()
    def retire(self) -> None:
        """The store drops the oldest version that nobody holds."""
        free = sorted(self.ready.keys() - in_use(self.server, self.now, SETTINGS) - {max(self.ready)})
        if free:
            del self.ready[free[0]]
            self.happen(VersionsChanged(dict(self.ready)))

    @precondition(lambda self: len(self.plant.queues) < 3)
    @rule()
    def attach(self) -> None:
        nonce = self.name("control")
        self.plant.queues[nonce] = []
        self.happen(Attached(nonce, self.world_size))
        for worker in self.plant.workers.values():
            self.post(WorkerReported(worker.report()))

    @precondition(lambda self: self.plant.queues)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        nonce = data.draw(st.sampled_from(sorted(self.plant.queues)))
        del self.plant.queues[nonce]
        self.plant.open_on.pop(nonce, None)
        self.happen(Detached(nonce))

    @precondition(lambda self: self.mail)
    @rule(data=st.data(), again=st.booleans())
    def deliver(self, data: st.DataObject, again: bool) -> None:
        event, life = data.draw(st.sampled_from(self.mail))
        if not again:
            self.mail.remove((event, life))
        if not isinstance(event, Reported) or life == self.life:
            self.happen(event)

    @precondition(lambda self: any(self.plant.queues.values()))
    @rule(data=st.data(), fails=st.integers(-4, 3))
    def obey(self, data: st.DataObject, fails: int) -> None:
        """One control side carries out its next order; `fails` may be the rank of a worker that does not."""
        nonce = data.draw(st.sampled_from(sorted(nonce for nonce, orders in self.plant.queues.items() if orders)))
        self.carry_out(nonce, fails)

    def carry_out(self, nonce: str, fails: int = -1) -> None:
        order = self.plant.queues[nonce].pop(0)
        ok = True
        if order.kind in (OrderKind.STAGE, OrderKind.APPLY):
            for worker in self.plant.workers.values():
                self.work(worker, order, fails=worker.rank == fails)
            ok = order.kind == OrderKind.STAGE or fails not in self.plant.workers
            self.plant.open_on.pop(nonce, None)
            if ok and order.kind == OrderKind.APPLY:
                self.plant.applied.add(order.install)
        elif order.kind == OrderKind.RESUME:
            self.plant.open_on[nonce] = order.version
        else:
            self.plant.open_on.pop(nonce, None)
        self.post(Reported(nonce, order.install, order.kind, ok, "" if ok else "a worker failed"))

    def work(self, worker: Process, order: Order, *, fails: bool) -> None:
        if order.kind == OrderKind.STAGE:
            state = WorkerState.FAILED if fails else WorkerState.STAGED
            self.post(WorkerReported(worker.report(state=state, version=order.version, install=order.install)))
            return
        worker.install = order.install
        worker.holds = None if fails else order.version
        worker.fingerprint = "" if fails else self.ready[order.version]
        worker.state = WorkerState.FAILED if fails else WorkerState.APPLIED
        self.post(WorkerReported(worker.report(error="broke" if fails else "")))

    @rule(rank=st.integers(0, 2))
    def replace_worker(self, rank: int) -> None:
        if rank < self.world_size:
            self.start_worker(rank, self.server.boot_version if self.server.boot_version in self.ready else 0)

    @rule()
    def restart_daemon(self) -> None:
        """It forgets the server; the plugin carries out what it has, claims again, and says what its workers hold."""
        for nonce in self.plant.queues:
            self.plant.queues[nonce] = []
        self.mail = []
        self.server = self.unknown()
        self.happen(Claimed(boot=False))
        for worker in self.plant.workers.values():
            self.post(WorkerReported(worker.report()))
        for nonce in list(self.plant.queues):
            self.happen(Attached(nonce, self.world_size))

    @rule(published=st.integers(0, 3))
    def lose_the_store(self, published: int) -> None:
        """The host starts anew, and numbers with it; trainers publish before servers find their way back."""
        self.stores += 1
        self.number = published
        self.ready = versions(*range(1, published + 1), store=f"store {self.stores}")
        self.restart_daemon()

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 60.0]), silent=st.booleans())
    def wait(self, seconds: float, silent: bool) -> None:
        self.pass_time(seconds, silent)

    def pass_time(self, seconds: float, silent: bool) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 5)
            for nonce in [] if silent else list(self.plant.queues):
                if all(control.nonce != nonce for control in self.server.controls):
                    self.happen(Attached(nonce, self.world_size))
                self.happen(Reported(nonce))
            self.happen(Ticked())

    # Promises

    @invariant()
    def what_is_confirmed_or_in_use_is_held(self) -> None:
        if not hasattr(self, "server"):
            return
        held = in_use(self.server, self.now, SETTINGS)
        if self.server.lost_at is None:
            assert {self.server.confirmed, self.server.opened} - {0} <= held | {self.server.confirmed} - self.ready.keys()
            install = self.server.install
            assert install is None or not install.active or install.version in held
        assert held <= self.ready.keys()

    @invariant()
    def open_means_that_every_worker_proved_it(self) -> None:
        if hasattr(self, "server") and self.server.opened:
            assert self.server.agreed == self.server.opened
            assert not self.server.torn

    @invariant()
    def every_state_has_a_reason(self) -> None:
        if hasattr(self, "server"):
            assert resources_pb2.Server.State.Name(state_of(self.server))
            assert len(explain(self.server, self.now, SETTINGS)) > 8

    def teardown(self) -> None:
        """With no more faults, and something new to install, the server comes to serve it."""
        if not hasattr(self, "server"):
            return
        self.mail = []
        self.publish()
        if not self.plant.queues:
            self.attach()
        for worker in self.plant.workers.values():
            self.post(WorkerReported(worker.report()))
        for _ in range(25):
            for event, life in self.mail:
                if not isinstance(event, Reported) or life == self.life:
                    self.happen(event)
            self.mail = []
            for nonce in list(self.plant.queues):
                while self.plant.queues[nonce]:
                    self.carry_out(nonce)
            self.pass_time(5, silent=False)
        server = self.server
        why = f"{explain(server, self.now, SETTINGS)}: {server}"
        assert server.serving == max(self.ready), why
        for worker in self.plant.workers.values():
            assert (worker.holds, worker.fingerprint) == (server.serving, self.ready[server.serving]), why
        assert set(self.plant.open_on.values()) == {server.serving}, why
        assert server.install is None or server.install.state in (InstallState.COMMITTED, InstallState.FAILED), why
        assert state_of(server) == resources_pb2.Server.SERVING


Reconciling.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="RESHARDER_SEARCH" not in os.environ,
)
TestReconciling = Reconciling.TestCase


def serving(version: int, *, world_size: int = 2) -> Server:
    """A server that serves `version`, led by control side `a`."""
    server = Server("s", "m", "m", "life", 0.0, versions(version))
    server, _ = step(server, Claimed(boot=True), 0, SETTINGS)
    for rank in range(world_size):
        server = hear(server, rank, WorkerState.BOOTED, version, "")
    server, _ = step(server, Attached("a", world_size), 0, SETTINGS)
    server, _ = step(server, Reported("a", "life-0", OrderKind.RESUME), 0, SETTINGS)
    assert server.serving == version
    return server


@pytest.mark.parametrize(("renews", "lasts"), [(True, SETTINGS.lease), (False, SETTINGS.boot)])
def test_a_boot_lasts_as_long_as_its_claim_and_is_taken_up_again(renews: bool, lasts: float) -> None:
    server, _ = step(Server("s", "m", "m", "life", 0.0, versions(1)), Claimed(boot=True, renews=renews), 0, SETTINGS)
    server, _ = step(server, Ticked(), lasts, SETTINGS)
    assert server.lost_at is None
    lost, _ = step(server, Ticked(), lasts + 1, SETTINGS)
    assert lost.lost_at == lasts + 1
    again, _ = step(lost, Claimed(boot=False, renews=renews), lasts + 2, SETTINGS)
    worker = Worker(0, WorkerState.BOOTED, 1, process="p0", fingerprint=fingerprint(1))
    heard, _ = step(lost, WorkerReported(worker), lasts + 2, SETTINGS)
    assert (again.lost_at, again.boot_version) == (None, 1)
    assert heard.lost_at is None


def hear(server: Server, rank: int, state: WorkerState, version: int, install: str, process: str = "") -> Server:
    worker = Worker(rank, state, version, install, process=process or f"p{rank}", fingerprint=fingerprint(version))
    return step(server, WorkerReported(worker), 1, SETTINGS)[0]


def applying() -> Server:
    """It served version 1, and applies version 2 as install life-1."""
    server, _ = step(serving(1), VersionsChanged(versions(1, 2)), 1, SETTINGS)
    for rank in range(2):
        server = hear(server, rank, WorkerState.STAGED, 2, "life-1")
    assert server.install is not None
    assert (server.install.state, server.opened) == (InstallState.APPLYING, 0)
    return server


def committed() -> Server:
    server = applying()
    for rank in range(2):
        server = hear(server, rank, WorkerState.APPLIED, 2, "life-1")
    assert server.opened == 0, "the control side has not said that it is done"
    server, orders = step(server, Reported("a", "life-1", OrderKind.APPLY), 1, SETTINGS)
    assert [order.kind for order in orders] == [OrderKind.RENEWED, OrderKind.RESUME]
    return server


def test_a_late_staged_does_not_undo_what_was_applied() -> None:
    server = hear(applying(), 0, WorkerState.APPLIED, 2, "life-1")
    assert hear(server, 0, WorkerState.STAGED, 2, "life-1") == server


def test_a_late_report_of_an_earlier_version_changes_nothing() -> None:
    server = committed()
    assert hear(server, 0, WorkerState.BOOTED, 1, "") == server
    assert hear(server, 0, WorkerState.APPLIED, 1, "life-0") == server


def test_a_process_that_another_replaced_is_not_heard_again() -> None:
    server = hear(committed(), 0, WorkerState.BOOTED, 1, "", process="another")
    assert server.opened == 0
    assert hear(server, 0, WorkerState.APPLIED, 2, "life-1") == server


def test_a_late_report_of_a_servers_former_life_does_not_take_the_place_of_a_worker_that_has_booted_since() -> None:
    server, _ = step(serving(1), Detached("a"), 1, SETTINGS)
    server, _ = step(server, Claimed(boot=True), 1, SETTINGS)
    for rank in range(2):
        server = hear(server, rank, WorkerState.BOOTED, 1, "", process=f"q{rank}")
    assert hear(server, 1, WorkerState.BOOTED, 1, "") == server


def test_a_boot_claim_that_arrives_twice_does_not_lock_out_the_workers_of_that_boot() -> None:
    server, _ = step(serving(1), Detached("a"), 1, SETTINGS)
    server, _ = step(server, Claimed(boot=True), 1, SETTINGS)
    for rank in range(2):
        server = hear(server, rank, WorkerState.BOOTED, 1, "")
    assert {worker.process for worker in server.workers.values()} == {"p0", "p1"}


def test_a_worker_whose_place_a_late_report_took_returns_with_its_report_on_the_next_install() -> None:
    server = hear(serving(1), 1, WorkerState.BOOTED, 2, "", process="late")
    server, _ = step(server, VersionsChanged(versions(1, 2)), 1, SETTINGS)
    assert server.install is not None
    assert (server.opened, server.install.id, server.gone) == (0, "life-1", {"p1"})
    server = hear(server, 1, WorkerState.STAGED, 2, "life-1")
    assert (server.workers[1].process, server.gone) == ("p1", {"late"})
    assert server.install is not None
    assert (server.install.state, server.install.id, server.failures) == (InstallState.STAGING, "life-2", {})
    for state in (WorkerState.STAGED, WorkerState.APPLIED):
        for rank in range(2):
            server = hear(server, rank, state, 2, "life-2")
    assert step(server, Reported("a", "life-2", OrderKind.APPLY), 2, SETTINGS)[0].opened == 2


def test_a_worker_whose_place_the_first_report_of_a_dead_one_took_returns_when_that_has_been_silent_for_a_lease() -> None:
    server = hear(serving(1), 1, WorkerState.BOOTED, 1, "", process="late")
    living = WorkerReported(Worker(1, WorkerState.BOOTED, 1, process="p1", fingerprint=fingerprint(1)))
    for now in (3.0, 7.0, 1 + SETTINGS.lease):
        server, _ = step(server, living, now, SETTINGS)
        assert server.workers[1].process == "late"
    server, _ = step(server, living, 1.1 + SETTINGS.lease, SETTINGS)
    assert (server.workers[1].process, server.gone, server.opened) == ("p1", {"late"}, 1)


def test_a_worker_that_fails_after_the_commit_closes_the_gate() -> None:
    server = committed()
    worker = Worker(0, WorkerState.FAILED, 2, "life-1", "its memory is gone", "p0")
    server, orders = step(server, WorkerReported(worker), 2, SETTINGS)
    assert server.opened == 0
    assert Order("a", OrderKind.CLOSE, reason="not every worker holds version 2") in orders


def alter(server: Server, install: str, rank: int = 0) -> tuple[Server, tuple[Order, ...]]:
    """A worker has found other contents in its memory."""
    worker = Worker(rank, WorkerState.FAILED, 0, install, "1 tensor differs: a", f"p{rank}", altered=True)
    return step(server, WorkerReported(worker), 2, SETTINGS)


@pytest.mark.parametrize("begin", ["booted", "committed", "an install failed since"])
def test_a_worker_whose_memory_was_altered_is_torn_and_the_version_is_installed_before_the_gate_opens(begin: str) -> None:
    server = serving(1) if begin == "booted" else committed()
    version = server.opened
    if begin == "an install failed since":
        server, _ = step(server, VersionsChanged(versions(1, 2, 3)), 2, SETTINGS)
        server, _ = step(server, Reported("a", "life-2", OrderKind.STAGE, ok=False, error="no"), 2, SETTINGS)
    server, orders = alter(server, "" if begin == "booted" else "life-1")
    assert (server.opened, server.torn, server.altered) == (0, {0}, {0: "1 tensor differs: a"})
    assert [order.kind for order in orders][:1] == [OrderKind.CLOSE]
    assert state_of(server) == resources_pb2.Server.FAILED
    assert "worker 0: 1 tensor differs: a" in explain(server, 2, SETTINGS)
    install = server.install
    assert install is not None
    assert (install.state, install.version) == (InstallState.STAGING, version)
    again, orders = alter(server, "" if begin == "booted" else "life-1")
    assert (again.torn, orders) == ({0}, ()), "said again"
    for rank in range(2):
        server = hear(server, rank, WorkerState.STAGED, version, install.id)
    for rank in range(2):
        server = hear(server, rank, WorkerState.APPLIED, version, install.id)
    server, orders = step(server, Reported("a", install.id, OrderKind.APPLY), 3, SETTINGS)
    assert (server.opened, server.torn, server.altered) == (version, frozenset(), {})


def test_what_a_worker_has_staged_stays_staged_when_it_is_found_altered() -> None:
    server, _ = step(serving(1), VersionsChanged(versions(1, 2)), 1, SETTINGS)
    server = hear(server, 0, WorkerState.STAGED, 2, "life-1")
    server, _ = alter(server, "")
    assert server.opened == 0
    server = hear(server, 1, WorkerState.STAGED, 2, "life-1")
    assert server.install is not None
    assert server.install.state == InstallState.APPLYING


def test_the_leader_that_comes_back_in_the_middle_is_told_to_apply_again_and_one_that_is_at_it_is_not() -> None:
    server, _ = step(applying(), Detached("a"), 1, SETTINGS)
    _, orders = step(server, Attached("a", 2), 2, SETTINGS)
    assert Order("a", OrderKind.APPLY, "life-1", 2) in orders
    busy, orders = step(server, Attached("a", 2, busy="life-1"), 2, SETTINGS)
    assert OrderKind.APPLY not in {order.kind for order in orders}
    for rank in range(2):
        busy = hear(busy, rank, WorkerState.APPLIED, 2, "life-1")
    assert step(busy, Reported("a", "life-1", OrderKind.APPLY), 3, SETTINGS)[0].opened == 2


def test_a_control_side_still_at_an_order_of_an_earlier_daemon_gets_no_others_until_it_is_done() -> None:
    server, _ = step(Server("s", "m", "m", "life", 0.0, versions(1, 2)), Claimed(boot=False), 0, SETTINGS)
    server, _ = step(server, Attached("a", 1, busy="before-7"), 0, SETTINGS)
    booted = Worker(0, WorkerState.BOOTED, 1, process="p0", fingerprint=fingerprint(1))
    server, orders = step(server, WorkerReported(booted), 0, SETTINGS)
    assert (orders, server.opened) == ((), 0)
    server = hear(server, 0, WorkerState.APPLIED, 2, "before-7")
    server, orders = step(server, Reported("a", "before-7", OrderKind.APPLY), 1, SETTINGS)
    assert orders[-1] == Order("a", OrderKind.RESUME, "life-0", 2)


def test_versions_between_are_skipped_and_a_failing_one_is_tried_a_bounded_number_of_times() -> None:
    server, _ = step(serving(1, world_size=1), VersionsChanged(versions(1, 2, 3, 4)), 1, SETTINGS)
    now, tried = 1.0, []
    for _ in range(100):
        install = server.install
        assert install is not None
        if install.active:
            tried.append(install.version)
            failed = Worker(0, WorkerState.FAILED, install.version, install.id, "no room", "p0")
            server, _ = step(server, WorkerReported(failed), now, SETTINGS)
        now += 1
        server, _ = step(server, Reported("a"), now, SETTINGS)
    assert tried == [4, 4, 4]
    assert server.serving == 1
    assert explain(server, now, SETTINGS) == (
        "serving version 1; version 4 failed 3 times, last: worker 0: no room; waits for a newer version"
    )
    server, orders = step(server, VersionsChanged(versions(1, 5)), now, SETTINGS)
    assert orders == (Order("a", OrderKind.STAGE, "life-4", 5),)


def come_back(store: str, version: int = 5) -> tuple[Server, tuple[Order, ...]]:
    """A daemon that was started anew has `version` of STORE; a server comes that was proven to hold `version` of `store`."""
    server = Server("s", "m", "m", "life", 0.0, versions(version))
    server, _ = step(server, Claimed(boot=False), 0, SETTINGS)
    server, _ = step(server, Attached("a", 1), 0, SETTINGS)
    said = Worker(0, WorkerState.APPLIED, version, "before-3", process="p0", fingerprint=fingerprint(version, store))
    return step(server, WorkerReported(said), 0, SETTINGS)


def test_a_version_of_the_same_number_from_a_lost_store_is_not_taken_for_this_stores() -> None:
    _, orders = come_back(STORE)
    assert orders == (Order("a", OrderKind.RESUME, "life-0", 5),)
    server, orders = come_back("a lost store")
    assert orders == (Order("a", OrderKind.STAGE, "life-1", 5),), "installed anew, and not resumed"
    assert (server.workers[0].state, server.workers[0].holds, server.agreed) == (WorkerState.EMPTY, 0, 0)
    assert explain(server, 0, SETTINGS) == (
        "closed; worker 0: it holds a version 5 of fingerprint 5 of a lost , the store has fingerprint 5 of a store; "
        "staging version 5, 0 of 1 workers done"
    )
    server = hear(server, 0, WorkerState.STAGED, 5, "life-1")
    server = hear(server, 0, WorkerState.APPLIED, 5, "life-1")
    server, orders = step(server, Reported("a", "life-1", OrderKind.APPLY), 1, SETTINGS)
    assert orders[-1] == Order("a", OrderKind.RESUME, "life-1", 5)


def test_a_number_that_the_store_has_not_reached_yet_proves_nothing_when_it_is_reached() -> None:
    server = Server("s", "m", "m", "life", 0.0, versions(1))
    server, _ = step(server, Attached("a", 1), 0, SETTINGS)
    server, _ = step(server, WorkerReported(Worker(0, WorkerState.BOOTED, 2, process="p0", fingerprint="lost")), 0, SETTINGS)
    server, orders = step(server, VersionsChanged(versions(1, 2)), 0, SETTINGS)
    assert server.opened == 0
    assert OrderKind.RESUME not in {order.kind for order in orders}


def test_an_install_whose_workers_proved_another_fingerprint_fails() -> None:
    said = Worker(0, WorkerState.APPLIED, 2, "life-1", process="p0", fingerprint="another")
    server, _ = step(applying(), WorkerReported(said), 1, SETTINGS)
    assert server.failures[2].error.startswith("worker 0: it holds a version 2 of fingerprint another, the store has")
    assert server.opened == 0


def test_a_follower_that_attaches_while_a_version_is_applied_holds_its_gate_for_that_install() -> None:
    server, orders = step(applying(), Attached("b", 2), 1, SETTINGS)
    hold = Order("b", OrderKind.CLOSE, "life-1", 2, "version 2 is being installed")
    assert orders == (Order("b", OrderKind.RENEWED), hold)
    _, orders = step(server, Attached("b", 2), 2, SETTINGS)
    assert orders == (Order("b", OrderKind.RENEWED), hold), "and when it comes back"


def test_a_follower_that_attaches_after_an_install_that_went_wrong_shuts_its_gate() -> None:
    failed = Worker(0, WorkerState.FAILED, 2, "life-1", "a digest differs", "p0")
    server, _ = step(applying(), WorkerReported(failed), 1, SETTINGS)
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[1] == Order("b", OrderKind.CLOSE, reason="the last install went wrong half-way")


def test_a_control_side_that_attaches_during_a_sleep_at_level_2_gives_the_sleep_as_its_reason() -> None:
    asleep = Wanted(Goal(power=Power.ASLEEP_2))
    server, _ = step(serving(1), asleep, 1, SETTINGS)
    assert server.change is not None
    slept = Reported("a", server.change.id, OrderKind.SLEEP, power=Power.ASLEEP_2)
    shut = Order("b", OrderKind.CLOSE, reason="an operator put it to sleep")
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[-1] == shut, "while it falls asleep"
    server, _ = step(server, slept, 1, SETTINGS)
    _, orders = step(server, Attached("b", 2), 1, SETTINGS)
    assert orders[-1] == shut, "once it is asleep"
    server, _ = step(server, Wanted(Goal()), 2, SETTINGS)
    _, orders = step(server, Attached("b", 2), 2, SETTINGS)
    assert orders[-1] == Order("b", OrderKind.CLOSE, reason="its version is not confirmed yet"), "and while it wakes"
