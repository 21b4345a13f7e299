"""Which servers a trainer holds its weights for that says nothing of the direct path: those that take versions ahead of READY.

The servers are those of tests/support/simulated_fleet.py.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from resharder.server.state.server import Reach, Worker
from resharder.v1 import resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.ahead_site import WITH_OTHERS, Site
from tests.support.simulated_fleet_servers import HERE, NAMES
from tests.support.simulated_store import MODEL


@pytest.fixture
def site() -> Site:
    """Three servers on version 1, in a fleet with the default."""
    found = Site()
    found.serve_ahead(None)
    return found


def taking(site: Site, number: int = 2, host: str = HERE, links: Mapping[str, str] | None = None) -> set[str]:
    return set(site.fleets.taking_ahead(MODEL, number, Reach(frozenset({host} - {""}), links)))


def test_all_do_before_and_after_every_rank_has_offered_a_version(site: Site) -> None:
    assert taking(site) == set(NAMES)
    number = site.versions.begin(HERE)
    site.fleets.tick()
    assert taking(site, number) == set(NAMES)


def test_those_that_have_taken_it_do_not(site: Site) -> None:
    assert not taking(site, site.offer())


def test_none_does_without_a_fleet_or_servers(site: Site) -> None:
    assert not site.fleets.taking_ahead("another", 2, Reach())
    for name in NAMES:
        site.kill_server(name)
    assert not taking(site)


def test_a_server_that_is_killed_does_not_although_its_lease_runs(site: Site) -> None:
    site.kill_server("a")
    assert taking(site) == {"b", "c"}


def test_a_server_that_is_cut_off_does_until_its_lease_ends(site: Site) -> None:
    site.cut_off("a")
    assert taking(site) == set(NAMES)
    for _ in range(4):
        site.pass_time(3)
    assert taking(site) == {"b", "c"}


@pytest.mark.parametrize(("setting", "reason"), WITH_OTHERS)
def test_those_of_a_fleet_that_serves_ready_versions_alone_do_not(site: Site, setting: dict[str, object], reason: str) -> None:
    site.set(**setting)
    assert not taking(site)


@pytest.mark.parametrize(
    "target",
    [
        resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.NONE),
        resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.NUMBER, version=1),
        resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.LATEST, every_seconds=3600),
    ],
    ids=["paused", "pinned", "resting"],
)
def test_those_of_a_fleet_that_is_not_to_move_do_not(site: Site, target: resources_pb2.VersionTarget) -> None:
    site.set(target=target)
    assert not taking(site)


@pytest.mark.parametrize("level", [Power.ASLEEP_1, Power.ASLEEP_2])
def test_servers_that_sleep_or_are_to_do_not(site: Site, level: Power) -> None:
    site.set_power(level, one=False)
    assert not taking(site)
    for _ in range(3):
        site.settle()
    assert not taking(site)
    site.set_power(Power.AWAKE, one=False)
    assert not taking(site)  # not yet: they have to wake first


def test_drained_servers_do_not(site: Site) -> None:
    site.drain("a", drained=True)
    for _ in range(3):
        site.settle()
    assert "a" not in taking(site)
    assert "b" in taking(site)


def test_a_server_that_takes_only_what_is_staged_does_not(site: Site) -> None:
    site.staged_only("a")
    assert taking(site) == {"b", "c"}


def test_servers_on_another_host_do_not_unless_it_is_offered_to_all(site: Site) -> None:
    assert not taking(site, host="another")
    assert taking(site, host="") == set(NAMES)


def test_servers_on_another_host_do_if_they_are_linked_to_the_ranks(site: Site) -> None:
    assert taking(site, host="another", links={"a": "", "b": "it is slow"}) == {"a"}


def test_a_server_on_another_host_takes_a_version_over_its_link_and_the_others_say_why_they_wait(site: Site) -> None:
    number = site.versions.begin("another", {"a": "", "b": "it is slow"})
    for _ in range(3):
        site.settle()
    assert site.shows() == [number, 1, 1]
    assert "not on the trainer's host, and it is slow" in site.reasons()["b"]
    assert "not on the trainer's host, and its link to the ranks has not been tried yet" in site.reasons()["c"]


def test_a_fleet_does_not_move_to_a_version_that_is_offered_on_another_host(site: Site) -> None:
    number = site.versions.begin("another")
    for _ in range(3):
        site.settle()
    assert site.shows() == [1] * 3
    assert site.fleet.move is None or site.fleet.move.to == 1
    site.versions.complete(number)
    for _ in range(3):
        site.settle()
    assert site.shows() == [number] * 3


def test_a_server_on_another_host_waits_for_ready_and_the_others_do_not(site: Site) -> None:
    plain = site.report

    def report(plant, state, version, install, error):  # type: ignore[no-untyped-def]
        if plant.id != "a":
            return plain(plant, state, version, install, error)
        fingerprint = plant.held_as if plant.holds else ""
        worker = Worker(0, state, version, install, error, plant.nonce, fingerprint, memory="memory", direct=True)
        return site.fleets.report_worker("a", replace(worker, host="another"))

    site.report = report  # type: ignore[method-assign]
    site.report_state(site.plants["a"])
    assert taking(site) == {"b", "c"}
    number = site.versions.begin(HERE)
    site.fleets.tick()
    for _ in range(3):
        site.settle()
    assert site.shows() == [1, number, number]
    assert "not on the trainer's host" in site.reasons()["a"]


def test_a_busy_server_does_for_it_takes_the_version_next(site: Site) -> None:
    site.versions.publish()
    site.fleets.tick()
    site.until("a", server_pb2.Order.APPLY)
    assert "a" in taking(site, 3)


def test_servers_that_serve_a_version_which_is_not_ready_yet_do(site: Site) -> None:
    number = site.offer()
    assert taking(site, number + 1) == set(NAMES)
