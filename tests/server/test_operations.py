"""Commands of operators: refused with a reason and without a trace, or durable before they are answered."""

from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.state.errors import DaemonError, FailedPrecondition, InvalidArgument, ResourceNotFound
from resharder.server.state.fleet import VersionTarget as FleetVersionTarget
from resharder.server.state.server_events import Attached
from resharder.v1 import operator_pb2, resources_pb2
from resharder.v1.resources_pb2 import Power

from tests.support.simulated_store import MODEL, SimulatedVersions
from tests.support.waits import completed

Fleet, UpdateStrategy, VersionTarget = resources_pb2.Fleet, resources_pb2.UpdateStrategy, resources_pb2.VersionTarget

NOW = 100.0


class Desk:
    """An operator's side of a daemon with versions 1 to 3 and one server, `a`, in fleet `policy`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.versions = folder, SimulatedVersions()
        for _ in range(3):
            self.versions.publish()
        self.start()

    def start(self) -> None:
        self.versions.restart()
        files = FleetFiles(self.folder)
        self.fleets = Fleets(self.versions, self.versions, files=files, clock=lambda: NOW, tick_seconds=0)  # type: ignore[arg-type]
        self.operations = Operations(self.fleets, {"probe"})

    def update(self, **fields: object) -> None:
        message = Fleet(name=MODEL, **fields)  # type: ignore[arg-type]
        self.operations.update(operator_pb2.UpdateFleetRequest(fleet=message, update_mask=FieldMask(paths=list(fields))))

    def kept(self) -> object:
        return FleetFiles(self.folder).load(NOW).get(MODEL)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    desk = Desk(tmp_path)
    completed(desk.fleets.claim, "a", MODEL, "", wait_seconds=0, boot=True)
    return desk


REFUSED: dict[str, tuple[type[DaemonError], str, Callable[[Desk], object]]] = {
    "a target of no kind": (InvalidArgument, "TARGET", lambda d: d.update(target=VersionTarget())),
    "a number without a version": (InvalidArgument, "TARGET", lambda d: d.update(target=VersionTarget(kind="NUMBER"))),
    "a rate for a number": (
        InvalidArgument,
        "TARGET",
        lambda d: d.update(target=VersionTarget(kind="NUMBER", version=1, every_seconds=1)),
    ),
    "a negative rate": (InvalidArgument, "TARGET", lambda d: d.update(target=VersionTarget(kind="LATEST", every_seconds=-1))),
    "a rate that is no number": (
        InvalidArgument,
        "TARGET",
        lambda d: d.update(target=VersionTarget(kind="LATEST", every_seconds=float("nan"))),
    ),
    "a version that is not there": (
        FailedPrecondition,
        "VERSION_NOT_READY",
        lambda d: d.update(target=VersionTarget(kind="NUMBER", version=9)),
    ),
    "a strategy of no kind": (InvalidArgument, "STRATEGY", lambda d: d.update(strategy=UpdateStrategy())),
    "a negative count": (InvalidArgument, "STRATEGY", lambda d: d.update(strategy=UpdateStrategy(kind="ROLLING", at_a_time=-1))),
    "more canaries than servers": (
        InvalidArgument,
        "STRATEGY",
        lambda d: d.update(strategy=UpdateStrategy(kind="CANARY", canaries=2)),
    ),
    "canaries without CANARY": (
        InvalidArgument,
        "STRATEGY",
        lambda d: d.update(strategy=UpdateStrategy(kind="ROLLING", canaries=1)),
    ),
    "turns for ATOMIC": (InvalidArgument, "STRATEGY", lambda d: d.update(strategy=UpdateStrategy(kind="ATOMIC", at_a_time=1))),
    "a check that is not configured": (
        InvalidArgument,
        "CHECK_UNKNOWN",
        lambda d: d.update(strategy=UpdateStrategy(kind="CANARY", check="x")),
    ),
    "no pause mode": (InvalidArgument, "PAUSE_MODE", lambda d: d.update(pause_mode=0)),
    "a negative skew": (InvalidArgument, "MAX_SKEW", lambda d: d.update(max_skew=-1)),
    "a field that cannot be set": (InvalidArgument, "UPDATE_MASK", lambda d: d.update(settled_version=1)),
    "rolling back to what is wanted": (
        InvalidArgument,
        "VERSION",
        lambda d: d.operations.roll_back(operator_pb2.RollBackFleetRequest(fleet=MODEL, version=3)),
    ),
    "rolling back to what is gone": (
        FailedPrecondition,
        "VERSION_NOT_READY",
        lambda d: d.operations.roll_back(operator_pb2.RollBackFleetRequest(fleet=MODEL, version=9)),
    ),
    "deciding where nothing moves": (
        FailedPrecondition,
        "NOTHING_TO_DECIDE",
        lambda d: d.operations.decide(operator_pb2.DecideMoveRequest(fleet=MODEL, go_on=True)),
    ),
    "no power": (InvalidArgument, "POWER", lambda d: d.operations.set_power(operator_pb2.SetPowerRequest(fleet=MODEL))),
    "a server of another fleet": (
        ResourceNotFound,
        "SERVER_UNKNOWN",
        lambda d: d.operations.set_drained(operator_pb2.SetDrainedRequest(fleet=MODEL, server="servers/b", drained=True)),
    ),
    "a fleet that is not there": (
        ResourceNotFound,
        "FLEET_UNKNOWN",
        lambda d: d.operations.set_drained(operator_pb2.SetDrainedRequest(fleet="other", drained=True)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_and_changes_nothing(case: str, desk: Desk) -> None:
    error, reason, act = REFUSED[case]
    before = desk.kept()
    with pytest.raises(error) as refused:
        act(desk)
    assert refused.value.reason == reason
    assert desk.kept() == before == desk.fleets.fleet(MODEL).fleet


def test_a_refused_strategy_says_what_was_expected_and_what_came(desk: Desk) -> None:
    for strategy, message in (
        (UpdateStrategy(kind="CANARY", canaries=2), "expected at most 1 canaries, the number of servers of fleet policy, got 2"),
        (UpdateStrategy(kind="CANARY", hold_seconds=-2), "expected hold_seconds of 0 to 1e9, got -2.0"),
        (UpdateStrategy(kind="ATOMIC", at_a_time=2), "at_a_time and max_failures are for ROLLING and CANARY, not for ATOMIC"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{message}$"):
            desk.update(strategy=strategy)


def test_what_was_asked_for_outlives_the_daemon(desk: Desk) -> None:
    desk.update(
        target=VersionTarget(kind="NUMBER", version=2),
        strategy=UpdateStrategy(kind="CANARY", canaries=1, check="probe"),
        max_skew=4,
    )
    desk.operations.set_power(operator_pb2.SetPowerRequest(fleet=MODEL, server="servers/a", power="ASLEEP_2"))
    desk.operations.set_drained(operator_pb2.SetDrainedRequest(fleet=MODEL, server="a", drained=True))
    desk.start()
    fleet = desk.fleets.fleet(MODEL).fleet
    assert (fleet.target, fleet.strategy.kind, fleet.strategy.check, fleet.max_skew) == (
        FleetVersionTarget(VersionTarget.NUMBER, 2), resources_pb2.UpdateStrategy.CANARY, "probe", 4,
    )  # fmt: skip
    assert (fleet.power_of("a"), fleet.power_of("b"), fleet.drained) == (Power.ASLEEP_2, Power.AWAKE, {"a"})
    assert desk.versions.holders[2] >= {f"fleets/{MODEL}"}, "what it wants is held again"


def test_a_rollback_asked_for_twice_is_one_and_its_versions_come_back_on_an_operators_word_alone(desk: Desk) -> None:
    request = operator_pb2.RollBackFleetRequest(fleet=MODEL, reason="bad answers", request_id="once")
    for _ in range(2):
        view = desk.operations.roll_back(request)
        assert (view.wanted_version, dict(view.fleet.refused)) == (2, {3: "bad answers"})
        desk.start()
    desk.update(target=VersionTarget(kind="LATEST"))
    assert desk.fleets.fleet(MODEL).wanted_version == 2
    desk.versions.publish()
    desk.fleets.tick()
    assert desk.fleets.fleet(MODEL).wanted_version == 4, "newer ones are taken"
    desk.update(target=VersionTarget(kind="NUMBER", version=3))
    view = desk.fleets.fleet(MODEL)
    assert (view.wanted_version, dict(view.fleet.refused)) == (3, {}), "named, it is wanted again"


def test_servers_that_pass_kv_caches_on_are_of_atomic_fleets_alone(desk: Desk) -> None:
    first = Attached("control", 1, passes_kv=True)
    with pytest.raises(FailedPrecondition, match="to update atomically") as refused:
        desk.fleets.attach("a", first)
    assert refused.value.reason == "KV_FLEET"
    desk.update(strategy=UpdateStrategy(kind="ATOMIC"))
    desk.fleets.attach("a", first)
    with pytest.raises(FailedPrecondition, match="servers a pass") as refused:
        desk.update(strategy=UpdateStrategy(kind="ROLLING"))
    assert refused.value.reason == "KV_FLEET"


def test_a_model_s_default_fleet_is_there_and_another_needs_its_model(desk: Desk) -> None:
    message = Fleet(name="night", model=f"models/{MODEL}", max_skew=1)
    desk.operations.update(operator_pb2.UpdateFleetRequest(fleet=message, update_mask=FieldMask(paths=["max_skew"])))
    assert [view.fleet.name for view in desk.fleets.fleets()] == ["night", MODEL]
    message.name = "none"
    message.model = "unknown"
    with pytest.raises(ResourceNotFound) as refused:
        desk.operations.update(operator_pb2.UpdateFleetRequest(fleet=message, update_mask=FieldMask(paths=["max_skew"])))
    assert refused.value.reason == "MODEL_UNKNOWN"


def test_a_fleet_file_that_cannot_be_read_stops_no_other(desk: Desk) -> None:
    desk.update(max_skew=3)
    (desk.folder / "broken.json").write_text('{"name": 7')
    desk.start()
    assert desk.fleets.fleet(MODEL).fleet.max_skew == 3
    assert (desk.folder / "broken.json").exists()
