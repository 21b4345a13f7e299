"""Offers to servers that take a version before it is READY: ranks hold their memory for these alone, and never for long.

It is what a trainer does that says nothing of the direct path.
"""

import pytest
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.server import Reach

from tests.support.direct_site import LONG, Rank, Site, linked
from tests.support.waits import completed


@pytest.fixture
def site() -> Site:
    found = Site()
    found.declare("left")
    found.taking = {"left"}
    return found


def offered(site: Site, number: int = 1) -> list[Rank]:
    return site.offer(number, wait=2.0, ahead_only=True, host="here")


def held(site: Site, ranks: list[Rank], state: str = "UPLOADING") -> bool:
    """Whether the ranks still hold their memory; a rank has sealed its slot."""
    ranks[0].sealed = True
    ranks[0].offer.look_at = 0.0
    site.direct._end_if_over(ranks[0].offer, state, lambda: True)
    return not ranks[0].offer.ended


def receive(site: Site, ranks: list[Rank], number: int = 1) -> None:
    """Server `left` takes the version."""
    group = linked(site, "left", ranks, number)
    [future.result(LONG) for future in site.start("left", group)]
    for member in (*(rank.member for rank in ranks), *(site.worker("left", rank) for rank in range(2))):
        site.finish(member, group)


def test_ranks_hold_nothing_if_no_server_takes_it_ahead_whatever_its_state(site: Site) -> None:
    site.taking = set()
    assert site.wanting == {"left"}  # it will install the version once that is READY
    for number, state in enumerate(("UPLOADING", "READY"), 1):
        assert not held(site, offered(site, number), state)


def test_the_first_rank_is_not_held_either_before_the_others_have_offered(site: Site) -> None:
    site.taking = set()
    first = Rank(site, 0, 1, 2.0, ahead_only=True, host="here")
    assert first.task("UPLOADING") is None
    with pytest.raises(FailedPrecondition, match="no server takes it before it is READY"):
        Rank(site, 1, 1, 2.0, ahead_only=True, host="here")
    assert not site.offered.offered("policy")


def test_ranks_are_released_when_the_last_server_has_taken_it_although_it_is_not_ready(site: Site) -> None:
    ranks = offered(site)
    assert held(site, ranks)
    receive(site, ranks)
    assert not held(site, ranks)


def test_a_server_that_does_not_come_is_waited_for_from_the_first_delivery_on_and_no_longer_than_the_bound(site: Site) -> None:
    ranks = offered(site)
    ranks[0].look("UPLOADING")
    site.now += 100.0  # of upload, which holds the memory anyway
    ranks[0].look("UPLOADING")
    assert held(site, ranks)
    site.now += 1.9
    assert held(site, ranks, "READY")
    site.now += 0.2
    assert not held(site, ranks, "READY")


def test_a_transfer_that_has_begun_ends_within_its_own_bound(site: Site) -> None:
    ranks = offered(site)
    assert held(site, ranks)
    group = linked(site, "left", ranks)
    [future.result(LONG) for future in site.start("left", group)]
    site.now += 11.9
    assert held(site, ranks)
    site.now += 0.2
    assert not held(site, ranks)


def test_a_server_that_never_comes_is_waited_for_once_until_it_is_heard_of_again(site: Site) -> None:
    for number, waits in ((1, True), (2, False), (3, False)):
        ranks = offered(site, number)
        ranks[0].look("UPLOADING")  # while it is uploaded, the version is offered to all
        assert held(site, ranks) == waits, number
        site.now += 2.1
        assert not held(site, ranks)
    with pytest.raises(FailedPrecondition, match="its offer is over"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 3, "i-3")
    assert held(site, offered(site, 4))


def test_a_server_that_came_too_late_is_waited_for_each_time(site: Site) -> None:
    for number in range(1, 4):
        ranks = offered(site, number)
        if number == 1:
            linked(site, "left", ranks)
        else:  # over the same link
            [future.result(LONG) for future in site.join("left", number, f"i-{number}")]
        assert held(site, ranks)
        site.now += 2.1
        assert not held(site, ranks)


def test_an_aborted_version_is_not_held(site: Site) -> None:
    assert not held(site, offered(site), "ABORTED")


def test_a_server_on_another_host_takes_the_staged_path_at_once(site: Site) -> None:
    site.hosts["left"] = "there"
    offered(site)
    with pytest.raises(FailedPrecondition, match="on the trainer's host alone"):
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", 1, "i-1")


def test_ranks_on_two_hosts_offer_nothing(site: Site) -> None:
    first = Rank(site, 0, 1, 2.0, ahead_only=True, host="here")
    with pytest.raises(FailedPrecondition, match="its ranks are on different hosts"):
        Rank(site, 1, 1, 2.0, ahead_only=True, host="there")
    assert first.task("UPLOADING") is None
    assert not site.offered.offered("policy")


def test_servers_learn_to_whom_a_version_is_offered(site: Site) -> None:
    offered(site)
    assert site.offered.offered("policy") == {1: Reach(frozenset({"here"}))}
    site.offer(2)
    assert site.offered.offered("policy") == {1: Reach(frozenset({"here"})), 2: Reach()}


def test_an_offer_with_a_bound_of_its_own_waits_for_every_server_as_before(site: Site) -> None:
    site.taking = set()
    ranks = site.offer(1, wait=30.0)
    ranks[0].look("UPLOADING")
    ranks[0].look("READY")
    site.now += 29.0
    ranks[0].look("READY")
    site.now += 2.0
    assert ranks[0].task("READY") is None
