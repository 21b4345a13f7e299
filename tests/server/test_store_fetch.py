"""Pieces that the daemon fetches from nodes before READY, over real ports, some of which answer with wrong bytes."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import xxhash
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.held_files import HeldFiles, pieces_of
from resharder.server.holding.transfers import HttpTransfer
from resharder.server.infra.filesystem import MediumRefused
from resharder.server.nodes import store_fetch
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.store_fetch import StoreFetcher
from resharder.server.state.version import READY, UPLOADING, VersionRecord
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import MissingPieces, VerifiedVersion
from resharder.v1 import node_pb2

from tests.support.ports import free_port

VERSION = "models/policy/versions/1"
FILES = lay_out([TensorSpec(name, "BF16", (10 << 10, 1024)) for name in "ab"], homes={"a": "one", "b": "two"})


def content_of(file: FileLayout) -> bytes:
    return (file.header + bytes(range(251)) * (file.size // 251 + 1))[: file.size]


CONTENT = {file.path: content_of(file) for file in FILES}
NUMBERING = number_pieces(FILES)
CHECKSUMS = tuple(
    xxhash.xxh3_64_intdigest(CONTENT[file.path][at : at + PIECE_BYTES])
    for file in FILES
    for at in range(0, file.size, PIECE_BYTES)
)


@dataclass
class Served:
    """The files, as a port serves them."""

    folder: Path

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        yield ServedVersion(VERSION, "of the set", {file.path: file.size for file in FILES}, self.folder)


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


@dataclass
class Nodes:
    """The register, with a node for each file, as far as the fetcher knows it."""

    addresses: dict[str, str]
    replicas: int = 1
    gone: str = ""
    suspended: list[str] = field(default_factory=list)

    @property
    def homes(self) -> "Nodes":
        return self

    def written(self, version: str) -> dict[str, tuple[FileLayout, ...]]:
        return {node: (file,) for node, file in zip(self.addresses, FILES, strict=True)}

    def suspend(self, node: str) -> None:
        self.suspended.append(node)

    def own_order(self, version: VerifiedVersion, links: object) -> node_pb2.NodeOrder:
        held = {node: pieces_of(NUMBERING, files).to_bytes() for node, files in self.written(version.name).items()}
        peers = [node_pb2.NodePeer(node=f"nodes/{n}", data_address=a, held=held[n]) for n, a in self.addresses.items()]
        return node_pb2.NodeOrder(version=version.name, peers=peers)

    def count_own(self) -> None: ...

    def begin(self, versions: object) -> None: ...

    def problem(self, versions: object, stopped: Callable[[], bool]) -> str:
        return self.gone

    def await_holders(self, versions: list[VerifiedVersion], stopped: object) -> None:
        """Wait until the daemon has all pieces, if it should."""
        (version,) = versions
        while self.replicas > 1 and not version.is_whole():
            version.await_more(version.held(), 10.0)


@dataclass
class OneVersion:
    """A store with one version that waits for READY."""

    version: VerifiedVersion

    def partials(self, state: str = READY) -> list[VerifiedVersion]:
        return [self.version] if state == UPLOADING else []


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiedVersion:
    """A version of which the store has headers and zeros."""
    monkeypatch.setattr(store_fetch, "_PATIENCE", 2.0)
    folder = tmp_path / "target"
    folder.mkdir()
    for file in FILES:
        (folder / file.path).write_bytes(bytes(file.size))
    record = VersionRecord("policy", 1, READY, 1, 1, "job", NUMBERING.total, 2, 0.0, fingerprint="of the version")
    found = Manifest(record, tuple(FILES), {}, (), whole=False)
    missing = MissingPieces(Bitmap(NUMBERING.count), CHECKSUMS, frozenset({"one", "two"}))
    return VerifiedVersion(folder, found, missing, durable=False)


def fetch(version: VerifiedVersion, one: str, two: str, stalled: float = 5.0, **options: Any) -> tuple[dict[str, bytes], Nodes]:
    """The files of a version once the fetcher has what is needed from the ports of both nodes."""
    nodes = Nodes({"one": one, "two": two}, **options)
    transfer = HttpTransfer(HeldFiles.checksum, None, stalled)
    fetcher = StoreFetcher(OneVersion(version), nodes, transfer)  # type: ignore[arg-type]
    fetcher.start()
    try:
        fetcher.hold([version], lambda: False)
    except ReplicasShort as error:
        raise ReplicasShort(f"{error}; suspended: {nodes.suspended}") from error
    finally:
        fetcher.close()
    return {file.path: (version.folder / file.path).read_bytes() for file in FILES}, nodes


def test_with_two_replicas_all_pieces_arrive_from_the_nodes_that_have_them(
    version: VerifiedVersion, ports: dict[str, str]
) -> None:
    assert fetch(version, ports["right"], ports["right"], replicas=2)[0] == CONTENT


def test_the_shortest_piece_of_each_node_shows_that_it_is_reached(version: VerifiedVersion, ports: dict[str, str]) -> None:
    found, _ = fetch(version, ports["right"], ports["wrong"])
    for path, content in CONTENT.items():
        assert len(content) % PIECE_BYTES < PIECE_BYTES // 2
        assert found[path] == bytes(PIECE_BYTES) + content[PIECE_BYTES:]


@pytest.mark.parametrize(("port", "why"), [("wrong", "expected checksum"), ("nobody", "refused")])
def test_a_node_that_does_not_deliver_is_named_and_no_home_for_some_time(
    version: VerifiedVersion, ports: dict[str, str], port: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "written", lambda self, name: {"one": FILES[:1], "two": FILES[1:]})
    first = Bitmap.of(NUMBERING.count, [NUMBERING.touched(FILES[1].path, 0, 1)[0]])
    version.want(first)  # the piece with the wrong byte
    with pytest.raises(ReplicasShort, match=rf"nodes/two: .*{why}.*suspended: \['two'\]"):
        fetch(version, ports["right"], ports[port])
    assert (version.folder / FILES[1].path).read_bytes()[:PIECE_BYTES] == bytes(PIECE_BYTES)


def test_no_further_request_is_made_once_it_is_of_no_use(version: VerifiedVersion) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ReplicasShort, match=r"the version is aborted; suspended: \[\]"):
            fetch(version, address, address, stalled=0.1, gone="the version is aborted")


def test_a_piece_that_cannot_be_written_is_no_fault_of_its_node(version: VerifiedVersion, ports: dict[str, str]) -> None:
    (version.folder / FILES[0].path).unlink()
    with pytest.raises(MediumRefused, match="No such file"):
        fetch(version, ports["right"], ports["right"])
