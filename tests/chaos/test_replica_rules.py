"""The model judges, by a history, how many hosts hold a version that is READY, and why one was ABORTED for lack of them."""

from collections.abc import Callable

import pytest

from tests.chaos.book import Book
from tests.chaos.replica_rules import BARRED, SHOWN
from tests.chaos.schedule import LEASE, REPLICA_SECONDS

SHORT = (
    "1 of 1 pieces have fewer than 3 holders, and no node is left for 1 of them among 2 live ones: nothing has changed for 10 s"
)


def with_nodes(replicas: int = 3) -> Book:
    """A run with three nodes, none of which holds anything."""
    book = Book()
    book.add("run", replicas=replicas, servers=["left"], nodes=["node", "far", "third"], security=False)
    for name in ("node", "far", "third"):
        book.node(name)
    book.skip(2 * (LEASE + SHOWN))
    return book


def become_ready(book: Book, *nodes: str, whole: bool = True) -> None:
    """Version 1 is READY while these nodes hold it."""
    book.version(1, "UPLOADING", whole=False)
    book.publish(1, place="far", transport="node")
    for name in nodes:
        book.node(name, 1)
    book.version(1, "READY", whole=whole)
    book.skip(60)
    book.version(2, "UPLOADING")


@pytest.mark.parametrize("nodes", [("node", "far"), ("far", "third"), ("node", "far", "third")])
def test_two_nodes_hold_a_version_with_three_replicas(nodes: tuple[str, ...]) -> None:
    book = with_nodes()
    become_ready(book, *nodes)
    assert book.rules() == []


@pytest.mark.parametrize("nodes", [(), ("far",)])
def test_a_version_that_is_ready_with_too_few_holders_is_found(nodes: tuple[str, ...]) -> None:
    book = with_nodes()
    become_ready(book, *nodes)
    assert book.rules() == ["holders"]
    fewer = with_nodes(replicas=2)
    become_ready(fewer, *nodes)
    assert fewer.rules() == []


def test_a_holder_that_is_shown_later_than_ready_counts_for_some_seconds() -> None:
    for late, expected in ((SHOWN - 3, []), (SHOWN + 1, ["holders"])):
        book = with_nodes()
        book.node("far", 1)
        book.publish(1, place="far", transport="node")
        book.version(1, "READY", whole=True)
        book.skip(late)
        book.node("third", 1)
        assert book.rules() == expected, late


@pytest.mark.parametrize("state", ["DRAINED", "LOST"])
def test_a_node_that_is_not_live_is_no_holder(state: str) -> None:
    book = with_nodes()
    book.node("far", 1)
    book.node("third", 1, state=state)
    book.node("third", 1)
    book.skip(100)
    book.node("third", state="LIVE")
    book.skip(100)
    become_ready(book)
    assert book.rules() == ["holders"]


@pytest.mark.parametrize(
    "disturb",
    [
        lambda book: book.death("third"),
        lambda book: book.fault("node.stop", "third", seconds=12.8),
        lambda book: book.fault("link.silent", "third-data", seconds=12.8),
        lambda book: book.fault("daemon.kill", "daemon", down=3.0, failpoint=""),
        lambda book: book.fault("certificates.renew", "far", party="far"),
        lambda book: book.begin("drain_node", node="third"),
        lambda book: book.node("third", state="DRAINED"),
    ],
)
def test_a_fault_of_a_node_excuses_a_missing_holder(disturb: Callable[[Book], None]) -> None:
    book = with_nodes()
    disturb(book)
    become_ready(book, "far")
    assert set(book.rules()) <= {"stuck"}, "an operation that is begun alone never ends"


@pytest.mark.parametrize(
    "other",
    [
        lambda book: book.fault("server.stop", "left", seconds=2.0),
        lambda book: book.fault("link.silent", "trainer", seconds=2.0),
        lambda book: book.fault("trainer.kill", "trainer", part="job", new_job=False),
    ],
)
def test_a_fault_elsewhere_excuses_no_missing_holder(other: Callable[[Book], None]) -> None:
    book = with_nodes()
    other(book)
    become_ready(book, "far")
    assert book.rules() == ["holders"]


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_ready_version_of_which_the_daemon_lacks_pieces_is_found_with_more_than_one_replica(replicas: int) -> None:
    book = with_nodes(replicas)
    become_ready(book, "node", "far", whole=False)
    assert book.rules() == ["holders"]
    one = with_nodes(1)
    become_ready(one, whole=False)
    assert one.rules() == []


def test_a_version_may_be_aborted_for_lack_of_holders_after_a_fault_of_a_node() -> None:
    book = with_nodes()
    book.death("third")
    book.skip(REPLICA_SECONDS)
    book.version(1, "ABORTED", why=SHORT)
    assert book.rules() == []
    book.skip(BARRED / 2)
    book.version(2, "ABORTED", why=SHORT)
    assert book.rules() == [], "a node that had a problem is left alone for some time"
    book.skip(3 * BARRED)
    book.version(3, "ABORTED", why=SHORT)
    assert book.rules() == ["needless abort"]


def test_a_version_that_is_aborted_for_lack_of_holders_without_a_fault_is_found() -> None:
    book = with_nodes()
    book.version(1, "ABORTED", why="the ranks began a later step")
    assert book.rules() == []
    book.version(2, "ABORTED", why=SHORT)
    assert book.rules() == ["needless abort"]
    two = with_nodes(replicas=2)
    two.death("third")
    two.version(1, "ABORTED", why=SHORT)
    assert two.rules() == ["needless abort"], "nothing waits for further nodes"


def test_a_ready_version_that_is_lost_with_three_replicas_is_found() -> None:
    book = with_nodes()
    become_ready(book, "node", "far")
    book.death("node")
    book.death("far")
    book.lost(1)
    assert "lost" in book.rules()
