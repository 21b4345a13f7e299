"""Leadership is numbered: every LEAD begins a higher term, whatever becomes of leaders, servers and daemons."""

from pathlib import Path

import pytest
from resharder.server.fleets.fleets import MAX_TERM, Attachment, Fleets
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.server import Settings
from resharder.server.state.server_events import Attached, Order, Reported
from resharder.v1 import server_pb2

from tests.support.simulated_store import SimulatedVersions
from tests.support.waits import completed

MODEL = "policy"


class Site:
    """A daemon with one version and one server, whose time is the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.versions = folder, 0.0, SimulatedVersions()
        self.versions.publish()
        self.start()

    def start(self) -> None:
        self.versions.restart()
        self.fleets = Fleets(
            self.versions,
            self.versions,
            settings=Settings(lease=10, grace=10, forget=20),
            clock=lambda: self.now,
            files=FleetFiles(self.folder),
            tick_seconds=0,
        )
        completed(self.fleets.claim, "s", MODEL, "", wait_seconds=0, boot=False)

    def attach(self, nonce: str, term: int = 0) -> Attachment:
        return self.fleets.attach("s", Attached(nonce, 1, term=term))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def sent(attachment: Attachment) -> list[Order]:
    found = []
    while not attachment.orders.empty():
        if (order := attachment.orders.get()) is not None:
            found.append(order)
    return found


def led(attachment: Attachment) -> int:
    """The term of the only LEAD in it."""
    (term,) = (order.term for order in sent(attachment) if order.kind == server_pb2.Order.LEAD)
    return term


def test_each_lead_begins_a_higher_term(site: Site) -> None:
    first, second = site.attach("a"), site.attach("b")
    one = led(first)
    assert [(order.kind, order.term) for order in sent(second)] == [(server_pb2.Order.RENEWED, one)], "it does not lead"
    first.close()
    two = led(second)
    assert server_pb2.Order.LEAD not in {order.kind for order in sent(site.attach("a"))}
    three = led(site.attach("b"))  # its stream broke
    assert 0 < one < two < three


def test_a_silent_leader_is_followed_by_a_higher_term(site: Site) -> None:
    first, second = site.attach("a"), site.attach("b")
    before = led(first)
    sent(second)
    for site.now in (6.0, 11.0):
        second.report(Reported("b"))
        site.fleets.tick()
    assert led(second) > before


def test_a_daemon_that_starts_again_counts_on_though_nobody_says_where_it_was(site: Site) -> None:
    before = 0
    for _ in range(3):
        term = led(site.attach("a"))
        assert term > before
        before = term
        site.start()


@pytest.mark.parametrize("content", [b"", b"-1", b"many"])
def test_without_a_readable_count_it_counts_from_what_the_control_sides_have_seen(site: Site, content: bytes) -> None:
    site.start()
    before = led(site.attach("a"))
    (site.folder / "starts").write_bytes(content)
    site.start()
    assert led(site.attach("a", before)) > before


def test_a_side_that_has_seen_a_higher_term_has_the_leader_lead_anew(site: Site) -> None:
    leader = site.attach("a")
    led(leader)
    other = site.attach("b", 1 << 50)
    assert led(leader) == (1 << 50) + 1
    assert {order.term for order in sent(other)} == {(1 << 50) + 1}


def test_a_server_that_was_forgotten_goes_on_where_it_was(site: Site) -> None:
    first = site.attach("a")
    before = led(first)
    first.close()
    for site.now in (11.0, 40.0):
        site.fleets.tick()
    assert not site.fleets.servers()
    completed(site.fleets.claim, "s", MODEL, "", wait_seconds=0, boot=False)
    assert led(site.attach("a")) > before


@pytest.mark.parametrize("term", [-1, MAX_TERM + 1])
def test_a_term_that_no_daemon_has_given_is_refused(site: Site, term: int) -> None:
    with pytest.raises(InvalidArgument, match="expected a term") as refused:
        site.attach("a", term)
    assert refused.value.reason == "CONTROL"
