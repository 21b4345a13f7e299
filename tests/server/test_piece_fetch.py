"""Fetches of parts of files from data ports, each checked before it is written: from real ports, of which some are wrong."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.range_client import DataAddress
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.store import piece_fetch
from resharder.server.store.piece_fetch import FetchedPart, FetchFailed, PartSource, fetch_parts, parts_of

from tests.support.ports import free_port

VERSION = "models/policy/versions/1"
(FILE,) = lay_out([TensorSpec("a", "BF16", (20 << 10, 1024))])
CONTENT = FILE.header + bytes(range(251)) * ((FILE.size - len(FILE.header)) // 251 + 1)
CONTENT = CONTENT[: FILE.size]
CHECKSUMS = [xxhash.xxh3_64_intdigest(CONTENT[at : at + PIECE_BYTES]) for at in range(0, FILE.size, PIECE_BYTES)]
PARTS = [*parts_of(FILE, CHECKSUMS)]


@dataclass
class Served:
    """The file, as a port serves it."""

    folder: Path

    @contextmanager
    def pinned(self, model: str, number: int) -> Iterator[ServedVersion]:
        yield ServedVersion(VERSION, "tag", {FILE.path: FILE.size}, self.folder)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[dict[str, PartSource]]:
    """A port with the file, one with another byte in its second part, and one that nobody listens to."""
    found, opened = {}, []
    for name, byte in (("right", None), ("wrong", PIECE_BYTES + 7)):
        (tmp_path / name).mkdir()
        content = bytearray(CONTENT)
        if byte is not None:
            content[byte] ^= 1
        (tmp_path / name / FILE.path).write_bytes(content)
        reads = DataReads(Served(tmp_path / name), lambda *_: nullcontext(), local_only=False)
        opened.append(DataPort("127.0.0.1", 0, reads))
        found[name] = PartSource(name, DataAddress("127.0.0.1", opened[-1].port), "tag")
    found["nobody"] = PartSource("nobody", DataAddress("127.0.0.1", free_port()), "tag")
    yield found
    for port in opened:
        port.close()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(piece_fetch, "_PATIENCE", 0.3)
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / FILE.path).write_bytes(bytes(FILE.size))
    return folder


def fetch(folder: Path, sources: list[PartSource], gone: str = "") -> bytes:
    fetch_parts(folder, VERSION, PARTS, lambda part: sources, lambda: gone)
    return (folder / FILE.path).read_bytes()


def test_all_parts_arrive_from_a_source_and_from_another_where_one_is_wrong_or_gone(
    target: Path, ports: dict[str, PartSource]
) -> None:
    assert len(PARTS) == 3
    assert fetch(target, [ports["right"]]) == CONTENT
    (target / FILE.path).write_bytes(bytes(FILE.size))
    assert fetch(target, [ports["wrong"], ports["nobody"], ports["right"]]) == CONTENT


def test_a_wrong_part_is_never_written_and_names_its_source(target: Path, ports: dict[str, PartSource]) -> None:
    with pytest.raises(FetchFailed, match="expected checksum") as caught:
        fetch(target, [ports["wrong"]])
    assert caught.value.source == "wrong"
    part: FetchedPart = PARTS[1]
    assert (target / FILE.path).read_bytes()[part.start : part.end] == bytes(part.end - part.start)


def test_a_port_that_nobody_listens_to_or_another_version_ends_the_fetch(target: Path, ports: dict[str, PartSource]) -> None:
    with pytest.raises(FetchFailed, match="refused"):
        fetch(target, [ports["nobody"]])
    right = ports["right"]
    with pytest.raises(FetchFailed, match="fingerprint"):
        fetch(target, [PartSource("right", right.address, "another tag")])


def test_no_further_attempt_is_made_once_it_is_of_no_use(target: Path, ports: dict[str, PartSource]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = PartSource("silent", DataAddress("127.0.0.1", silent.getsockname()[1], silent_seconds=0.1), "tag")
        with pytest.raises(FetchFailed, match="the version is aborted") as caught:
            fetch(target, [source], gone="the version is aborted")
    assert caught.value.source == "", "the source is not to blame"


def test_parts_have_a_checksum_each() -> None:
    with pytest.raises(ValueError, match="zip"):
        [*parts_of(FILE, CHECKSUMS[:-1])]
