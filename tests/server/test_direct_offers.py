"""Offers of the direct path: how long ranks keep their memory as it is, and what workers hear that come too late."""

import pytest
from resharder.server.direct.state import Task
from resharder.server.state.errors import FailedPrecondition
from resharder.v1 import direct_pb2

from tests.support.direct_site import LONG, Rank, Site, linked
from tests.support.observing import wait_until
from tests.support.waits import completed


@pytest.fixture
def site() -> Site:
    return Site()


def offered(site: Site) -> list[Rank]:
    """Version 1 is READY and offered to server `left` for 30 s more."""
    site.declare("left")
    ranks = site.offer(1, wait=30.0)
    ranks[0].look("READY")
    return ranks


def test_an_offer_ends_when_nobody_needs_it_and_when_its_time_is_over(site: Site) -> None:
    ranks = offered(site)
    site.wanting.clear()
    assert [rank.task() for rank in ranks] == [None, None]
    site.wanting.add("left")
    ranks = site.offer(2, wait=30.0)
    ranks[0].look("READY")
    site.now += 31.0
    assert [rank.task() for rank in ranks] == [None, None]
    with pytest.raises(FailedPrecondition, match="its offer is over"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 2, "i-2")


def test_an_offer_to_servers_that_sleep_lasts_until_one_is_awaited_or_its_time_is_over(site: Site) -> None:
    site.declare("left")
    site.wanting.clear()
    ranks = site.offer(1, wait=30.0, servers_sleep=True)
    ranks[0].look("READY")
    site.wanting.add("left")
    ranks[0].look("READY")
    site.wanting.clear()
    assert [rank.task() for rank in ranks] == [None, None]
    ranks = site.offer(2, wait=30.0, servers_sleep=True)
    ranks[0].look("READY")
    site.now += 31.0
    assert [rank.task() for rank in ranks] == [None, None]


def test_memory_may_change_once_every_server_has_all_of_it_though_none_is_opened_yet(site: Site) -> None:
    site.declare("left", "right")
    ranks = site.offer()
    ended = [site.begin(rank.task) for rank in ranks]
    for server in ("left", "right"):
        assert not any(future.done() and future.result() is None for future in ended)
        links = [future.result(LONG) for future in site.join(server)]
        group = links[0].group  # type: ignore[attr-defined]
        assert [future.result(LONG).kind for future in ended] == [direct_pb2.DirectTask.LINK] * 2  # type: ignore[attr-defined]
        [future.result(LONG) for future in site.start(server, group)]
        assert [rank.task().kind for rank in ranks] == [direct_pb2.DirectTask.RUN] * 2  # type: ignore[union-attr]
        ended = [site.begin(rank.task) for rank in ranks]
        for member in (*(rank.member for rank in ranks), *(site.worker(server, rank) for rank in range(2))):
            site.finish(member, group)
    assert [future.result(LONG) for future in ended] == [None] * 2
    assert site.wanting == {"left", "right"}


def test_an_aborted_version_is_offered_no_more_and_one_that_is_staging_is(site: Site) -> None:
    site.declare("left")
    ranks = site.offer()
    site.now += 1000.0
    ranks[0].look("UPLOADING")
    assert ranks[0].task("ABORTED") is None


def test_an_offer_waits_for_workers_that_wait_for_its_transfer(site: Site) -> None:
    ranks = offered(site)
    group = linked(site, "left", ranks)
    site.now += 29.0
    first = site.begin(site.direct.start, site.worker("left", 0), group, "i-1")
    wait_until(lambda: site.direct._groups["left"].starting, "a worker is ready")
    site.now += 2.0
    ranks[0].look("READY")
    completed(site.direct.start, site.worker("left", 1), group, "i-1")
    first.result(LONG)
    assert [rank.task() for rank in ranks] == [Task(direct_pb2.DirectTask.RUN, group)] * 2


def test_an_offer_does_not_wait_for_workers_that_have_given_up(site: Site) -> None:
    ranks = offered(site)
    group = linked(site, "left", ranks)
    call = site.direct.start(site.worker("left", 0), group, "i-1")
    next(call)
    call.close()
    site.now += 31.0
    assert [rank.task() for rank in ranks] == [None, None]


@pytest.mark.parametrize(
    ("end", "why"),
    [
        ("wait", "the publisher waits for 30 s after READY"),
        ("unneeded", "no server waits for it"),
        ("aborted", "version 1 is ABORTED"),
        ("later", "version 2 is offered"),
        ("gone", "rank 1 of models/policy/publishers/1 is gone"),
    ],
)
def test_a_worker_that_comes_too_late_is_told_what_ended_the_offer(site: Site, end: str, why: str) -> None:
    ranks = offered(site)
    if end == "wait":
        site.now += 31.0
    if end == "unneeded":
        site.wanting.clear()
    if end == "later":
        site.offer(2)
    elif end == "gone":
        site.direct.leave(ranks[1].offer, 1)
    else:
        assert ranks[0].task("ABORTED" if end == "aborted" else "READY") is None
    with pytest.raises(FailedPrecondition, match=f"its offer is over: {why}"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 1, "i-1")


def test_an_offer_that_ends_before_a_transfer_begins_leaves_the_group_alone(site: Site) -> None:
    ranks = offered(site)
    group = linked(site, "left", ranks)
    site.now += 31.0
    assert [rank.task() for rank in ranks] == [None, None]
    for future in site.start("left", group):
        with pytest.raises(FailedPrecondition, match="the publisher waits for 30 s after READY"):
            future.result(LONG)
    site.offer(2)
    assert {future.result(LONG).group for future in site.join("left", 2, "i-2")} == {group}  # type: ignore[attr-defined]


def test_workers_do_not_wait_for_one_that_takes_the_staged_path(site: Site) -> None:
    site.declare("left")
    group = linked(site, "left", site.offer(1))
    first = site.begin(site.direct.start, site.worker("left", 0), group, "i-1")
    wait_until(lambda: site.direct._groups["left"].starting, "a worker is ready")
    with site.direct._lock, pytest.raises(FailedPrecondition):
        site.direct._refuse("left", 1, "late", "not all ranks and workers joined in time")
    with pytest.raises(FailedPrecondition, match="another worker takes that path"):
        first.result(LONG)
