"""Steps of ranks that stall, retry, go on, die and come back, under a daemon that is started anew, in any order."""

import os
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from resharder.server.state.errors import DaemonError, FailedPrecondition, ResourceExhausted, ResourceNotFound
from resharder.server.state.version import VersionRecord

from tests.support.step_site import LEASE, RANKS, Rank, Site, refused


class Schedule(RuleBasedStateMachine):
    """Ranks that stall, retry, go on, die and come back at an earlier step, and a daemon that is started anew, in any order."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm")
        self.site = Site(Path(self.folder.name) / "store")
        self.ranks = [Rank(self.site, rank) for rank in range(RANKS)]
        self.steps, self.stalled = [0] * RANKS, set[int]()

    def teardown(self) -> None:
        if hasattr(self, "site"):
            try:
                self.peace(max(self.steps) + 1)
            finally:
                self.site.stop()
                self.folder.cleanup()

    def ask(self, number: int, step: int) -> VersionRecord | None:
        """Answer to a rank that begins a publish, checked against the protocol."""
        rank, before = self.ranks[number], {record.number: record for record in self.site.open()}
        known = set(rank.given)
        rank.started = step
        try:
            record = rank.begin(step)
        except ResourceNotFound:
            self.site.now += 0.01
            rank.register()
            return None
        except (FailedPrecondition, ResourceExhausted) as error:
            rank.begun = None
            self.check_refusal(number, step, error, before)
            return None
        if record.state == "UPLOADING":
            same = [r for r in self.site.store.catalogue.versions("policy") if r.step == step]
            learnt = max([rank.born, *(r.number for r in same if r.number in known)])
            untold = [r.name for r in same if r.state == "ABORTED" and r.number > learnt]
            assert not untold, f"rank {number} was given {record.name} and has not learnt of {untold}"
        return record

    def check_refusal(self, number: int, step: int, error: DaemonError, before: dict[int, VersionRecord]) -> None:
        if error.reason == "VERSION_ABORTED":
            assert any(rank.started > step for rank in self.ranks if rank.rank != number), str(error)
        elif error.reason == "TOO_MANY_UPLOADING":
            assert len(self.site.open()) == 2, f"{error}: {before}"
        else:
            assert error.reason == "NOT_REGISTERED"

    @rule(number=st.integers(0, RANKS - 1), seals=st.booleans())
    def publish(self, number: int, seals: bool) -> None:
        if number in self.stalled:
            return
        rank = self.ranks[number]
        if self.ask(number, self.steps[number]) is not None and rank.begun is not None and seals:
            self.finish(number)

    @rule(number=st.integers(0, RANKS - 1))
    def finish(self, number: int) -> None:
        """The rest of a publish that was interrupted; then the trainer goes on to its next step."""
        rank = self.ranks[number]
        if number in self.stalled or rank.begun is None:
            return
        if rank.begun in self.site.open():
            rank.seal(rank.begun)
            self.steps[number] += 1
        else:
            refused(lambda: rank.seal(rank.begun), "VERSION_ABORTED")  # type: ignore[arg-type]
        rank.begun = None
        self.site.settle()

    @rule(number=st.integers(0, RANKS - 1))
    def go_on(self, number: int) -> None:
        if number not in self.stalled:
            self.steps[number] += 1
            self.ranks[number].begun = None

    @rule(number=st.integers(0, RANKS - 1))
    def stop_or_continue(self, number: int) -> None:
        self.stalled ^= {number}

    @rule(number=st.integers(0, RANKS - 1))
    def stall(self, number: int) -> None:
        """A stall that ends, longer than the lease."""
        self.stalled |= {number}
        self.pass_time(5)
        self.stalled -= {number}

    @rule(seconds=st.integers(1, 6))
    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()

    @rule(number=st.integers(0, RANKS - 1), back=st.integers(0, 3))
    def restart_rank(self, number: int, back: int) -> None:
        self.site.now += 0.1
        self.stalled -= {number}
        self.ranks[number].replace()
        self.steps[number] = max(0, self.steps[number] - back)

    @rule(back=st.integers(0, 3))
    def restart_job(self, back: int) -> None:
        step = max(0, min(self.steps) - back)
        for number in range(RANKS):
            self.restart_rank(number, 0)
        self.steps = [step] * RANKS
        self.peace(step)

    @precondition(lambda self: not self.stalled)
    @rule()
    def restart_daemon(self) -> None:
        self.site.stop()
        self.site.start()
        for rank in self.ranks:
            rank.begun, rank.started = None, -1
            rank.register()

    def tick(self) -> None:
        self.site.now += 1
        for rank in self.ranks:
            if rank.rank not in self.stalled:
                rank.renew()
        self.site.intake.expire()

    @invariant()
    def no_version_stays_that_cannot_be_completed(self) -> None:
        if not hasattr(self, "site"):
            return
        self.tick()
        assert len(self.site.open()) <= 2
        for staged in self.site.intake.uploads():
            for number in staged.open_ranks():
                silent = self.site.now - max(staged.created, staged.publisher.seen.get(number, 0.0))
                assert silent <= LEASE, f"{staged.record.name} waits for rank {number}, which is silent for {silent} s"
                if number not in self.stalled:
                    assert self.ranks[number].started <= staged.record.step, f"{staged.record.name} waits for rank {number}"

    def peace(self, step: int) -> None:
        """Let every rank publish the step, again where there is no place yet, without stalls."""
        self.stalled.clear()
        for _ in range(3):
            self.tick()
            for number, rank in enumerate(self.ranks):
                if self.ask(number, step) is not None and rank.begun is not None:
                    rank.seal(rank.begun)
            self.site.settle()
        last = [r.state for r in self.site.store.catalogue.versions("policy") if r.step == step][-1:]
        assert last in (["READY"], ["RETIRED"])


Schedule.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=40,
    derandomize="RESHARDER_SEARCH" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedule = Schedule.TestCase


@pytest.mark.full
class TestManySchedules(Schedule.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(Schedule.TestCase.settings, max_examples=200)
