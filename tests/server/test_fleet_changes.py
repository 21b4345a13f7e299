"""Changes by operators to fleets and servers: refused with a reason and no trace, or in effect, stored, recorded, signalled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resharder.server.fleets.fleets import Attachment, Fleets
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, ResourceNotFound
from resharder.server.state.fleet import Fleet, VersionTarget, View
from resharder.server.state.server import Install, Server, Settings, Worker
from resharder.server.state.server_events import Attached, Reported
from resharder.v1 import resources_pb2, server_pb2

from tests.support.simulated_store import MODEL, SimulatedVersions
from tests.support.waits import completed

SETTINGS = Settings(lease=10, grace=10, boot=30, forget=1000)


class Desk:
    """A daemon with version 1, and server `a` with two workers in the model's fleet."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder, self.versions = 100.0, folder, SimulatedVersions()
        self.notes: list[tuple[Any, ...]] = []
        self.versions.publish()
        self.fleets = Fleets(
            self.versions,
            self.versions,
            settings=SETTINGS,
            files=FleetFiles(folder),
            clock=lambda: self.now,
            note=lambda *what, **details: self.notes.append((*what, details)),
            tick_seconds=0,
        )
        completed(self.fleets.claim, "a", MODEL, "", wait_seconds=0, boot=True)

    @property
    def server(self) -> Server:
        return self.fleets.by_id["a"]

    def serve(self) -> Attachment:
        """Let the server boot and serve version 1."""
        attachment = self.fleets.attach("a", Attached("control", 2, "10.0.0.1:8000"))
        for rank in range(2):
            report = Worker(rank, resources_pb2.Worker.BOOTED, 1, process=f"p{rank}", fingerprint="fingerprint 1")
            self.fleets.report_worker("a", report)
        attachment.report(Reported("control", self.server.opened_by, server_pb2.Order.RESUME))
        assert self.server.serving == 1
        self.notes.clear()
        return attachment

    def lose(self) -> None:
        """Let the server's lease end."""
        self.now += SETTINGS.boot + 1
        self.fleets.tick()
        assert self.server.lost_at is not None
        self.notes.clear()

    def stored(self) -> dict[str, Fleet]:
        return FleetFiles(self.folder).load(self.now)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def to_none(fleet: Fleet, view: View) -> Fleet:
    return replace(fleet, target=VersionTarget(resources_pb2.VersionTarget.NONE))


def test_a_change_is_stored_in_effect_on_servers_and_signalled(desk: Desk) -> None:
    desk.serve()
    before = desk.fleets.changed.count
    view = desk.fleets.change(MODEL, to_none)
    assert view.fleet.target.kind == desk.stored()[MODEL].target.kind == resources_pb2.VersionTarget.NONE
    assert desk.fleets.changed.count > before
    desk.versions.publish()
    assert desk.fleets.change(MODEL, lambda fleet, view: fleet).servers == ("a",)
    assert desk.server.ready.keys() == {1, 2}, "a change looks at the store's versions"


def test_a_change_without_an_effect_is_signalled_too(desk: Desk) -> None:
    before = desk.fleets.changed.count
    desk.fleets.change(MODEL, lambda fleet, view: fleet)
    assert desk.fleets.changed.count == before + 1


def test_a_new_fleet_needs_a_model_unless_it_is_a_models_own(desk: Desk) -> None:
    assert desk.fleets.change("new", to_none, MODEL).fleet.model == MODEL
    other = Desk(desk.folder / "other")
    other.fleets.by_id, other.fleets.by_name = {}, {}
    assert other.fleets.change(MODEL, to_none).fleet.model == MODEL
    with pytest.raises(ResourceNotFound, match=r"there is no fleet 'x', only \['new', 'policy'\]; a new one needs a model"):
        desk.fleets.change("x", to_none)
    with pytest.raises(ResourceNotFound, match=r"there is no model 'm'; the daemon has \['policy'\]"):
        desk.fleets.change("x", to_none, "m")
    with pytest.raises(InvalidArgument, match="expected a fleet of at most 64 letters"):
        desk.fleets.change("no/name", to_none, MODEL)


