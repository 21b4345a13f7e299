"""Fleets and clocks: wall clocks that jump, and waits that outlive the daemon."""

import json
from pathlib import Path

import pytest
from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.fleets.persistence import FleetFiles
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.simulated_store import MODEL, SimulatedVersions

YEAR = 365 * 86400.0


class Host:
    """A host with a daemon on it: `now` is its monotonic clock, `wall` its time of day."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.versions = folder, SimulatedVersions()
        self.now, self.wall = 50_000.0, 1.7e9
        self.versions.publish()
        self.start()

    def start(self) -> None:
        self.versions.restart()
        files = FleetFiles(self.folder)
        self.fleets = Fleets(
            self.versions,
            self.versions,
            files=files,
            clock=lambda: self.now,
            wall=lambda: self.wall,
            tick_seconds=0,
        )

    def target(self, every: float = 0.0) -> None:
        target = resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.LATEST, every_seconds=every)
        request = operator_pb2.UpdateFleetRequest(
            fleet=resources_pb2.Fleet(name=MODEL, model=MODEL, target=target), update_mask=FieldMask(paths=["target"])
        )
        Operations(self.fleets).update(request)
        self.fleets.tick()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds
        self.fleets.tick()

    @property
    def settled(self) -> int:
        return self.fleets.fleet(MODEL).fleet.settled

    @property
    def reason(self) -> str:
        return self.fleets.fleet(MODEL).reason


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("ahead", [5.0, 86400.0, YEAR])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_wall_clock_that_goes_back_holds_no_fleet_up(host: Host, ahead: float, restarts: bool) -> None:
    host.wall += ahead
    host.target()
    assert host.settled == 1
    host.wall -= ahead
    if restarts:
        host.start()
    host.versions.publish()
    host.fleets.tick()
    assert host.settled == 2, host.reason


@pytest.mark.parametrize("jump", [-YEAR, -30.0, 30.0, YEAR])
def test_moves_are_as_far_apart_as_they_should_be_whatever_the_wall_clock_shows(host: Host, jump: float) -> None:
    host.target(every=100)
    host.versions.publish()
    host.wall += jump
    host.pass_time(99)
    assert (host.settled, host.reason) == (1, "version 2 is READY and due in 1 s: at most one move in 100 s")
    host.pass_time(1)
    assert host.settled == 2


def test_a_wait_goes_on_where_the_daemon_stopped_on_any_host(host: Host) -> None:
    host.target(every=100)
    host.versions.publish()
    host.pass_time(29)
    host.fleets.close()
    host.now, host.wall = 3.0, 1.0  # of another host, which has just come up
    host.start()
    host.pass_time(70)
    assert host.settled == 1
    host.pass_time(1)
    assert host.settled == 2


def test_a_daemon_that_is_killed_forgets_little_of_a_wait(host: Host) -> None:
    host.target(every=100)
    host.versions.publish()
    for _ in range(90):
        host.pass_time(1)
    host.start()
    host.pass_time(9)
    assert host.settled == 1
    host.pass_time(31)
    assert host.settled == 2


def test_files_with_times_of_day_are_read_and_what_they_waited_for_begins_anew(host: Host) -> None:
    host.target(every=100)
    file = host.folder / f"{MODEL}.json"
    content = json.loads(file.read_text())
    for field in ("began", "held", "seconds"):  # which earlier releases do not write
        del content["move"][field]
    content["move"] |= {"started": host.wall + YEAR, "held_since": host.wall + YEAR}
    file.write_text(json.dumps(content))
    host.start()
    host.versions.publish()
    host.pass_time(99)
    assert host.settled == 1
    host.pass_time(1)
    assert host.settled == 2
