"""A fleet that serves versions before they are READY: one story for each way that it can end.

The servers are those of tests/support/simulated_fleet.py.
"""

from dataclasses import replace

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.rpc.convert import fleet_to_proto
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.server import Worker
from resharder.v1 import operator_pb2, resources_pb2, server_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.ahead_site import WITH_OTHERS, Site, strategy
from tests.support.simulated_fleet_servers import FLEET, NAMES
from tests.support.simulated_store import MODEL


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def unset(site: Site) -> Site:
    """The same servers, in a fleet with the default."""
    site.serve_ahead(None)
    return site


def shown(site: Site) -> tuple[bool, int, str]:
    message = fleet_to_proto(site.fleets.fleet(FLEET))
    return message.serve_ahead, message.serve_ahead_setting, message.serve_ahead_reason


def test_a_fleet_that_moves_all_at_once_serves_ahead_by_default(unset: Site) -> None:
    unset.offer()
    reason = "default of a fleet that moves ALL_AT_ONCE without a skew bound"
    assert shown(unset) == (True, resources_pb2.SERVE_AHEAD_AUTO, reason)


@pytest.mark.parametrize(("setting", "reason"), WITH_OTHERS)
def test_any_other_fleet_does_not(unset: Site, setting: dict[str, object], reason: str) -> None:
    unset.set(**setting)
    number = unset.versions.begin()
    for _ in range(5):
        unset.settle()
    assert unset.shows() == [1] * 3
    assert shown(unset) == (False, resources_pb2.SERVE_AHEAD_AUTO, reason)
    unset.versions.complete(number)
    for _ in range(30):
        unset.settle()
    assert unset.shows() == [number] * 3, unset.reasons()


@pytest.mark.parametrize("setting", [setting for setting, _ in WITH_OTHERS])
def test_a_fleet_that_is_set_to_move_otherwise_goes_back_to_what_is_ready(unset: Site, setting: dict[str, object]) -> None:
    number = unset.offer()
    unset.set(**setting)
    for _ in range(30):
        unset.settle()
    assert unset.shows() == [1] * 3, unset.reasons()
    unset.versions.complete(number)
    for _ in range(30):
        unset.settle()
    assert unset.shows() == [number] * 3, unset.reasons()


def test_an_operators_choice_survives_other_settings_and_restarts(site: Site) -> None:
    site.set(serve_ahead=False)
    for setting, _ in WITH_OTHERS:
        site.set(**setting)
    site.set(**strategy(resources_pb2.UpdateStrategy.ALL_AT_ONCE), max_skew=0)
    site.restart_daemon()
    assert shown(site) == (False, resources_pb2.SERVE_AHEAD_OFF, "set by an operator")
    site.set(serve_ahead_setting=resources_pb2.SERVE_AHEAD_ON)
    site.restart_daemon()
    assert shown(site) == (True, resources_pb2.SERVE_AHEAD_ON, "set by an operator")


def test_the_files_of_fleets_with_the_default_are_those_of_earlier_releases(unset: Site) -> None:
    assert b"serve_ahead" not in unset.files.written[FLEET]
    unset.restart_daemon()
    assert shown(unset)[1] == resources_pb2.SERVE_AHEAD_AUTO
    unset.serve_ahead(False)
    assert b'"serve_ahead": false' in unset.files.written[FLEET], "as earlier releases wrote it, which was a choice or not"


@pytest.mark.parametrize("setting", [0, 9])
def test_another_setting_is_refused(unset: Site, setting: int) -> None:
    with pytest.raises(InvalidArgument, match="expected serve_ahead_setting of SERVE_AHEAD_AUTO, SERVE_AHEAD_ON") as refused:
        unset.set(serve_ahead_setting=setting)
    assert refused.value.reason == "SERVE_AHEAD"


