"""A step is aborted for all ranks: what each of them is answered when it is late, retries, goes on, or comes back as another
process. Ranks keep count of their attempts as the SDK does; the clock is the test's own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.converters.geometry.layout import full_box
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.publisher import ACTIVE, REGISTERING
from resharder.server.state.version import VersionRecord

from tests.support.step_site import RANKS, SPECS, Rank, Site, publish_all, refused, stall
from tests.support.waits import completed


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        made = Site(Path(folder) / "store")
        yield made
        made.stop()


@pytest.fixture
def ranks(site: Site) -> list[Rank]:
    return [Rank(site, rank) for rank in range(RANKS)]


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
        assert completed(site.intake.create_version, ranks[0].name, 0, 1, after).number == first.number
    assert site.open() == []


def test_a_version_is_aborted_when_a_rank_without_its_part_starts_a_later_step(site: Site, ranks: list[Rank]) -> None:
    first = ranks[0].publish(1)
    second = ranks[1].publish(2)
    ended = site.store.catalogue.get("policy", first.number)
    assert (ended.state, ended.reason) == ("ABORTED", "rank 1 went on to step 2 without sending its part of step 1")
    assert site.open() == [second]
    message = refused(lambda: ranks[2].seal(first), "VERSION_ABORTED")
    assert "rank 1 went on to step 2" in message


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

    def slow(*given: object, **options: object) -> VersionRecord:
        monkeypatch.setattr(site.store.lifecycle, "begin", begin)
        ranks[1].publish(2)
        return begin(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(site.store.lifecycle, "begin", slow)
    assert ranks[0].begin(1).state == "ABORTED"
    assert [record.step for record in site.open()] == [2]


def test_a_seal_that_comes_while_the_version_is_being_aborted_is_told_so(
    site: Site, ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, abort, refusals = ranks[0].begin(1), site.store.lifecycle.abort, []

    def slow(*given: str, **options: bool) -> VersionRecord:
        refusals.append(refused(lambda: ranks[0].seal(record), "VERSION_ABORTED"))
        return abort(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(site.store.lifecycle, "abort", slow)
    ranks[0].begin(2)
    assert refusals == [f"{record.name} is aborted, and takes no more bytes"]


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
    site.intake.expire()
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
        refused(lambda step=step: completed(site.intake.create_version, ranks[0].name, 0, step), "VERSION_ABORTED")  # type: ignore[misc]
    assert publish_all(site, ranks, 9).state == "READY"


def test_a_publisher_waits_for_the_models_files(site: Site) -> None:
    intake, files = site.intake, {"config.json": b"{}"}
    name = intake.create_publisher("policy", "job", 1, {}).name
    boxes = pack([(0, full_box(SPECS[0].shape), False)])
    assert intake.register_slot(name, 0, "rank 0", SPECS, boxes).state == REGISTERING
    message = refused(lambda: completed(intake.assignment, name, 0, 60), "PUBLISHER_UNKNOWN")
    assert "no rank has sent the model's files" in message
    intake.create_publisher("policy", "job", 1, files)
    assert intake.register_slot(name, 0, "rank 0", SPECS, boxes).state == ACTIVE
    assert site.store.reader.model_files("policy") == files


def test_a_rank_without_boxes_does_not_run_ahead(site: Site) -> None:
    intake = site.intake
    name = intake.create_publisher("policy", "job", 2, {"config.json": b"{}"}).name
    for rank, boxes in enumerate([[(0, full_box(SPECS[0].shape), False)], []]):
        intake.register_slot(name, rank, f"rank {rank}", SPECS, pack(iter(boxes)))
    ahead = intake.create_version(name, 1, 2)
    next(ahead)
    numbers = []
    for step in (1, 2):
        numbers.append(completed(intake.create_version, name, 0, step).number)
        intake.seal_slot("policy", numbers[-1], 1, 0, [0], mapped=True)
    with pytest.raises(StopIteration) as ended:
        next(ahead)
    assert [*numbers, ended.value.value.number] == [1, 2, 2]
    site.settle()


def test_a_restarted_rank_without_boxes_begins_no_version_of_a_step_that_the_others_have_passed(site: Site) -> None:
    intake = site.intake
    name = intake.create_publisher("policy", "job", 2, {"config.json": b"{}"}).name
    for rank, boxes in enumerate([[(0, full_box(SPECS[0].shape), False)], []]):
        intake.register_slot(name, rank, f"rank {rank}", SPECS, pack(iter(boxes)), f"process {rank}")
    completed(intake.create_version, name, 0, 2)
    intake.seal_slot("policy", 1, 1, 0, [0], mapped=True)
    site.settle()
    site.now += 1
    intake.register_slot(name, 1, "rank 1", SPECS, pack(iter([])), "another process")
    back = intake.create_version(name, 1, 0)
    next(back)
    assert not site.open(), "it waits until the other rank calls, or is replaced"
    site.now += 1
    intake.publisher(name, 0)
    assert "rank 0 went on to step 2" in refused(lambda: next(back), "VERSION_ABORTED")


def test_a_rank_that_has_not_registered_with_this_daemon_is_told_so(site: Site) -> None:
    intake = site.intake
    name = intake.create_publisher("policy", "job", 2, {"config.json": b"{}"}).name
    intake.register_slot(name, 0, "rank 0", SPECS, pack([(0, full_box(SPECS[0].shape), False)]))
    refused(lambda: completed(intake.assignment, name, 0, 0), "NOT_REGISTERED")
    assert "rank 1 has not registered" in refused(lambda: completed(intake.assignment, name, 1, 60), "PUBLISHER_UNKNOWN")
