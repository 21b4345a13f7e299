"""Copies of what ranks have written on nodes, each piece checked before it is written: from real ports, some of them wrong."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.sources import LIMITS
from resharder.server.holding.transfers import FetchFailed
from resharder.server.infra.filesystem import MediumRefused
from resharder.server.nodes import home_fetch
from resharder.server.nodes.home_fetch import HomeSource, fetch_from_homes

from tests.support.ports import free_port

VERSION, TAG = "models/policy/versions/1", "tag"
FILES = lay_out([TensorSpec(name, "BF16", (10 << 10, 1024)) for name in "ab"], homes={"a": "one", "b": "two"})


def content_of(file: FileLayout) -> bytes:
    return (file.header + bytes(range(251)) * (file.size // 251 + 1))[: file.size]


CONTENT = {file.path: content_of(file) for file in FILES}
CHECKSUMS = {
    (path, at): xxhash.xxh3_64_intdigest(content[at : at + PIECE_BYTES])
    for path, content in CONTENT.items()
    for at in range(0, len(content), PIECE_BYTES)
}


@dataclass
class Served:
    """The files, as a port serves them."""

    folder: Path

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        yield ServedVersion(VERSION, TAG, {file.path: file.size for file in FILES}, self.folder)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A port with the files, one with another byte in the first piece of each, and one that nobody listens to."""
    found, opened = {"nobody": f"127.0.0.1:{free_port()}"}, []
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        for path, content in CONTENT.items():
            changed = bytearray(content)
            changed[7] ^= name == "wrong"
            (tmp_path / name / path).write_bytes(changed)
        opened.append(DataPort("127.0.0.1", 0, DataReads(Served(tmp_path / name), lambda *_: nullcontext(), local_only=False)))
        found[name] = f"127.0.0.1:{opened[-1].port}"
    yield found
    for port in opened:
        port.close()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(home_fetch, "_PATIENCE", 5.0)
    folder = tmp_path / "target"
    folder.mkdir()
    for file in FILES:
        (folder / file.path).write_bytes(bytes(file.size))
    return folder


def fetch(folder: Path, one: str, two: str, *, whole: bool = True, tag: str = TAG, gone: str = "") -> dict[str, bytes]:
    """The files of a folder after a fetch from the ports of both nodes."""
    sources = {name: HomeSource(address, (file,)) for name, address, file in zip(("one", "two"), (one, two), FILES, strict=True)}
    sizes = {file.path: file.size for file in FILES}
    numbering = PieceNumbering(sizes.items(), None if whole else PIECE_BYTES)
    wanted = Bitmap.full(numbering.count) if whole else None
    copy = HeldFiles(VERSION, tag, folder, sizes, numbering, wanted=wanted, checksums=CHECKSUMS)
    fetch_from_homes(copy, sources, None, lambda: gone)
    return {file.path: (folder / file.path).read_bytes() for file in FILES}


def test_all_pieces_arrive_from_the_nodes_that_have_them(target: Path, ports: dict[str, str]) -> None:
    assert fetch(target, ports["right"], ports["right"]) == CONTENT


def test_the_shortest_part_of_each_node_shows_that_it_is_reached(target: Path, ports: dict[str, str]) -> None:
    found = fetch(target, ports["right"], ports["wrong"], whole=False)
    for path, content in CONTENT.items():
        assert len(content) % PIECE_BYTES < PIECE_BYTES // 2
        assert found[path] == bytes(PIECE_BYTES) + content[PIECE_BYTES:]


def test_a_wrong_piece_is_never_written_and_names_its_node(target: Path, ports: dict[str, str]) -> None:
    with pytest.raises(FetchFailed, match=r"nodes/two: .*expected checksum") as caught:
        fetch(target, ports["right"], ports["wrong"])
    assert caught.value.node == "two"
    assert (target / FILES[1].path).read_bytes()[:PIECE_BYTES] == bytes(PIECE_BYTES)


@pytest.mark.full
def test_a_port_that_nobody_listens_to_or_another_version_ends_the_fetch(target: Path, ports: dict[str, str]) -> None:
    with pytest.raises(FetchFailed, match=r"nodes/one: .*refused") as caught:
        fetch(target, ports["nobody"], ports["right"], whole=False)
    assert caught.value.node == "one"
    with pytest.raises(FetchFailed, match="fingerprint"):
        fetch(target, ports["right"], ports["right"], tag="another tag")


def test_no_further_request_is_made_once_it_is_of_no_use(
    target: Path, ports: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home_fetch, "LIMITS", replace(LIMITS, stalled=0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(FetchFailed, match="the version is aborted") as caught:
            fetch(target, address, address, gone="the version is aborted")
    assert caught.value.node == "", "no node is to blame"


def test_a_piece_that_cannot_be_written_is_no_fault_of_its_node(target: Path, ports: dict[str, str]) -> None:
    (target / FILES[0].path).unlink()
    with pytest.raises(MediumRefused, match="No such file"):
        fetch(target, ports["right"], ports["right"])
