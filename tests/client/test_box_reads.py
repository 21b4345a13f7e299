"""Boxes by the data port: strided ones in a worker's helper, and all of them in order, as `open_source` reads them."""

import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resharder.client.errors import ResharderError
from resharder.client.inference.worker.fetch import fetch
from resharder.client.inference.worker.source import DESCRIPTORS
from resharder.client.rpc.channel import Channel
from resharder.client.versions import port_reader
from resharder.client.versions.manifest import Arrived, VersionManifest, expected_digests
from resharder.client.versions.source import read_boxes
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Range, TensorSpec, box_index, box_size
from resharder.converters.storage.files import BITS, FileLayout, MappedFiles, Placed
from resharder.converters.wire import windows
from resharder.converters.wire.chunk_body import BOXES, boxes_header
from resharder.converters.wire.windows import boxes_request
from resharder.server.data.versions import PinnedVersion, ServedVersion
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.manifest import Manifest

from tests.client.port_reading import COLUMN, SMALL, all_boxes, manifest_of, mirror, publish
from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.variants import sampled


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0") as running:
        assert publish(running, 1) == 1
        yield running


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[Channel]:
    with Channel(daemon.endpoint) as opened:
        yield opened


COLUMNS: list[tuple[str, Box]] = [
    ("big", (Range(0, 9 << 10), Range(0, 1024))),
    ("big", (Range(5, 300, 7), Range(3, 100, 11))),
    ("one", ()),
    ("small", (Range(0, 3, 2),)),
]
"""Boxes that are packed, but for the scalar."""


NEEDS = {name: tuple(box for other, box in COLUMNS if other == name) for name, _ in COLUMNS}


@pytest.fixture(params=sampled(["plain", "mutual TLS"], ["mutual TLS"]))
def either(request: pytest.FixtureRequest, daemon: Daemon, tmp_path: Path) -> Iterator[Channel]:
    """A channel to a daemon with a version of `SPECS`."""
    if request.param == "plain":
        with Channel(daemon.endpoint) as opened:
            yield opened
        return
    authority = Authority(tmp_path / "pki")
    roles = {f"dns:{PROBE}": ["publisher:policy"], "dns:server.test": ["server:policy"]}
    with SecureDaemon(authority, roles, data_listen="127.0.0.1:0") as secure:
        publish(secure, 1)
        with Channel(secure.endpoint, tls=authority.tls("server.test")) as opened:
            yield opened


def test_strided_boxes_come_by_the_data_port_with_the_stores_bytes(either: Channel) -> None:
    manifest = manifest_of(either)
    with mirror(manifest) as descriptors:
        found = fetch(either, [str(d) for d in descriptors], boxes_request(manifest.name, COLUMNS))
        files = [replace(file, path=str(fd)) for file, fd in zip(manifest.files, descriptors, strict=True)]
        with MappedFiles(DESCRIPTORS, files) as mapped:
            assert [mapped.arrays[name][box_index(box)].tobytes() for name, box in COLUMNS] == stored(manifest, COLUMNS)
    expected = expected_digests(either, manifest, NEEDS)
    assert found == [expected[key] for key in COLUMNS]


def test_boxes_in_order_come_by_the_data_port_with_the_stores_bytes(either: Channel) -> None:
    manifest = manifest_of(either)
    wanted = [*COLUMNS, *all_boxes(manifest)]
    assert assembled(manifest, wanted, read_boxes(either, manifest, wanted)) == stored(manifest, wanted)


def stored(manifest: VersionManifest, wanted: Sequence[tuple[str, Box]]) -> list[bytes]:
    """The bytes of boxes in the store's files."""
    with MappedFiles(Path(manifest.folder), manifest.files) as mapped:
        return [mapped.arrays[name][box_index(box)].tobytes() for name, box in wanted]


def assembled(manifest: VersionManifest, wanted: list[tuple[str, Box]], parts: Iterable[Arrived]) -> list[bytes]:
    """The bytes of each box; its parts come in the order of the boxes, and may be repeated."""
    tensors = [np.zeros(manifest.specs[name].shape, BITS[ITEM_SIZES[manifest.specs[name].dtype]]) for name, _ in wanted]
    last, seen = 0, [0] * len(wanted)
    for position, box, array in parts:
        assert position >= last
        last = position
        tensors[position][box_index(box)] = array
        seen[position] += array.size
    assert all(size >= box_size(box) for size, (_, box) in zip(seen, wanted, strict=True))
    return [tensor[box_index(box)].tobytes() for tensor, (_, box) in zip(tensors, wanted, strict=True)]


