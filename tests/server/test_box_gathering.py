"""Boxes fetched from other nodes' ports into the files of their home: over cuts and refusals, and never wrongly."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.data import connection
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.part_files import FilesOnNode, GatheredBoxes, PartFile, write_parts
from resharder.server.holding.transfers import FetchFailed, ReceivedBytes
from resharder.server.node import box_gathering
from resharder.server.node.box_gathering import BoxGatherer, manifest_of_parts
from resharder.server.state.errors import ResourceNotFound

from tests.support.ports import free_port

VERSION, TAG = "models/policy/versions/1", "tag"
SPECS = [TensorSpec("row", "BF16", (2000, 3000)), TensorSpec("experts", "F32", (12, 200, 300)), TensorSpec("odd", "BF16", (1, 7))]
(FILE,) = lay_out(SPECS)
BOXES: dict[str, tuple[tuple[str, Box], ...]] = {
    "one": (
        ("row", (Range(0, 2000), Range(1000, 1000))),
        ("experts", (Range(1, 4, 3), Range(0, 200), Range(0, 300))),
        ("odd", (Range(0, 1), Range(1, 3, 2))),
    ),
    "two": (("row", (Range(0, 2000), Range(2000, 1000))), ("experts", (Range(2, 4, 3), Range(0, 200), Range(0, 300)))),
}
OWN = FilesOnNode((FILE,), (), tuple(GatheredBoxes(FILE.path, node, boxes) for node, boxes in BOXES.items()))
RANDOM = np.random.default_rng(3)
CONTENT = {
    s.name: np.frombuffer(RANDOM.bytes(s.size), {"BF16": np.uint16, "F32": np.uint32}[s.dtype]).reshape(s.shape) for s in SPECS
}
SIZE = sum(CONTENT[name][box_index(box)].nbytes for boxes in BOXES.values() for name, box in boxes)


@dataclass
class Source:
    """A node's port that serves its boxes once `refusals` requests have been refused."""

    folder: Path
    part: PartFile
    refusals: int = 0
    requests: list[str] = field(default_factory=list)

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        self.requests.append(model)
        if self.refusals:
            self.refusals -= 1
            raise ResourceNotFound("VERSION_UNKNOWN", "this node does not hold it")
        manifest = manifest_of_parts(FilesOnNode((), (self.part,)), "policy", 1)
        yield ServedVersion(VERSION, TAG, {}, self.folder, manifest=manifest)


class Site:
    """A home that gathers, and two nodes with boxes for it."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.sources: dict[str, Source] = {}
        self.addresses: dict[str, str] = {}
        for node, boxes in BOXES.items():
            self.sources[node] = Source(root / node, PartFile(FILE, boxes))
            self.sources[node].folder.mkdir()
            write_parts(self.sources[node].folder, [self.sources[node].part])
            with MappedFiles(self.sources[node].folder, [FILE], writable=True) as maps:
                for name, box in boxes:
                    maps.arrays[name].reshape(maps.specs[name].shape)[box_index(box)] = CONTENT[name][box_index(box)]
            reads = DataReads(self.sources[node], lambda *_: nullcontext(True), local_only=False, places=threading.Semaphore(1))
            port = DataPort("127.0.0.1", 0, reads)
            stack.callback(port.close)
            self.addresses[node] = f"127.0.0.1:{port.port}"
        self.home, self.received = root / "home", ReceivedBytes()
        self.home.mkdir()
        (self.home / FILE.path).write_bytes(FILE.header + bytes(FILE.size - len(FILE.header)))

    def gather(self, stopped: Callable[[], bool] = lambda: False) -> None:
        BoxGatherer(None, self.received).gather(VERSION, TAG, self.home, OWN, self.addresses, stopped)

    def check(self) -> None:
        """The home has every box, and nothing else."""
        with MappedFiles(self.home, [FILE]) as maps:
            for name, whole in CONTENT.items():
                expected = np.zeros_like(whole)
                for boxes in BOXES.values():
                    for other, box in boxes:
                        if other == name:
                            expected[box_index(box)] = whole[box_index(box)]
                assert np.array_equal(maps.arrays[name].reshape(whole.shape), expected), name


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(box_gathering, "_PATIENCE", 2.0)
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_boxes_of_all_nodes_are_written_to_their_places(site: Site) -> None:
    site.gather()
    site.check()
    assert (site.received.peers, site.received.daemon) == (SIZE, 0)
    assert all(len(source.requests) >= 1 for source in site.sources.values())


def test_a_node_that_refuses_for_a_time_is_asked_again(site: Site) -> None:
    site.sources["one"].refusals = 9
    site.gather()
    site.check()


def test_a_connection_that_is_cut_is_opened_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, cuts = connection.DataConnection._write, iter([3, 9, 20])
    count, next_cut = 0, next(cuts)

    def write(self: connection.DataConnection, data: object, deadline: float) -> None:
        nonlocal count, next_cut
        count += 1
        if count == next_cut:
            next_cut = next(cuts, 0)
            raise OSError("cut by the test")
        chunks(self, data, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(connection.DataConnection, "_write", write)
    site.gather()
    site.check()
    assert next_cut == 0, "all cuts were made"


def test_a_node_that_is_silent_or_unknown_is_named(site: Site) -> None:
    site.addresses["two"] = f"127.0.0.1:{free_port()}"
    with pytest.raises(FetchFailed, match="nodes/two does not deliver boxes: ") as raised:
        site.gather()
    assert raised.value.node == "two"
    del site.addresses["two"]
    with pytest.raises(FetchFailed, match="nodes/two, on whose host ranks wrote boxes, is gone") as raised:
        site.gather()
    assert raised.value.node == "two"


def test_wrong_bytes_are_refused_and_their_sender_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = connection.PinnedVersion.packed

    @contextmanager
    def packed(self: connection.PinnedVersion, boxes: object) -> Iterator[object]:
        with chunks(self, boxes) as found:  # type: ignore[arg-type]
            yield ((header, memoryview(bytes(len(data)))) for header, data in found)

    monkeypatch.setattr(connection.PinnedVersion, "packed", packed)
    with pytest.raises(FetchFailed, match=r"does not deliver boxes: .*expected checksum"):
        site.gather()
    with MappedFiles(site.home, [FILE]) as maps:
        assert not any(array.any() for array in maps.arrays.values())


def test_boxes_that_nobody_waits_for_are_not_fetched(site: Site) -> None:
    with pytest.raises(FetchFailed, match="is no longer waited for") as raised:
        site.gather(lambda: True)
    assert raised.value.node == "", "no node is to blame"
    assert not any(source.requests for source in site.sources.values())


def test_no_file_is_open_afterwards(site: Site) -> None:
    site.gather()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(site.home) in str(link.resolve())]
    with Path("/proc/self/maps").open() as maps:
        assert not [line for line in maps if str(site.home) in line]
