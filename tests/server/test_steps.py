"""A step is aborted for all ranks: what each of them is answered when it is late, retries, goes on, or comes back as another
process. Ranks keep count of their attempts as the SDK does; the clock is the test's own."""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from resharder.client.trainer.attempts import Attempts
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.server.ingest.coordinator import Intake
from resharder.server.ingest.packed_boxes import pack
from resharder.server.ingest.publisher import ACTIVE, REGISTERING
from resharder.server.state.errors import DaemonError, FailedPrecondition, ResourceExhausted, ResourceNotFound
from resharder.server.state.version import VersionRecord
from resharder.server.store.store import Store

from tests.support.waits import settled

LEASE = 4.0
RANKS = 3
SPECS = [TensorSpec("a", "F32", (RANKS, 8))]
_PROCESSES = itertools.count()


class Site:
    """A daemon's intake over a store that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.start()

    def start(self) -> None:
        self.store = Store(self.folder, shared=False)
        self.intake = Intake(self.store, lease_seconds=LEASE, clock=lambda: self.now)

    def stop(self) -> None:
        self.intake.steps.drain(0)
        self.store.close()

    def open(self) -> list[VersionRecord]:
        return (
            [r for r in self.store.catalogue.versions("policy") if r.state == "UPLOADING"]
            if self.store.catalogue.models()
            else []
        )

    def state(self, number: int) -> str:
        return self.store.catalogue.get("policy", number).state

    def settle(self) -> None:
        """Until no proof is under way."""
        end = time.monotonic() + 60
        while any(not staged.open_ranks() for staged in list(self.intake.uploads._open.values())):
            assert time.monotonic() < end, "a proof has not ended"
            time.sleep(0.001)


class Rank:
    """One rank of a job, with the memory of its process."""

    def __init__(self, site: Site, rank: int) -> None:
        self.site, self.rank = site, rank
        self.replace()

    def replace(self) -> None:
        """Another process takes the rank's place."""
        self.process, self.attempts = f"process-{next(_PROCESSES)}", Attempts()
        self.begun: VersionRecord | None = None
        self.started = -1
        self.given: set[int] = set()  # versions that it was answered with
        self.born = self.site.store.catalogue.newest_number("policy")
        self.register()

    def register(self) -> None:
        publisher = self.site.intake.publishers.create("policy", "job", RANKS, {"config.json": b"{}"})
        self.name = publisher.name
        box = (Range(self.rank, 1), Range(0, 8))
        boxes = pack([(0, box, False)])
        self.site.intake.publishers.register(self.name, self.rank, f"rank {self.rank}", SPECS, boxes, self.process)
        self.attempts.registered(self.site.store.catalogue.newest_number("policy"))

    def begin(self, step: int) -> VersionRecord:
        record = settled(self.site.intake.steps.create, self.name, self.rank, step, self.attempts.after(step))
        self.attempts.begun(step, record.number)
        self.given.add(record.number)
        self.begun = record if record.state == "UPLOADING" else None
        return record

    def seal(self, record: VersionRecord) -> VersionRecord:
        """The files hold zeros, and so does the rank."""
        return self.site.intake.uploads.seal("policy", record.number, record.epoch, self.rank, [0], mapped=True)

    def publish(self, step: int) -> VersionRecord:
        record = self.begin(step)
        return self.seal(record) if record.state == "UPLOADING" else record

    def renew(self) -> None:
        self.site.intake.publishers.get(self.name, self.rank)


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        made = Site(Path(folder) / "store")
        yield made
        made.stop()


@pytest.fixture
def ranks(site: Site) -> list[Rank]:
    return [Rank(site, rank) for rank in range(RANKS)]


def refused(call: Callable[[], object], reason: str) -> str:
    with pytest.raises(DaemonError) as caught:
        call()
    assert caught.value.reason == reason, str(caught.value)
    return str(caught.value)


def stall(site: Site, ranks: list[Rank], silent: int) -> None:
    """One rank is silent for longer than its lease."""
    for _ in range(5):
        site.now += 1
        for rank in ranks:
            if rank.rank != silent:
                rank.renew()
        site.intake.publishers.expire()


