"""The model judges lost versions, and which processes share memory, by a history."""

import pytest

from tests.chaos.book import Book
from tests.chaos.home_rules import ENDS, SOON


def on_far(replicas: int = 1) -> Book:
    """Two versions that ranks wrote on `far`; the daemon has copied the first."""
    book = Book()
    book.add("run", replicas=replicas, servers=["left", "right"], nodes=["node", "far"])
    for number in (1, 2):
        book.version(number, "UPLOADING", homes=["nodes/far"])
        book.publish(number, place="far", transport="node")
        book.version(number, "READY", whole=False)
    book.version(1, "READY", whole=True)
    return book


def test_a_version_that_dies_with_its_only_holder_may_be_lost() -> None:
    book = on_far()
    book.death("far")
    book.lost(2)
    assert book.rules() == []


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ({"name": "node.stop", "target": "far", "given": {"seconds": 12.8}}, []),
        ({"name": "link.silent", "target": "far", "given": {"seconds": 12.8}}, []),
        ({"name": "node.stop", "target": "far", "given": {"seconds": 2.0}}, ["lost"]),
        ({"name": "node.stop", "target": "node", "given": {"seconds": 12.8}}, ["lost"]),
        ({"name": "link.silent", "target": "far-data", "given": {"seconds": 12.8}}, ["lost"]),
        ({"name": "daemon.kill", "target": "daemon", "given": {}}, ["lost"]),
    ],
)
def test_only_the_silence_of_its_holder_past_the_lease_excuses_a_lost_version(
    fault: dict[str, object], expected: list[str]
) -> None:
    book = on_far()
    book.add("fault", **fault)
    book.lost(2)
    assert book.rules() == expected


def test_a_holder_that_the_daemon_shows_as_lost_excuses_a_lost_version() -> None:
    book = on_far()
    book.add("node", name="nodes/far", state="LOST", problems={}, before=book.now - 0.4)
    book.lost(2)
    assert book.rules() == []


def test_a_version_that_is_lost_without_a_death_is_found() -> None:
    book = on_far()
    book.lost(2)
    assert book.rules() == ["lost"]
    book = Book()
    book.death("far")
    book.skip(5)
    book.events += [{**event, "t": event["t"] + book.now} for event in on_far().events]
    for event in book.events[2:]:
        event.update({"before": event["before"] + book.now} if "before" in event else {})
    book.now += 20
    book.lost(2)
    assert book.rules() == ["lost"], "the node died before the version began"


def test_a_lost_version_that_the_daemon_had_copied_is_found() -> None:
    book = on_far()
    book.death("far")
    book.lost(1)
    assert book.rules() == ["lost"]


def test_a_lost_version_with_two_replicas_is_found() -> None:
    book = on_far(replicas=2)
    book.death("far")
    book.lost(2)
    assert "lost" in book.rules()


def test_a_lost_version_that_no_rank_wrote_on_a_node_is_found() -> None:
    book = on_far()
    book.publish(3, place="far", transport="http")
    book.version(3, "READY", whole=False)
    book.death("far")
    book.lost(3)
    assert book.rules() == ["lost"]


def test_a_ready_version_that_vanishes_is_found_with_one_replica_too() -> None:
    for state in ("ABORTED", "ABSENT"):
        book = on_far()
        book.death("far")
        book.version(2, state)
        assert book.rules() == ["READY lost"], state


def test_a_server_goes_back_from_a_lost_version() -> None:
    book = on_far()
    book.answer("2")
    book.death("far")
    book.lost(2)
    book.answer("2")
    book.answer("2", "1", v2="1100", v1="0011")
    book.answer("1")
    assert book.rules() == []


def test_a_server_that_stays_on_a_lost_version_gives_its_tokens() -> None:
    book = on_far()
    book.answer("2")
    book.death("far")
    book.lost(2)
    book.skip(2 * SOON)
    book.answer("2")
    book.answer("2")
    assert book.rules() == []


