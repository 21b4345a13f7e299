"""A server whose API servers end by an order leaves the daemon; any other is LOST. Lost ones are forgotten after a time."""

from pathlib import Path

import pytest
from resharder.server.fleets.fleets import Attachment, Fleets, Note
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.state.errors import FailedPrecondition, ResourceNotFound
from resharder.server.state.fleet import Fleet, UpdateStrategy
from resharder.server.state.server import Settings, Worker
from resharder.server.state.server_events import Attached, Reported
from resharder.v1 import resources_pb2

from tests.support.simulated_store import SimulatedVersions
from tests.support.waits import completed

MODEL = "policy"
LEASE, FORGET = 10.0, 100.0


class Site:
    """A daemon with one version and one server of one worker, whose time is the test's."""

    def __init__(self, folder: Path, strict: bool, claims: bool = True) -> None:
        self.now, self.versions, self.noted = 0.0, SimulatedVersions(), list[tuple[str, str]]()
        self.versions.publish()
        files = FleetFiles(folder)
        if strict:
            files.save(Fleet(MODEL, MODEL, strategy=UpdateStrategy(resources_pb2.UpdateStrategy.ATOMIC)), 0.0)

        def note(kind: str, subject: str, what: str, reason: str = "", **details: object) -> None:
            self.noted.append((subject, what))

        kept: Note = note
        self.fleets = Fleets(
            self.versions,
            self.versions,
            settings=Settings(lease=LEASE, grace=5, forget=FORGET),
            clock=lambda: self.now,
            files=files,
            note=kept,
            tick_seconds=0,
        )
        if claims:
            self.claim()

    def claim(self, id: str = "s") -> None:
        completed(self.fleets.claim, id, MODEL, "", wait_seconds=0, boot=False)

    def attach(self, nonce: str, id: str = "s", address: str = "") -> Attachment:
        return self.fleets.attach(id, Attached(nonce, 1, address))

    def states(self) -> dict[str, str]:
        views = self.fleets.servers()
        return {view.server.id: resources_pb2.Server.State.Name(view.state) for view in views}  # type: ignore[arg-type]

    def report_worker(self, process: str) -> None:
        held = Worker(0, resources_pb2.Worker.BOOTED, 1, process=process, fingerprint=self.versions.ready[1])
        self.fleets.report_worker("s", held)

    def tick(self, now: float) -> list[str]:
        self.now = now
        self.fleets.tick()
        return [view.server.id for view in self.fleets.servers()]

    def awaited(self) -> tuple[tuple[str, ...], tuple[int, int]]:
        """The servers that the fleet awaits, and who is asked for when a version is waited for."""
        (fleet,) = self.fleets.fleets()
        return fleet.returning, self.fleets.serving(MODEL, 1)


