"""Parties of a storm have certificates of their own and a row in the table of roles."""

from pathlib import Path

from resharder.server.security.roles import Roles

from tests.chaos.parties import NOBODY, ROLES, STRANGER, Parties


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