@pytest.mark.parametrize("transport", ["http", "grpc"])  # the latter is what older releases report
@pytest.mark.parametrize(("setting", "joins"), [(None, False), (True, True)])
def test_a_server_that_cannot_map_the_store_serves_ahead_by_choice_alone(
    site: Site, setting: bool | None, joins: bool, transport: str
) -> None:
    site.serve_ahead(setting)
    worker = site.fleets.server("a").workers[0]
    plain = site.report
    site.report = lambda plant, *arguments: plain(plant, *arguments) if plant.id != "a" else None  # type: ignore[method-assign]
    site.fleets.report_worker("a", replace(worker, transport=transport))
    site.versions.begin()
    site.fleets.tick()
    started = site.fleets.server("a").install is not None
    assert started == joins
    reason = site.fleets.servers()[0].reason
    assert ("worker 0 would fetch a version to fall back on" in reason) != joins


def test_a_server_that_has_to_wait_takes_the_newest_ready_version_meanwhile(unset: Site) -> None:
    unset.staged_only("a")
    number = unset.versions.begin()
    unset.set_power(Power.ASLEEP_1, one=True)
    unset.settle()
    unset.versions.complete(number)
    unset.versions.begin()
    unset.settle()
    unset.set_power(Power.AWAKE, one=True)
    for _ in range(4):
        unset.settle()
    assert unset.shows() == [number, number + 1, number + 1], unset.reasons()
    assert f"version {number + 1} to be READY: worker 0 cannot take all of it" in unset.fleets.servers()[0].reason


def test_what_was_served_ahead_is_not_installed_again_when_the_store_has_the_same(site: Site) -> None:
    number = site.offer()
    assert all(view.server.unproven and "ahead of READY" in view.reason for view in site.fleets.servers())
    assert "ahead of READY" in site.fleets.fleet(FLEET).reason
    before = site.installs()
    site.versions.complete(number)
    site.settle()
    site.settle()
    assert (site.shows(), site.installs()) == ([number] * 3, before)
    assert not any(view.server.unproven for view in site.fleets.servers())


def test_where_the_store_has_other_weights_they_are_installed(site: Site) -> None:
    number = site.offer()
    site.versions.complete(number, changed=True)
    site.fleets.tick()
    site.compare("a")
    view = site.fleets.servers()[0]
    assert "the store's copy differs: other weights" in view.reason
    assert site.shows() == [number] * 3  # served on while the others are staged
    for _ in range(3):
        site.settle()
    assert [site.plants[name].held_as for name in NAMES] == [site.versions.ready[number]] * 3
    assert site.shows() == [number] * 3


def test_an_aborted_version_gives_way_to_the_newest_ready_one(site: Site) -> None:
    number = site.offer()
    site.versions.abort(number)
    site.fleets.tick()
    assert site.shows() == [number] * 3  # until the other one is staged
    assert "it will not become READY" in site.fleets.servers()[0].reason
    site.settle()
    assert site.shows() == [1] * 3
    assert site.fleet.move
    assert site.fleet.move.reason == f"version {number} was not completed"


def test_a_version_aborted_while_it_is_applied_is_never_opened(site: Site) -> None:
    number = site.versions.begin()
    site.fleets.tick()
    plant, order = site.until("a", server_pb2.Order.APPLY)
    site.versions.abort(number)
    site.obey(plant, order, fails=False)
    for _ in range(3):
        site.settle()
    assert site.shows() == [1] * 3
    site.publish()
    site.settle()
    assert site.shows() == [number + 1] * 3


def test_an_aborted_version_is_left_even_where_no_other_is_wanted(site: Site) -> None:
    number = site.offer()
    request = operator_pb2.UpdateFleetRequest(
        fleet=resources_pb2.Fleet(name=FLEET, target=resources_pb2.VersionTarget(kind=int(resources_pb2.VersionTarget.NONE))),  # type: ignore[arg-type]
        update_mask=FieldMask(paths=["target"]),
    )
    site.operations.update(request)
    site.settle()
    assert site.shows() == [number] * 3
    site.versions.abort(number)
    for _ in range(2):
        site.settle()
    assert site.shows() == [1] * 3


