"""Links to ranks on other hosts: when one is made and tried, over which a server then takes versions, and what operators read."""

from concurrent.futures import Future
from typing import Any

import pytest
from resharder.server.direct.plans import Declared
from resharder.server.direct.state import Link, Task
from resharder.server.state.errors import FailedPrecondition
from resharder.v1 import direct_pb2

from tests.support.direct_site import LONG, Rank, Site, share_of_rows
from tests.support.observing import wait_until
from tests.support.waits import completed


@pytest.fixture
def site() -> Site:
    """Ranks on the host `here`, which offer elsewhere too, and a server on `there`."""
    found = Site()
    found.hosts["left"] = "there"
    found.declare("left")
    declare_ranks(found)
    found.taking = {"left"}
    return found


def declare_ranks(site: Site, host: str = "here") -> None:
    for rank in range(2):
        site.direct.declare(site.rank(rank), "memory", share_of_rows(rank), declared=Declared(host))


def offered(site: Site, number: int = 1, host: str = "here") -> list[Rank]:
    return site.offer(number, wait=2.0, ahead_only=True, host=host, elsewhere=True)


def meet(site: Site, held: str = "", seconds: float = 0.0) -> "list[Future[object]]":
    return [site.begin(site.direct.meet, site.worker("left", rank), "memory", held, seconds) for rank in range(2)]


def waits(site: Site, ranks: list[Rank], *, sealed: bool = False) -> bool:
    """Whether the offer lasts."""
    ranks[0].offer.look_at = 0.0
    site.direct._end_if_over(ranks[0].offer, "UPLOADING", lambda: sealed)
    return not ranks[0].offer.ended


def groups(futures: "list[Future[object]]") -> set[str]:
    found: list[Any] = [future.result(LONG) for future in futures]
    return {link.group if link is not None else "" for link in found}


def linked(site: Site, number: int = 1) -> str:
    """The group of a link that is not tried yet."""
    asked = meet(site)
    wait_meeting(site)
    ranks = offered(site, number)
    (group,) = groups(asked)
    tasks = [rank.task("UPLOADING") for rank in ranks]
    if tasks[0] and tasks[0].kind == direct_pb2.DirectTask.DROP:
        tasks = [rank.task("UPLOADING") for rank in ranks]
    assert [(task.kind, task.group) for task in tasks if task] == [(direct_pb2.DirectTask.LINK, group)] * 2
    assert all(task.link.trial for task in tasks if isinstance(task, Task) and task.link)
    assert not waits(site, ranks, sealed=True)
    return group


def wait_meeting(site: Site) -> None:
    wait_until(lambda: len(site.direct._meeting.get("left", ("", {}))[1]) == 2, "both workers wait", LONG)


def proven(site: Site, number: int = 1, seconds: float = 0.2) -> str:
    group = linked(site, number)
    assert groups(meet(site, group, seconds)) == {group}
    return group


def why_not(site: Site, number: int = 1) -> str:
    """Why the server takes a version over the staged path."""
    with pytest.raises(FailedPrecondition) as caught:
        completed(site.direct.join, site.worker("left", 0), "memory", "policy", number, f"i-{number}")
    return str(caught.value)


def test_a_link_is_made_while_a_version_is_uploaded_for_which_nobody_is_held(site: Site) -> None:
    asked = meet(site)
    wait_meeting(site)
    ranks = offered(site)
    assert waits(site, ranks)
    assert len(groups(asked)) == 1
    assert not waits(site, ranks, sealed=True)


def test_without_a_worker_that_waits_for_a_link_the_offer_ends_at_once(site: Site) -> None:
    site.taking = set()
    assert not waits(site, offered(site))


def test_a_server_takes_versions_over_a_proven_link_alone(site: Site) -> None:
    group = linked(site)
    assert "its offer is over" in why_not(site)
    offered(site, 2)
    assert "its link to the ranks is being tried" in why_not(site, 2)
    assert groups(meet(site, group, 0.2)) == {group}
    ranks = offered(site, 3)
    links: list[Any] = [future.result(LONG) for future in site.join("left", 3, "i-3")]
    assert {link.group for link in links} == {group}
    assert site.offered.offered("policy")[3].links == {"left": ""}
    assert waits(site, ranks, sealed=True)


def test_one_worker_that_has_not_tried_its_link_keeps_the_server_on_the_staged_path(site: Site) -> None:
    group = linked(site)
    completed(site.direct.meet, site.worker("left", 0), "memory", group, 0.2)
    offered(site, 2)
    assert "its link to the ranks is being tried" in why_not(site, 2)