@pytest.fixture(params=[False, True], ids=["lenient", "strict"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, strict=request.param)


def test_a_server_is_forgotten_when_its_last_api_server_has_left(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    first, second = site.attach("a"), site.attach("b")
    first.report(Reported("a", leaving=True))
    assert site.tick(0.0) == ["s"], "an API server is left"
    second.report(Reported("b", leaving=True))
    assert site.tick(0.0) == []
    assert site.noted[-1] == ("servers/s", "left")
    assert "lost" not in {what for _, what in site.noted}
    assert site.fleets.by_name[MODEL].members == frozenset()
    orders = [second.orders.get() for _ in range(second.orders.qsize())]
    assert orders[-1] is None, "its stream ends"


def test_in_a_fleet_whose_versions_must_not_mix_it_is_forgotten_when_its_lease_ends(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=True)
    attachment = site.attach("a")
    attachment.report(Reported("a", leaving=True))
    attachment.close()
    assert site.tick(LEASE - 1) == ["s"]
    assert "its API servers have ended" in site.fleets.servers()[0].reason
    assert site.tick(LEASE + 1) == []
    assert "lost" not in {what for _, what in site.noted}


def test_workers_that_end_later_do_not_bring_a_server_back(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    attachment = site.attach("a")
    site.report_worker("one")
    attachment.report(Reported("a", leaving=True))
    with pytest.raises(FailedPrecondition) as refused:
        site.report_worker("one")
    assert refused.value.reason == "SERVER_LEFT"
    with pytest.raises(ResourceNotFound):
        site.report_worker("two")
    site.claim()
    site.report_worker("one")


def test_workers_that_end_later_do_not_take_the_place_of_those_of_the_next_boot(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    attachment = site.attach("a")
    site.report_worker("one")
    attachment.report(Reported("a", leaving=True))
    site.claim()
    site.report_worker("two")
    site.report_worker("one")
    (view,) = site.fleets.servers()
    assert view.server.workers[0].process == "two"


def test_a_server_that_comes_back_within_its_lease_stays(site: Site) -> None:
    attachment = site.attach("a")
    attachment.report(Reported("a", leaving=True))
    attachment.close()
    site.claim()
    site.attach("b")
    assert site.tick(LEASE - 1) == ["s"]


def test_a_lost_server_is_forgotten_after_the_time_of_the_settings(site: Site) -> None:
    site.attach("a").close()
    assert site.tick(LEASE + 1) == ["s"]
    assert ("servers/s", "lost") in site.noted
    assert site.tick(LEASE + FORGET) == ["s"]
    assert site.tick(LEASE + FORGET + 3) == []


def test_a_restarted_daemon_awaits_its_servers_for_a_while(tmp_path: Path) -> None:
    assert Site(tmp_path, strict=False).awaited()[0] == (), "nothing was there before the first start"
    site = Site(tmp_path, strict=False, claims=False)
    assert site.awaited() == (("s",), (0, 1)), "a version is not served by all of none"
    site.claim()
    assert site.awaited()[0] == ()
    gone = Site(tmp_path, strict=False, claims=False)
    gone.now = 10 * LEASE
    assert gone.awaited() == ((), (0, 0))


def test_a_server_whose_engine_dies_is_lost_at_once_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    attachment = site.attach("a")
    attachment.report(Reported("a", failure="its engine core ended with code -9"))
    assert site.states() == {"s": "LOST"}
    assert ("servers/s", "lost") in site.noted
    site.now = 3.0
    assert site.fleets.servers()[0].reason == "its engine core ended with code -9, 3 s ago"
    orders = [attachment.orders.get() for _ in range(attachment.orders.qsize())]
    assert orders[-1] is None, "its stream ends"
    assert site.fleets.by_name[MODEL].members == {"s"}, "the fleet counts it"


def test_in_a_fleet_whose_versions_must_not_mix_it_is_lost_when_its_lease_ends(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=True)
    site.tick(0.0)
    site.attach("a").report(Reported("a", failure="its engine died"))
    site.tick(1.0)
    assert "its engine died; it is LOST in 9 s" in site.fleets.servers()[0].reason
    site.tick(LEASE + 1)
    assert site.states() == {"s": "LOST"}


def test_a_server_is_lost_if_one_of_its_api_servers_has_seen_its_engine_die(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    first, second = site.attach("a"), site.attach("b")
    first.report(Reported("a", failure="its engine died"))
    assert site.states() != {"s": "LOST"}, "an API server is left"
    second.report(Reported("b", leaving=True))
    assert site.states() == {"s": "LOST"}


def test_a_lost_server_that_attaches_again_and_leaves_has_left(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    site.attach("a").report(Reported("a", failure="its engine died"))
    site.claim()
    site.attach("b").report(Reported("b", leaving=True))
    assert site.states() == {}


@pytest.mark.parametrize(
    ("before", "after", "replaced"),
    [
        ("10.0.0.1:8000", "10.0.0.1:8000", True),
        ("host:8000", "host:8000", True),
        ("10.0.0.1:8000", "10.0.0.1:8001", False),
        ("10.0.0.1:8000", "10.0.0.2:8000", False),
        ("127.0.0.1:8000", "127.0.0.1:8000", False),  # another host's, maybe
        ("localhost:8000", "localhost:8000", False),
        ("[::1]:8000", "[::1]:8000", False),
        ("/run/vllm.sock", "/run/vllm.sock", False),
        ("", "", False),
    ],
)
def test_a_server_under_a_new_id_replaces_the_lost_one_whose_place_it_has_taken(
    tmp_path: Path, before: str, after: str, replaced: bool
) -> None:
    site = Site(tmp_path, strict=False)
    site.attach("a", address=before).report(Reported("a", failure="its engine died"))
    site.claim("new")
    site.attach("b", "new", after)
    assert ("s" not in site.states()) == replaced
    assert (("servers/s", "replaced") in site.noted) == replaced


def test_a_server_that_lives_is_not_replaced(tmp_path: Path) -> None:
    site = Site(tmp_path, strict=False)
    site.attach("a", address="10.0.0.1:8000")
    site.claim("new")
    site.attach("b", "new", "10.0.0.1:8000")
    assert site.states().keys() == {"s", "new"}


def test_a_server_that_does_not_come_back_after_a_restart_of_the_daemon_is_lost(tmp_path: Path) -> None:
    Site(tmp_path, strict=False)
    site = Site(tmp_path, strict=False, claims=False)
    assert site.tick(LEASE) == []
    assert site.tick(LEASE + 3) == ["s"]
    assert site.states() == {"s": "LOST"}
    assert "it has not come back since the daemon's restart" in site.fleets.servers()[0].reason
    site.claim()
    assert site.states() == {"s": "BOOTING"}
    site.attach("a")
    with pytest.raises(FailedPrecondition):
        site.fleets.forget("s")
