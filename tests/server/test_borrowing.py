"""Parts of versions that are brought from nodes while they are read, and are holes again afterwards."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, PieceSpan, number_pieces
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.held_files import HeldFiles
from resharder.server.holding.part_files import PartFile, write_parts
from resharder.server.holding.transfers import HttpTransfer
from resharder.server.nodes.borrowing import Borrowing
from resharder.server.state.errors import Unavailable
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import MissingPieces, VerifiedVersion
from resharder.v1 import node_pb2

(FILE,) = lay_out([TensorSpec("a", "BF16", (20 << 10, 1024))])
NUMBERING = number_pieces([FILE])
CONTENT = (FILE.header + bytes(range(251)) * (FILE.size // 251 + 1))[: FILE.size]
PARTS = [PieceSpan(FILE.path, at, min(at + PIECE_BYTES, FILE.size)) for at in range(0, FILE.size, PIECE_BYTES)]


@dataclass
class Holder:
    """A node with the file, which counts the requests for it."""

    folder: Path
    requests: list[str] = field(default_factory=list)

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        @contextmanager
        def reading(spans: list[PieceSpan]) -> Iterator[None]:
            self.requests += [f"{span.start // PIECE_BYTES}" for span in spans]
            yield

        yield ServedVersion("models/policy/versions/1", "of the set", {FILE.path: FILE.size}, self.folder, reading)


@dataclass
class Nodes:
    """The register: which nodes hold the version, at which addresses."""

    addresses: list[str] = field(default_factory=list)

    def holders(self, version: str, piece: int) -> list[node_pb2.NodePeer]:
        return [node_pb2.NodePeer(node=address, data_address=address) for address in self.addresses]


class World:
    def __init__(self, root: Path) -> None:
        self.nodes, self.ports, self.holders = Nodes(), list[DataPort](), list[Holder]()
        folder = root / "version"
        folder.mkdir()
        write_parts(folder, [PartFile(FILE, ())])
        record = VersionRecord("policy", 1, READY, 1, 1, "job", FILE.size, 1, 0.0, fingerprint="f")
        checksums = tuple(xxhash.xxh3_64_intdigest(CONTENT[part.start : part.end]) for part in PARTS)
        missing = MissingPieces(Bitmap(NUMBERING.count), checksums, frozenset({"one"}))
        self.version = VerifiedVersion(folder, Manifest(record, (FILE,), {}, (), whole=False), missing)
        self.borrowing = Borrowing(
            self.nodes,  # type: ignore[arg-type]
            HttpTransfer(HeldFiles.checksum, None, 5.0),
            kept_bytes=PIECE_BYTES,
            patience=0.2,
        )

    def add(self, folder: Path, content: bytes) -> Holder:
        """Add a node with this content."""
        folder.mkdir()
        (folder / FILE.path).write_bytes(content)
        self.holders.append(Holder(folder))
        self.ports.append(DataPort("127.0.0.1", 0, DataReads(self.holders[-1], lambda *_: nullcontext(), local_only=False)))
        self.nodes.addresses.append(f"127.0.0.1:{self.ports[-1].port}")
        return self.holders[-1]

    def read(self, start: int, end: int) -> bytes:
        with self.borrowing.reading(self.version, [PieceSpan(FILE.path, start, end)]):
            return (self.version.folder / FILE.path).read_bytes()[start:end]

    @property
    def path(self) -> Path:
        return self.version.folder / FILE.path

    def memory(self) -> int:
        return self.path.stat().st_blocks * 512


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.borrowing.close()
    for port in made.ports:
        port.close()


def test_bytes_are_there_while_they_are_read_and_fetched_once_for_all_readers(world: World, tmp_path: Path) -> None:
    holder = world.add(tmp_path / "one", CONTENT)
    assert world.memory() < 64 << 10
    across = PieceSpan(FILE.path, PIECE_BYTES - 7, PIECE_BYTES + 7)
    with world.borrowing.reading(world.version, [across]), ThreadPoolExecutor(8) as readers:
        found = readers.map(lambda _: world.read(across.start, across.end), range(32))
    assert set(found) == {CONTENT[across.start : across.end]}
    assert sorted(holder.requests) == ["0", "1"]
    assert world.memory() <= PIECE_BYTES + (64 << 10), "what was read last"


def test_parts_that_nobody_reads_are_holes_again_and_the_header_stays(world: World, tmp_path: Path) -> None:
    world.add(tmp_path / "one", CONTENT)
    for part in (*PARTS, *PARTS):
        assert world.read(part.start, part.end) == CONTENT[part.start : part.end]
    assert world.memory() <= PIECE_BYTES + (64 << 10)
    assert world.path.read_bytes()[: len(FILE.header)] == FILE.header
    assert world.read(0, FILE.size) == CONTENT, "more than is kept"
    assert not len(world.version.held()), "the daemon's host holds none of it"


def test_wrong_bytes_of_a_node_are_never_there_and_another_one_is_asked(world: World, tmp_path: Path) -> None:
    wrong = world.add(tmp_path / "wrong", CONTENT[:-1] + b"\0")
    right = world.add(tmp_path / "right", CONTENT)
    last = PARTS[-1]
    assert world.read(last.start, last.end) == CONTENT[last.start : last.end]
    assert (len(wrong.requests), len(right.requests)) == (1, 1)


def test_bytes_that_no_node_delivers_are_refused_and_asked_for_again_later(world: World, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no live node holds it; try again"):
        world.read(0, 1)
    world.add(tmp_path / "wrong", b"\0" + CONTENT[1:])
    with pytest.raises(Unavailable, match="expected checksum"):
        world.read(0, 1)
    world.add(tmp_path / "right", CONTENT)
    assert world.read(0, 1) == CONTENT[:1]
