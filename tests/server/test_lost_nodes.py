"""Nonces of nodes that are gone, over restarts of the daemon."""

import json
from pathlib import Path

import pytest
from resharder.server.nodes.homes import HomeRegister
from resharder.server.nodes.records import LostNodes, nonce_id

from tests.support.node_reports import lose_nodes, report_of, report_to


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lost_nodes.json"


class Daemon:
    """A register of homes, as after a start of the daemon."""

    def __init__(self, file: Path) -> None:
        self.homes = HomeRegister(lost=LostNodes(file))

    def report(self, node: str, nonce: bytes) -> None:
        report_to(self.homes, report_of(node, nonce=nonce))

    def settles(self, nonce: bytes) -> bool:
        return nonce_id(nonce) in self.homes.nonces().settled


def test_a_node_that_was_gone_is_settled_after_a_restart_and_a_live_one_is_not(file: Path) -> None:
    daemon = Daemon(file)
    daemon.report("one", b"1")
    daemon.report("two", b"2")
    lose_nodes(daemon.homes, "one", "none")
    assert (daemon.settles(b"1"), daemon.settles(b"2")) == (True, True)
    assert b"1" not in file.read_bytes().replace(nonce_id(b"1").encode(), b"")
    later = Daemon(file)
    assert (later.settles(b"1"), later.settles(b"2")) == (True, False)


def test_a_node_that_has_come_back_is_waited_for_after_the_next_restart(file: Path) -> None:
    daemon = Daemon(file)
    for node in ("same", "other"):
        daemon.report(node, node.encode())
    lose_nodes(daemon.homes, "same", "other")
    daemon = Daemon(file)
    daemon.report("same", b"same")
    daemon.report("other", b"another")
    later = Daemon(file)
    assert not any(map(later.settles, (b"same", b"another")))


def test_the_oldest_of_very_many_are_forgotten(file: Path) -> None:
    lost = LostNodes(file)
    lost.add({f"n{number}": bytes([number % 256, number // 256]) for number in range(5000)})
    assert (len(lost.nonces()), len(LostNodes(file).nonces())) == (4096, 4096)
    assert nonce_id(bytes([4999 % 256, 4999 // 256])) in lost.nonces()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"one": 1}', b"\xff"])
def test_a_damaged_file_is_an_empty_one(file: Path, content: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(content)
    assert not list(LostNodes(file).nonces())
    assert "nodes_unreadable" in capfd.readouterr().out


def test_a_file_that_cannot_be_written_costs_a_wait_alone(tmp_path: Path) -> None:
    lost = LostNodes(tmp_path / "missing" / "file")
    lost.add({"one": b"1"})
    assert list(lost.nonces()) == [nonce_id(b"1")]


def test_nothing_is_written_without_a_change(file: Path) -> None:
    lost = LostNodes(file)
    lost.add({})
    lost.remove("one", b"1")
    assert not file.exists()
    lost.add({"one": b"1"})
    assert json.loads(file.read_bytes()) == {"one": nonce_id(b"1")}