def publish_all(site: Site, ranks: list[Rank], step: int) -> VersionRecord:
    numbers = {rank.publish(step).number for rank in ranks}
    assert len(numbers) == 1
    site.settle()
    return site.store.catalogue.get("policy", numbers.pop())


def test_twenty_stalls_cost_twenty_versions_and_nothing_else(site: Site, ranks: list[Rank]) -> None:
    for step in range(20):
        records = [rank.publish(step) for rank in ranks[1:]]
        stall(site, ranks, silent=0)
        assert ranks[0].publish(step).number == records[0].number
        assert (site.state(records[0].number), site.open()) == ("ABORTED", [])
    assert publish_all(site, ranks, 20).state == "READY"
    assert len(site.store.catalogue.versions("policy")) == 21


def test_a_step_is_tried_again_by_ranks_that_have_learnt_of_its_abort_alone(site: Site, ranks: list[Rank]) -> None:
    first, _ = (rank.publish(1) for rank in ranks[1:])
    stall(site, ranks, silent=0)
    second = ranks[1].publish(1)
    assert (second.number, second.state) == (first.number + 1, "UPLOADING")
    assert (late := ranks[0].publish(1)).state == "ABORTED"
    assert late.number == first.number
    assert [rank.publish(1).number for rank in (ranks[0], ranks[2])] == [second.number] * 2
    site.settle()
    assert site.state(second.number) == "READY"


def test_an_answer_that_is_lost_is_the_same_when_the_rank_asks_again(site: Site, ranks: list[Rank]) -> None:
    first = ranks[1].publish(1)
    stall(site, ranks, silent=0)
    after = ranks[0].attempts.after(1)
    for _ in range(3):
        assert settled(site.intake.steps.create, ranks[0].name, 0, 1, after).number == first.number
    assert site.open() == []


def test_a_version_is_aborted_when_a_rank_without_its_part_starts_a_later_step(site: Site, ranks: list[Rank]) -> None:
    first = ranks[0].publish(1)
    second = ranks[1].publish(2)
    ended = site.store.catalogue.get("policy", first.number)
    assert (ended.state, ended.reason) == ("ABORTED", "rank 1 has started step 2 without its part of step 1")
    assert site.open() == [second]
    message = refused(lambda: ranks[2].seal(first), "VERSION_ABORTED")
    assert "rank 1 has started step 2" in message


def test_a_rank_that_retries_while_another_has_gone_on_is_refused_until_it_goes_on_too(site: Site, ranks: list[Rank]) -> None:
    first = ranks[0].publish(1)
    stall(site, ranks, silent=1)
    second = ranks[1].publish(2)
    for _ in range(2):
        refused(lambda: ranks[0].publish(1), "VERSION_ABORTED")
    assert site.open() == [second]
    assert [rank.publish(2).number for rank in (ranks[0], ranks[2])] == [second.number] * 2
    site.settle()
    assert (site.state(first.number), site.state(second.number)) == ("ABORTED", "READY")


def test_ranks_that_are_ahead_may_go_back_together(site: Site, ranks: list[Rank]) -> None:
    for step in (1, 2):
        ranks[0].publish(step)
        ranks[1].publish(step)
    stall(site, ranks, silent=2)
    assert {rank.publish(1).state for rank in ranks} == {"ABORTED"}
    assert publish_all(site, ranks, 1).state == "READY"


