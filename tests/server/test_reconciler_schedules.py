"""The reconciler under random joins, deaths, publishes, failures, and late and repeated reports.

Workers and control sides are models that keep to the plugin's part of the bargain; what they send lies in a mail box from which
the rules deliver it in any order, more than once, or after what it is about is over.
"""

import os
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from resharder.server.fleets.explain import explain, state_of
from resharder.server.fleets.reconciler.step import step
from resharder.server.state.server import Server, Worker, in_use
from resharder.server.state.server_events import (
    Attached,
    Claimed,
    Detached,
    Event,
    Order,
    Reported,
    Ticked,
    VersionsChanged,
    WorkerReported,
)
from resharder.v1 import resources_pb2, server_pb2

from tests.support.reconciler_versions import SETTINGS, fingerprint, versions


@dataclass
class Process:
    """A worker as it really is: `holds` is None while its parameters are a mix."""

    rank: int
    nonce: str
    holds: int | None
    fingerprint: str = ""
    install: str = ""
    state: resources_pb2.Worker.State = resources_pb2.Worker.EMPTY

    def report(self, **changes: object) -> Worker:
        worker = Worker(self.rank, self.state, self.holds or 0, self.install, process=self.nonce, fingerprint=self.fingerprint)
        return replace(worker, **changes)  # type: ignore[arg-type]


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
        state = resources_pb2.Worker.BOOTED if version else resources_pb2.Worker.EMPTY
        self.plant.workers[rank] = Process(rank, self.name("process"), version, self.ready.get(version, ""), state=state)
        self.post(WorkerReported(self.plant.workers[rank].report()))

    def forget_unheard(self, nonce: str) -> None:
        """A process that dies before its first word is heard stays unheard: a worker waits for that call before it goes on."""
        known = {worker.process for worker in self.server.workers.values()} | self.server.gone
        if nonce not in known:
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
            if order.control in self.plant.queues and order.kind not in (server_pb2.Order.RENEWED, server_pb2.Order.LEAD):
                self.plant.queues[order.control].append(order)

    def check(self, order: Order) -> None:
        """Check the invariants of each order when it is given."""
        server = self.server
        assert any(control.nonce == order.control for control in server.controls)
        if order.kind in (server_pb2.Order.STAGE, server_pb2.Order.APPLY):
            assert order.control == server.controls[0].nonce, "only the leader installs"
            assert order.version in self.ready
        if order.kind == server_pb2.Order.APPLY:
            assert server.opened == 0, "closed while it applies"
        if order.kind == server_pb2.Order.RESUME:
            assert order.version in self.ready
            assert not server.torn, "a torn server is never resumed"
            workers = [server.workers[rank] for rank in range(self.world_size)]
            assert all(worker.holds == order.version for worker in workers), "every worker confirmed that same version"
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
        if order.kind in (server_pb2.Order.STAGE, server_pb2.Order.APPLY):
            for worker in self.plant.workers.values():
                self.work(worker, order, fails=worker.rank == fails)
            ok = order.kind == server_pb2.Order.STAGE or fails not in self.plant.workers
            self.plant.open_on.pop(nonce, None)
            if ok and order.kind == server_pb2.Order.APPLY:
                self.plant.applied.add(order.install)
        elif order.kind == server_pb2.Order.RESUME:
            self.plant.open_on[nonce] = order.version
        else:
            self.plant.open_on.pop(nonce, None)
        self.post(Reported(nonce, order.install, order.kind, ok, "" if ok else "a worker failed"))

    def work(self, worker: Process, order: Order, *, fails: bool) -> None:
        if order.kind == server_pb2.Order.STAGE:
            state = resources_pb2.Worker.FAILED if fails else resources_pb2.Worker.STAGED
            self.post(WorkerReported(worker.report(state=state, version=order.version, install=order.install)))
            return
        worker.install = order.install
        worker.holds = None if fails else order.version
        worker.fingerprint = "" if fails else self.ready[order.version]
        worker.state = resources_pb2.Worker.FAILED if fails else resources_pb2.Worker.APPLIED
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
        assert server.install is None or server.install.state in (
            resources_pb2.Install.COMMITTED,
            resources_pb2.Install.FAILED,
        ), why
        assert state_of(server) == resources_pb2.Server.SERVING


Reconciling.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="RESHARDER_SEARCH" not in os.environ,
)
TestReconciling = Reconciling.TestCase
