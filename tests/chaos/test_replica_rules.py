"""The model judges, by a history, how many hosts hold a version that is READY, and why one was ABORTED for lack of them."""

from collections.abc import Callable

import pytest

from tests.chaos.book import Book
from tests.chaos.replica_rules import BARRED, SHOWN
from tests.chaos.schedule import REPLICA_SECONDS

SHORT = (
    "1 of 1 pieces have fewer than 3 holders, and no node is left for 1 of them among 2 live ones: nothing has changed for 10 s"
)


def with_nodes(replicas: int = 3) -> Book:
    """A run with three nodes, two of which hold version 1, which ranks wrote on one of them."""
    book = Book()
    book.add("run", replicas=replicas, servers=["left"], nodes=["node", "far", "third"], security=False)
    book.node("node")
    book.node("far", 1)
    book.node("third", 1)
    book.publish(1, place="far", transport="node")
    book.version(1, "READY", whole=True)
    book.skip(40)
    return book


def become_ready(book: Book, *nodes: str, whole: bool = True, place: str = "store") -> None:
    """Version 2 is READY while these nodes hold it."""
    book.version(2, "UPLOADING", whole=False)
    book.publish(2, place=place, transport="node" if place == "far" else "shared-memory")
    for name in nodes:
        book.node(name, 1, 2)
    book.version(2, "READY", whole=whole)
    book.skip(60)


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


def test_the_node_on_which_ranks_wrote_a_version_holds_it() -> None:
    for nodes, expected in ((("third",), []), ((), ["holders"])):
        book = with_nodes()
        become_ready(book, *nodes, place="far")
        assert book.rules() == expected


def test_a_holder_that_is_shown_later_than_ready_counts_by_the_next_answer_alone() -> None:
    for late, expected in ((0.0, []), (SHOWN, ["holders"])):
        book = with_nodes()
        become_ready(book, "far")
        ready = book.events[-1]["t"]
        book.now = ready + SHOWN / 2 + late
        book.node("third", 1, 2)
        assert book.rules() == expected, late


@pytest.mark.parametrize("state", ["DRAINED", "LOST"])
def test_a_node_that_is_not_live_is_no_holder(state: str) -> None:
    book = with_nodes()
    book.node("third", 1, 2, state=state)
    book.skip(40)
    become_ready(book, "far")
    assert book.rules() == ["holders"]


@pytest.mark.parametrize(
    "disturb",
    [
        lambda book: book.death("third"),
        lambda book: book.death("daemon"),
        lambda book: book.begin("drain_node", node="third"),
        lambda book: book.node("third", state="DRAINED"),
        lambda book: book.node("third", state="LOST"),
        lambda book: book.add("ready", process="third", failpoint=""),
    ],
)
def test_a_change_of_a_node_since_a_version_began_excuses_a_missing_holder(disturb: Callable[[Book], None]) -> None:
    for before, expected in ((True, ["holders"]), (False, [])):
        book = with_nodes()
        if before:
            disturb(book)
        book.publish(2, place="store", transport="shared-memory")
        book.node("far", 1, 2)
        if not before:
            disturb(book)
        book.skip(20)
        book.version(2, "READY", whole=True)
        assert set(book.rules()) - {"stuck"} == set(expected), "an operation that is begun alone never ends"


@pytest.mark.parametrize(
    "other",
    [
        lambda book: book.fault("server.stop", "left", seconds=2.0),
        lambda book: book.fault("link.silent", "third-data", seconds=2.0),
        lambda book: book.fault("node.stop", "third", seconds=2.0),
        lambda book: book.fault("trainer.kill", "trainer", part="job", new_job=False),
    ],
)
def test_a_fault_that_changes_no_node_excuses_no_missing_holder(other: Callable[[Book], None]) -> None:
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


@pytest.mark.parametrize(
    "disturb",
    [
        lambda book: book.death("third"),
        lambda book: book.fault("node.stop", "third", seconds=12.8),
        lambda book: book.fault("link.silent", "third-data", seconds=12.8),
        lambda book: book.fault("daemon.kill", "daemon", down=3.0, failpoint=""),
        lambda book: book.fault("certificates.renew", "far", party="far"),
        lambda book: book.node("third", state="LOST"),
    ],
)
def test_a_version_may_be_aborted_for_lack_of_holders_after_a_fault_of_a_node(disturb: Callable[[Book], None]) -> None:
    book = with_nodes()
    disturb(book)
    book.skip(1)
    book.node("third")
    book.skip(REPLICA_SECONDS)
    book.version(2, "ABORTED", why=SHORT)
    assert book.rules() == []
    book.skip(BARRED / 2)
    book.version(3, "ABORTED", why=SHORT)
    assert book.rules() == [], "a node that had a problem is left alone for some time"
    book.skip(3 * BARRED)
    book.version(4, "ABORTED", why=SHORT)
    assert book.rules() == ["needless abort"]


def test_a_version_that_is_aborted_for_lack_of_holders_without_a_fault_is_found() -> None:
    book = with_nodes()
    book.version(2, "ABORTED", why="the ranks began a later step")
    assert book.rules() == []
    book.version(3, "ABORTED", why=SHORT)
    assert book.rules() == ["needless abort"]
    two = with_nodes(replicas=2)
    two.death("third")
    two.version(2, "ABORTED", why=SHORT)
    assert two.rules() == ["needless abort"], "nothing waits for further nodes"


def test_a_ready_version_that_is_lost_with_three_replicas_is_found() -> None:
    book = with_nodes()
    become_ready(book, "node", "far")
    book.death("node")
    book.death("far")
    book.lost(2)
    assert "lost" in book.rules()