def test_a_transfer_that_fails_brings_the_last_version_back_and_waits_for_the_store(site: Site) -> None:
    number = site.versions.begin()
    site.fleets.tick()
    site.obey(*site.until("a", server_pb2.Order.APPLY), fails=True)
    for _ in range(10):
        site.settle()
    assert site.shows() == [1, number, number]
    assert f"waits for version {number} to be READY: " in site.fleets.servers()[0].reason
    site.versions.complete(number)
    site.settle()
    site.settle()
    assert site.shows() == [number] * 3


def test_a_server_that_cannot_take_all_of_it_directly_waits(site: Site) -> None:
    worker = site.fleets.server("a").workers[0]
    again = Worker(0, worker.state, 1, worker.install, process=worker.process, fingerprint=worker.fingerprint)
    plain, site.report = site.report, lambda plant, *arguments: plain(plant, *arguments) if plant.id != "a" else None  # type: ignore[method-assign]
    site.fleets.report_worker("a", again)
    number = site.versions.begin()
    site.fleets.tick()
    site.settle()
    assert site.shows() == [1, number, number]
    assert "worker 0 cannot take all of it over the direct path" in site.fleets.servers()[0].reason


def test_servers_boot_from_the_ready_version_and_take_the_other_then(site: Site) -> None:
    number = site.offer()
    site.kill_server("a")
    site.pass_time(12)
    site.start_server("a")
    assert site.plants["a"].holds == 1
    site.settle()
    assert site.shows() == [number] * 3


def test_a_daemon_that_starts_again_knows_no_version_that_is_not_ready(site: Site) -> None:
    number = site.offer()
    site.restart_daemon()
    assert site.shows() == [number] * 3
    for _ in range(20):
        site.settle()
    assert site.shows() == [1] * 3


def test_a_fleet_that_is_to_serve_ahead_no_more_goes_back_at_once(site: Site) -> None:
    number = site.offer()
    site.serve_ahead(False)
    site.settle()
    assert site.shows() == [1] * 3
    site.versions.complete(number)
    for _ in range(2):
        site.settle()
    assert site.shows() == [number] * 3


def test_what_was_rolled_back_ahead_of_ready_does_not_come_back_when_it_is(site: Site) -> None:
    number = site.offer()
    site.operations.roll_back(operator_pb2.RollBackFleetRequest(fleet=FLEET))
    site.settle()
    assert site.shows() == [1] * 3
    site.versions.complete(number)
    for _ in range(3):
        site.settle()
    assert site.shows() == [1] * 3


def test_the_way_back_is_held_in_the_store(site: Site) -> None:
    site.offer()
    assert f"fleets/{FLEET}" in site.versions.holders[1]


@pytest.mark.parametrize("path", ["strategy", "max_skew"])
def test_only_a_fleet_whose_servers_move_each_for_itself_serves_ahead(site: Site, path: str) -> None:
    strategy = resources_pb2.UpdateStrategy(kind=resources_pb2.UpdateStrategy.ROLLING)
    request = operator_pb2.UpdateFleetRequest(
        fleet=resources_pb2.Fleet(name=FLEET, strategy=strategy, max_skew=2), update_mask=FieldMask(paths=[path])
    )
    with pytest.raises(InvalidArgument) as refused:
        site.operations.update(request)
    assert refused.value.reason == "SERVE_AHEAD"


def test_a_sleeping_server_is_awaited_from_the_order_to_wake_on_unless_it_fails(site: Site) -> None:
    site.set_power(Power.ASLEEP_2, one=False)
    site.settle()
    site.versions.publish()
    site.fleets.tick()
    awaiting = site.fleets.awaiting
    assert awaiting(MODEL, 2) == set(), "nobody has ordered them awake"
    site.set_power(Power.WEIGHTS_AWAKE, one=False)
    assert awaiting(MODEL, 2) == set(NAMES), "the order is on its way"
    plant, order = site.until("a", server_pb2.Order.WAKE)
    site.obey(plant, order, fails=True)
    assert awaiting(MODEL, 2) == {"b", "c"}
    site.settle()
    assert awaiting(MODEL, 2) == set(), "two have it, and the next attempt of the other is not due"
    site.pass_time(2)
    site.settle()
    assert [plant.holds for plant in site.plants.values()] == [2] * 3
    assert site.shows() == [0] * 3, "their KV cache sleeps"