def test_a_server_that_moves_to_a_lost_version_is_found() -> None:
    for answers in ((("1",), ("2",)), (("1", "2"),)):
        book = on_far()
        book.answer("1")
        book.death("far")
        book.lost(2)
        book.skip(SOON - 5)
        book.answer("2")
        book.answer("1")
        assert book.rules() == [], "an install may have begun before the loss"
        book.skip(10)
        for versions in answers:
            book.answer(*versions, v1="1100" if versions[1:] else "1111", v2="0011" if versions[1:] else "1111")
        assert book.rules() == ["moved to a lost version"]


@pytest.mark.parametrize(
    ("place", "transport", "expected"),
    [
        ("far", "node", []),
        ("far", "http", []),
        ("far", "shared-memory", ["other host"]),
        ("store", "shared-memory", []),
        ("store", "node", ["other host"]),
        ("grpc", "grpc", []),
        ("grpc", "node", ["other host"]),
        ("grpc", "http", ["other host"]),
    ],
)
def test_ranks_share_memory_with_their_own_host_alone(place: str, transport: str, expected: list[str]) -> None:
    book = on_far()
    book.publish(3, place=place, transport=transport)
    book.version(3, "READY", whole=True)
    assert book.rules() == expected


@pytest.mark.parametrize(
    ("server", "transport", "expected"),
    [
        ("left", "shared-memory", []),
        ("left", "http", []),
        ("left", "node", ["other host"]),
        ("right", "node", []),
        ("right", "direct", []),
        ("right", "shared-memory", ["other host"]),
    ],
)
def test_workers_share_memory_with_their_own_host_alone(server: str, transport: str, expected: list[str]) -> None:
    book = on_far()
    book.add("server", name=server, transports=["direct", transport])
    assert book.rules() == expected


def test_a_run_whose_ranks_never_wrote_on_a_node_is_found() -> None:
    book = Book()
    book.add("run", replicas=1, servers=["left"], nodes=["node", "far"])
    book.publish(1, place="far", transport="http")
    book.version(1, "READY", whole=True)
    assert book.rules() == ["other host"]
    book.publish(2, place="far", transport="node")
    book.version(2, "READY", whole=True)
    assert book.rules() == []
    without = Book()
    without.add("run", replicas=2, servers=["left"], nodes=[])
    without.publish(1, place="grpc", transport="grpc")
    without.version(1, "READY", whole=True)
    assert without.rules() == []


def alone(*, direct: bool = False) -> Book:
    """Version 3 is UPLOADING on `far`, which is killed for good."""
    book = on_far()
    book.version(3, "UPLOADING", homes=["nodes/far"], whole=True)
    book.add("fault", name="node.gone", target="node", given={"nodes": ["far"], "down": 3600.0})
    book.add("death", process="far", status=-9)
    book.add("alone", nodes=["far"], versions=[3])
    id = book.begin("publish", step=3, place="far", direct=direct)
    book.end(id, "publish", "VERSION_ABORTED", ranks=[{"version": 3, "reason": "VERSION_ABORTED", "transport": "node"}])
    return book


def test_a_version_that_killed_nodes_alone_have_is_aborted_or_lost() -> None:
    for end in (lambda book: book.version(3, "ABORTED", why="far is lost"), lambda book: book.lost(3)):
        book = alone()
        end(book)
        book.skip(2 * ENDS)
        book.answer("1")
        assert book.rules() == []


def test_a_version_that_killed_nodes_alone_had_and_that_goes_on_is_found() -> None:
    for state in ("UPLOADING", "READY"):
        book = alone()
        book.version(3, state, whole=state == "UPLOADING")
        book.skip(2 * ENDS)
        book.answer("1")
        assert book.rules() == ["gone"], state
    book.version(3, "READY", whole=True)
    assert book.rules() == [], "the daemon had copied it"


def test_an_answer_of_a_version_that_killed_nodes_alone_had_is_found() -> None:
    for direct, later, expected in ((False, 0.0, ["gone"]), (True, 0.0, []), (True, 2 * ENDS, ["gone"])):
        book = alone(direct=direct)
        book.fleet(ahead=True)
        book.version(3, "ABORTED", why="far is lost")
        book.skip(later)
        book.answer("3")
        assert [rule for rule in book.rules() if rule != "not READY"] == expected, (direct, later)