def test_a_version_opened_while_a_rank_goes_on_does_not_stay(
    site: Site, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = site.store.lifecycle.begin

    def slow(*given: object, set_aside: bool) -> VersionRecord:
        monkeypatch.setattr(site.store.lifecycle, "begin", begin)
        ranks[1].publish(2)
        return begin(*given, set_aside=set_aside)  # type: ignore[arg-type]

    monkeypatch.setattr(site.store.lifecycle, "begin", slow)
    assert ranks[0].begin(1).state == "ABORTED"
    assert [record.step for record in site.open()] == [2]


def test_a_seal_that_comes_while_the_version_is_being_aborted_is_told_so(
    site: Site, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, abort, said = ranks[0].begin(1), site.store.lifecycle.abort, []

    def slow(*given: str) -> VersionRecord:
        said.append(refused(lambda: ranks[0].seal(record), "VERSION_ABORTED"))
        return abort(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(site.store.lifecycle, "abort", slow)
    ranks[0].begin(2)
    assert said == [f"{record.name} accepts no bytes: it is aborted"]


def test_a_restarted_job_gets_the_places_of_its_former_processes_back(site: Site, ranks: list[Rank]) -> None:
    for step in (7, 8):
        ranks[0].publish(step)
    ranks[1].begin(7)
    for rank in ranks:
        site.now += 1
        rank.replace()
    assert [record.step for record in site.open()] == [8], "the former process of rank 1 had begun step 7"
    for step in (5, 6, 7, 8):
        assert publish_all(site, ranks, step).state == "READY"


def test_a_restarted_rank_does_not_mix_its_parts_with_those_of_its_former_process(site: Site, ranks: list[Rank]) -> None:
    first = ranks[0].publish(7)
    ranks[0].replace()
    assert site.open() == [first]
    again = ranks[0].publish(7)
    assert (site.state(first.number), again.number) == ("ABORTED", first.number + 1)
    for record in (first, again):  # the others have to learn of the abort as well
        assert [rank.publish(7).number for rank in ranks[1:]] == [record.number] * 2
    site.settle()
    assert site.state(again.number) == "READY"


def test_a_process_for_each_step_ends_nothing_that_it_has_delivered(site: Site, ranks: list[Rank]) -> None:
    for step in (1, 2):
        for rank in ranks[:2]:
            rank.publish(step)
            rank.replace()
    assert [record.step for record in site.open()] == [1, 2]
    for step in (1, 2):
        ranks[2].publish(step)
    site.settle()
    assert [record.state for record in site.store.catalogue.versions("policy")] == ["READY"] * 2


def test_a_rank_that_comes_back_late_does_not_end_what_others_have_begun_since(site: Site, ranks: list[Rank]) -> None:
    ranks[1].publish(7)
    site.now += 1
    ranks[0].replace()
    record = ranks[0].publish(7)
    site.now += 1
    ranks[2].replace()
    assert [rank.publish(7).number for rank in ranks[1:]] == [record.number] * 2
    site.settle()
    assert site.state(record.number) == "READY"


def test_a_restarted_rank_may_go_back_while_the_former_processes_of_others_are_not_replaced_yet(
    site: Site, ranks: list[Rank]
) -> None:
    for rank in ranks:
        rank.publish(8)
    site.settle()
    site.now += 1
    ranks[0].replace()
    record = ranks[0].publish(5)
    assert record.state == "UPLOADING"
    for rank in ranks[1:]:
        site.now += 1
        rank.replace()
        assert rank.publish(5).number == record.number
    site.settle()
    assert site.state(record.number) == "READY"


def test_a_restarted_rank_may_not_go_back_where_the_others_live_on(site: Site, ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.publish(8)
    site.settle()
    site.now += 1
    ranks[0].replace()
    first = ranks[0].publish(5)
    site.now += 1
    ranks[1].renew()
    site.intake.publishers.expire()
    assert site.state(first.number) == "ABORTED"
    refused(lambda: ranks[0].publish(6), "VERSION_ABORTED")
    assert publish_all(site, ranks, 9).state == "READY"


def test_registering_again_from_the_same_process_ends_nothing(site: Site, ranks: list[Rank]) -> None:
    record = ranks[0].begin(1)
    ranks[0].register()
    assert site.open() == [record]


def test_an_abort_outlives_the_daemon(site: Site, ranks: list[Rank]) -> None:
    first = ranks[1].publish(1)
    stall(site, ranks, silent=0)
    site.stop()
    site.start()
    for rank in ranks:
        rank.register()
    assert {rank.publish(1).number for rank in (ranks[0], ranks[2])} == {first.number}
    assert site.open() == []
    assert publish_all(site, ranks, 1).state == "READY"


def test_a_client_that_counts_no_attempts_opens_the_step_again_and_blocks_nobody(site: Site, ranks: list[Rank]) -> None:
    for step in (1, 2, 3):
        ranks[1].publish(step)
        stall(site, ranks, silent=0)
        ranks[1].begin(step + 1)
        refused(lambda step=step: settled(site.intake.steps.create, ranks[0].name, 0, step), "VERSION_ABORTED")  # type: ignore[misc]
    assert publish_all(site, ranks, 9).state == "READY"


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
        """What a rank is answered at the start of a publish, and whether that answer is right."""
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
        self.site.intake.publishers.expire()

    @invariant()
    def no_version_stays_that_cannot_be_completed(self) -> None:
        if not hasattr(self, "site"):
            return
        self.tick()
        assert len(self.site.open()) <= 2
        for staged in list(self.site.intake.uploads._open.values()):
            for number in staged.open_ranks():
                silent = self.site.now - max(staged.created, staged.publisher.seen.get(number, 0.0))
                assert silent <= LEASE, f"{staged.record.name} waits for rank {number}, which is silent for {silent} s"
                if number not in self.stalled:
                    assert self.ranks[number].started <= staged.record.step, f"{staged.record.name} waits for rank {number}"

    def peace(self, step: int) -> None:
        """Nobody stalls, and every rank publishes the step, again where there is no place yet."""
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
    max_examples=200,
    stateful_step_count=40,
    derandomize="RESHARDER_SEARCH" not in os.environ,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSchedule = Schedule.TestCase


def test_a_publisher_waits_for_the_models_files(site: Site) -> None:
    publishers, files = site.intake.publishers, {"config.json": b"{}"}
    name = publishers.create("policy", "job", 1, {}).name
    boxes = pack([(0, full_box(SPECS[0].shape), False)])
    assert publishers.register(name, 0, "rank 0", SPECS, boxes).state == REGISTERING
    message = refused(lambda: settled(publishers.assignment, name, 0, 60), "PUBLISHER_UNKNOWN")
    assert "no rank has sent the model's files" in message
    publishers.create("policy", "job", 1, files)
    assert publishers.register(name, 0, "rank 0", SPECS, boxes).state == ACTIVE
    assert site.store.reader.model_files("policy") == files


def test_a_rank_without_boxes_does_not_run_ahead(site: Site) -> None:
    publishers, steps = site.intake.publishers, site.intake.steps
    name = publishers.create("policy", "job", 2, {"config.json": b"{}"}).name
    for rank, boxes in enumerate([[(0, full_box(SPECS[0].shape), False)], []]):
        publishers.register(name, rank, f"rank {rank}", SPECS, pack(iter(boxes)))
    ahead = steps.create(name, 1, 2)
    next(ahead)
    numbers = []
    for step in (1, 2):
        numbers.append(settled(steps.create, name, 0, step).number)
        site.intake.uploads.seal("policy", numbers[-1], 1, 0, [0], mapped=True)
    with pytest.raises(StopIteration) as ended:
        next(ahead)
    assert [*numbers, ended.value.value.number] == [1, 2, 2]
    site.settle()


def test_a_restarted_rank_without_boxes_begins_no_version_of_a_step_that_the_others_have_passed(site: Site) -> None:
    publishers, steps = site.intake.publishers, site.intake.steps
    name = publishers.create("policy", "job", 2, {"config.json": b"{}"}).name
    for rank, boxes in enumerate([[(0, full_box(SPECS[0].shape), False)], []]):
        publishers.register(name, rank, f"rank {rank}", SPECS, pack(iter(boxes)), f"process {rank}")
    settled(steps.create, name, 0, 2)
    site.intake.uploads.seal("policy", 1, 1, 0, [0], mapped=True)
    site.settle()
    site.now += 1
    publishers.register(name, 1, "rank 1", SPECS, pack(iter([])), "another process")
    back = steps.create(name, 1, 0)
    next(back)
    assert not site.open(), "it waits until the other rank calls, or is replaced"
    site.now += 1
    publishers.get(name, 0)
    assert "rank 0 has started step 2" in refused(lambda: next(back), "VERSION_ABORTED")


def test_a_rank_that_has_not_registered_with_this_daemon_is_told_so(site: Site) -> None:
    publishers = site.intake.publishers
    name = publishers.create("policy", "job", 2, {"config.json": b"{}"}).name
    publishers.register(name, 0, "rank 0", SPECS, pack([(0, full_box(SPECS[0].shape), False)]))
    refused(lambda: settled(publishers.assignment, name, 0, 0), "NOT_REGISTERED")
    assert "rank 1 has not registered" in refused(lambda: settled(publishers.assignment, name, 1, 60), "PUBLISHER_UNKNOWN")