def test_a_profiled_install_is_repeated_by_a_server_at_rest_alone(desk: Desk) -> None:
    with pytest.raises(ResourceNotFound, match="server 'b' is unknown"):
        desk.fleets.reinstall("b")
    with pytest.raises(FailedPrecondition, match=r"server a is busy, or does not serve its target: .*workers"):
        desk.fleets.reinstall("a")
    assert not any(note[0] == "operator" for note in desk.notes)
    desk.serve()
    install, workers = desk.fleets.reinstall("a")
    assert desk.server.install is not None
    assert (desk.server.install.id, desk.server.install.state, workers) == (install, resources_pb2.Install.STAGING, 2)
    assert desk.server.install.profiled
    assert desk.notes[-1] == ("operator", "servers/a", "profile", {"version": 1, "install": install})
    with pytest.raises(FailedPrecondition, match="server a is busy, or does not serve its target") as refused:
        desk.fleets.reinstall("a")
    assert refused.value.reason == "NOT_SERVING"
    assert desk.server.install.id == install


def test_a_lost_server_repeats_no_install_and_the_reason_is_how_long_it_has_been_silent(desk: Desk) -> None:
    desk.lose()
    with pytest.raises(FailedPrecondition, match="does not serve its target: no control side attached for 31 s"):
        desk.fleets.reinstall("a")


def test_no_install_is_repeated_while_the_fleet_moves(desk: Desk) -> None:
    desk.serve()
    desk.versions.publish()
    desk.fleets.tick()
    assert desk.fleets.by_name[MODEL].moving is not None
    before = desk.server.install
    with pytest.raises(FailedPrecondition, match="does not serve its target: fleet policy moves"):
        desk.fleets.reinstall("a")
    assert desk.server.install is before


def test_a_fleet_without_servers_is_deleted_with_its_file_and_pins(desk: Desk) -> None:
    with pytest.raises(ResourceNotFound, match=r"fleet 'x' has no settings to delete; fleets with settings: \['policy'\]"):
        desk.fleets.delete("x")
    with pytest.raises(FailedPrecondition, match="fleet policy still has servers a: stop them"):
        desk.fleets.delete(MODEL)
    desk.fleets.change("new", lambda fleet, view: fleet, MODEL)
    desk.fleets.change("new", to_none)
    assert "fleets/new" in desk.versions.holders[1]
    desk.notes.clear()
    before = desk.fleets.changed.count
    desk.fleets.delete("new")
    assert "new" not in desk.fleets.by_name
    assert "new" not in desk.stored()
    assert "fleets/new" not in desk.versions.holders[1]
    assert (desk.notes, desk.fleets.changed.count) == ([("operator", "fleets/new", "delete", {})], before + 1)


def test_a_lost_server_alone_is_forgotten_with_its_pins_and_its_membership(desk: Desk) -> None:
    with pytest.raises(ResourceNotFound, match="server 'b' is unknown"):
        desk.fleets.forget("b")
    with pytest.raises(FailedPrecondition, match=r"server a is not LOST: ."):
        desk.fleets.forget("a")
    desk.lose()
    before = desk.fleets.changed.count
    desk.fleets.forget("a")
    assert desk.fleets.by_id == {}
    assert desk.stored()[MODEL].members == frozenset()
    assert not any("servers/a" in holders for holders in desk.versions.holders.values())
    assert desk.notes == [("operator", "servers/a", "forget", {})]
    assert desk.fleets.changed.count > before


def test_a_server_waits_for_its_turn_no_longer_than_until_the_lost_server_before_it_is_forgotten(desk: Desk) -> None:
    desk.serve()
    desk.versions.publish()

    def joined(state: resources_pb2.Install.State, phase: resources_pb2.Worker.State) -> dict[str, Any]:
        workers = {rank: replace(known, state=phase, install="2", joined=True) for rank, known in desk.server.workers.items()}
        return {"install": Install("2", 2, state, desk.now, desk.now), "workers": workers}

    for id in ("b", "c"):  # as many as may pause for one sender
        applying = joined(resources_pb2.Install.APPLYING, resources_pb2.Worker.STAGED)
        desk.fleets._put(replace(desk.server, id=id, lost_at=desk.now, controls=(), opened=0, **applying))
    desk.fleets._put(replace(desk.server, **joined(resources_pb2.Install.STAGING, resources_pb2.Worker.STAGED)))
    desk.fleets.change(MODEL, lambda fleet, view: fleet)
    assert not desk.server.goal.apply
    desk.fleets.forget("c")
    assert desk.server.goal.apply


def test_a_server_that_is_not_lost_yet_is_refused_with_the_time_that_is_left(desk: Desk) -> None:
    attachment = desk.serve()
    attachment.close()
    desk.now += 4
    why = r"server a is not LOST: serving version 1; no control side is attached; its lease ends in 6 s$"
    with pytest.raises(FailedPrecondition, match=why):
        desk.fleets.forget("a")
