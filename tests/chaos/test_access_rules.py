"""The model judges intrusions, connections without TLS, and the daemon's pages by a history; parties have what they need."""

from pathlib import Path

import pytest
from resharder.server.security.roles import Roles

from tests.chaos.book import Book
from tests.chaos.parties import NOBODY, ROLES, STRANGER, Parties


def secured(security: bool = True) -> Book:
    book = Book()
    book.add("run", replicas=2, servers=["left"], nodes=[], security=security)
    return book


def tried(book: Book, *outcomes: str) -> Book:
    for outcome in outcomes:
        book.add("intrusion", what="command", party="scraper", outcome=outcome)
    return book


@pytest.mark.parametrize("outcome", ["NOT_ALLOWED", "401", "403"])
def test_a_refused_intrusion_is_as_it_should_be(outcome: str) -> None:
    book = tried(secured(), outcome, "UNREACHABLE", "0")
    book.add("peace", phase="begin")
    assert book.rules() == []


@pytest.mark.parametrize("outcome", ["ok", "INTERNAL", "200", "NOT_READY"])
def test_an_intrusion_that_is_not_refused_is_found(outcome: str) -> None:
    assert tried(secured(), outcome, "NOT_ALLOWED").rules() == ["intrusion"]


def test_a_run_with_security_whose_intruder_was_never_refused_is_found() -> None:
    for book, expected in ((tried(secured(), "UNREACHABLE"), ["intrusion"]), (secured(), ["intrusion"]), (secured(False), [])):
        book.add("peace", phase="begin")
        assert book.rules() == expected


def test_a_connection_without_tls_is_found() -> None:
    for security, expected in ((True, ["plain"]), (False, [])):
        book = secured(security)
        book.add("links", plain={"far-data": 2})
        assert book.rules() == expected


@pytest.mark.parametrize(
    ("path", "status", "expected"),
    [
        ("/metrics", 0, []),
        ("/readyz", 503, []),
        ("/metrics", 503, ["page"]),
        ("/", 500, ["page"]),
        ("/api/status", 403, ["page"]),
    ],
)
def test_a_page_that_fails_while_the_daemon_runs_is_found(path: str, status: int, expected: list[str]) -> None:
    book = Book()
    book.add("page", path=path, status=status, text="")
    assert book.rules() == expected


def test_every_party_has_files_of_its_own_and_a_row_in_the_table_of_roles(tmp_path: Path) -> None:
    parties = Parties(tmp_path, ("node", "far", "third"), True)
    names = ("trainer", "operator", "observer", "scraper", "left", "right", "node", "far", "third", STRANGER)
    contexts = [parties.tls(name) for name in (*names, NOBODY)]
    assert all(found is not None and found.context() for found in contexts)
    assert len({found.certificate for found in contexts if found is not None}) == len(names) + 1
    assert set(parties.environment("left")) == {"RESHARDER_TLS_CA", "RESHARDER_TLS_CERT", "RESHARDER_TLS_KEY"}
    assert set(parties.node_options("far")) == {"tls_ca", "tls_cert", "tls_key"}
    before = Path(parties.files("far")["certificate"]).read_bytes()
    parties.renew("far")
    assert Path(parties.files("far")["certificate"]).read_bytes() != before
    roles = Roles(ROLES)
    assert all(roles.of([f"dns:{name}"]) for name in parties.names.values())


def test_without_security_no_party_has_files(tmp_path: Path) -> None:
    parties = Parties(tmp_path, ("node",), False)
    assert (parties.tls("left"), parties.files("left"), parties.node_options("node")) == (None, {}, {})
    assert not list(tmp_path.iterdir())