def test_after_cut_connections_the_chunks_that_are_left_are_read(channel: Channel) -> None:
    manifest = manifest_of(channel)
    wanted = [*COLUMNS, *all_boxes(manifest)]
    expected = stored(manifest, wanted)
    proxy = Proxy(f"127.0.0.1:{manifest.data_address.rpartition(':')[2]}")
    through, parts = replace(manifest, data_address=proxy.endpoint), list[Arrived]()
    for number, part in enumerate(read_boxes(channel, through, wanted)):
        parts.append(part)
        if number in (1, 20):
            proxy.cut()
    assert assembled(manifest, wanted, parts) == expected
    assert sum(part.array.size for part in parts) == sum(box_size(box) for _, box in wanted)
    proxy.close()


def test_a_daemon_killed_in_the_middle_serves_the_rest_after_its_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_BYTES", 2 << 20)
    monkeypatch.setattr(port_reader, "PATIENCE", 0.5)
    with Daemon(data_listen="127.0.0.1:0") as daemon, Channel(daemon.endpoint) as channel:
        publish(daemon, 1)
        manifest = manifest_of(channel)
        wanted = all_boxes(manifest)
        expected = stored(manifest, wanted)
        parts = list[Arrived]()
        for number, part in enumerate(read_boxes(channel, manifest, wanted)):
            parts.append(part)
            if number == 3:
                daemon.kill()
                daemon.start()  # with another data port
        assert assembled(manifest, wanted, parts) == expected


def test_a_version_stays_while_its_boxes_are_read_however_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    with Daemon(data_listen="127.0.0.1:0", keep_count=1) as daemon, Channel(daemon.endpoint) as channel:
        publish(daemon, 1, SMALL)
        manifest = manifest_of(channel)
        monkeypatch.setattr(port_reader, "_PIN_SECONDS", 0.1)
        monkeypatch.setattr(windows, "WINDOW_BYTES", 1 << 8)
        folder = daemon.store / "models/policy/versions/00000001"
        reads = read_boxes(channel, manifest, [("a", (Range(0, 64), Range(0, 31)))])
        next(reads)
        for step in (2, 3):
            publish(daemon, step, SMALL)
        assert folder.exists()
        assert len(list(reads)) > 0
        wait_until(lambda: not folder.exists())
        monkeypatch.undo()
        with pytest.raises(ResharderError) as gone:
            list(read_boxes(channel, manifest, [("a", COLUMN)]))
        assert gone.value.reason == "VERSION_GONE"


def test_a_connection_that_breaks_off_a_read_of_boxes_leaves_no_pin_and_no_map() -> None:
    with Daemon(data_listen="127.0.0.1:0", keep_count=1) as daemon, Channel(daemon.endpoint) as other:
        publish(daemon, 1)
        manifest = manifest_of(other)
        host, _, port = manifest.data_address.rpartition(":")
        reader = socket.create_connection((host or "127.0.0.1", int(port)))
        header = boxes_header(boxes_request("", [COLUMNS[0]]))
        reader.sendall(f"GET /models/policy/versions/1/chunks HTTP/1.1\r\nHost: localhost\r\n{BOXES}: {header}\r\n\r\n".encode())
        assert reader.recv(12) == b"HTTP/1.1 200"
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        reader.close()
        for step in (2, 3):
            publish(daemon, step)
        wait_until(lambda: not (daemon.store / "models/policy/versions/00000001").exists())
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "versions/00000001/" not in maps
        assert "Exception in thread" not in daemon.log.read_text()


def test_boxes_beyond_a_response_are_refused_before_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TensorSpec("a", "U8", (1 << 40, 1 << 10))
    record = VersionRecord("m", 1, READY, 1, 1, "j", spec.size, 1, 0.0)
    manifest = Manifest(record, (FileLayout("f", b"", spec.size, (Placed(spec, 0),)),), {}, ())
    served = ServedVersion("models/m/versions/1", "f", {}, Path("/"), manifest=manifest)
    monkeypatch.setattr("resharder.server.store.box_reads.cut_chunks", lambda *_: pytest.fail("cut"))
    version = PinnedVersion(SimpleNamespace(pinned=lambda *_, **__: nullcontext(served)), "m", 1, False)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=f"expected boxes of 1 to 67108864 bytes, got {1 << 49}"):
        version.boxes(boxes_request("", [("a", (Range(0, 1 << 40), Range(0, 512)))]), manifest)