def test_a_slow_link_is_given_up_and_tried_again_after_a_while(site: Site) -> None:
    for number in (1, 2):  # the first failure of a link costs no pause
        report = meet(site, linked(site, number), 3.2)[:1]
        wait_until(lambda: site.direct._unlinked)
        site.now += 11.0
        assert groups(report) == {""}
    ranks = offered(site, 3)
    assert "transfers in a row failed; the next is due" in why_not(site, 3)
    assert (
        "would take 3.2 s over its link to the ranks, longer than 1 s" in (site.offered.offered("policy")[3].links or {})["left"]
    )
    assert groups(meet(site)) == {""}
    assert not waits(site, ranks, sealed=True)
    site.now += 31.0
    assert proven(site, 4)


def test_a_member_that_cannot_link_is_said_to_operators(site: Site) -> None:
    group = linked(site)
    site.finish(site.rank(0), group, "nobody is there")
    offered(site, 2)
    assert "nobody is there" in why_not(site, 2)
    assert "nobody is there" in (site.offered.offered("policy")[2].links or {})["left"]


def test_workers_ask_in_vain_where_no_link_is_to_be_tried(site: Site) -> None:
    site.taking = set()
    assert groups(meet(site)) == {""}  # its fleet takes READY versions alone, or it cannot take them directly
    site.taking, site.hosts["left"] = {"left"}, "here"
    assert groups(meet(site)) == {""}
    site.hosts["left"] = "there"
    declare_ranks(site, host="")  # its ranks offer to all, or to none
    assert groups(meet(site)) == {""}
    declare_ranks(site)
    site.direct.open_network = False
    assert groups(meet(site)) == {""}
    offered(site)
    assert "security, and not direct_trusted_fabric" in why_not(site)


def test_ranks_on_several_hosts_offer_to_linked_servers(site: Site) -> None:
    for rank, host in enumerate(("here", "there")):
        site.direct.declare(site.rank(rank), "memory", share_of_rows(rank), declared=Declared(host))
    asked = meet(site)
    wait_meeting(site)
    ranks = [Rank(site, rank, 1, 2.0, ahead_only=True, host=host, elsewhere=True) for rank, host in enumerate(("here", "there"))]
    (group,) = groups(asked)
    assert group
    assert not ranks[0].offer.ended
    assert groups(meet(site, group, 0.1)) == {group}
    for rank, host in enumerate(("here", "there")):
        Rank(site, rank, 2, 2.0, ahead_only=True, host=host, elsewhere=True)
    links: list[Any] = [future.result(LONG) for future in site.join("left", 2, "i-2")]
    assert {link.group for link in links} == {group}


def test_a_rank_in_a_new_process_is_linked_anew(site: Site) -> None:
    group = proven(site)
    site.rank = lambda rank: type(site.worker("left", 0))("models/policy/publishers/1", rank, f"again-{rank}")  # type: ignore[method-assign]
    declare_ranks(site)
    offered(site, 2)
    assert "being tried" in why_not(site, 2)
    (other,) = groups(meet(site, group, 0.2))
    assert other not in ("", group)


def test_a_worker_that_has_lost_its_link_gets_another(site: Site) -> None:
    group = proven(site)
    assert linked(site, 2) != group


def test_a_transfer_that_fails_takes_the_link_with_it(site: Site) -> None:
    group = proven(site)
    offered(site, 2)
    [future.result(LONG) for future in site.join("left", 2, "i-2")]
    site.finish(site.worker("left", 0), group, "it stalled")
    offered(site, 3)
    assert "it stalled" in why_not(site, 3) or "transfers in a row failed" in why_not(site, 3)


def test_a_wait_for_ranks_ends(site: Site) -> None:
    asked = meet(site)
    wait_meeting(site)
    site.now += 11.0
    assert groups(asked) == {""}
    assert not site.direct._meeting


def test_a_link_that_an_install_has_made_was_not_tried(site: Site) -> None:
    site.hosts["left"] = "here"
    ranks = offered(site)
    links: list[Any] = [future.result(LONG) for future in site.join("left", 1)]
    assert all(isinstance(link, Link) and not link.trial for link in links)
    site.hosts["left"] = "there"
    [rank.offer.end("enough") for rank in ranks]
    offered(site, 2)
    assert "has not been tried yet" in why_not(site, 2)
