"""Versions by HTTP ranges: a worker's helper and its reader, before a real daemon's data port."""

import base64
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resharder.client.errors import AccessDenied, CorruptData, DaemonUnreachable, NotFound, Refused
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.fetch import fetch
from resharder.client.inference.worker.source import DESCRIPTORS, Sources
from resharder.client.rpc.channel import Channel
from resharder.client.tools import doctor
from resharder.client.versions import port_reader
from resharder.client.versions.manifest import VersionManifest
from resharder.client.versions.port_reader import DaemonPort, PortConnection, PortReader
from resharder.client.versions.read_plan import FileRange, plan_reads
from resharder.converters.geometry.layout import Box, Range
from resharder.converters.storage.files import FileLayout, MappedFiles
from resharder.converters.wire.boxes import boxes_to_proto
from resharder.converters.wire.chunk_body import BOXES
from resharder.converters.wire.range_client import DataAddress, PartRequest, PortBusy, RangeConnection
from resharder.converters.wire.ranges import CHECKSUM, PIECE_BYTES
from resharder.converters.wire.windows import BoxPart, boxes_request, cut_windows
from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import Reading, ServedVersion
from resharder.server.state.errors import ResourceExhausted, ResourceNotFound, Unavailable
from resharder.v1 import resources_pb2, server_pb2

from tests.client.port_reading import COLUMN, SMALL, all_boxes, manifest_of, mirror, publish
from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.secure import PROBE, Authority, SecureDaemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0") as running:
        assert publish(running, 1) == 1
        yield running


@pytest.fixture
def channel(daemon: Daemon) -> Iterator[Channel]:
    with Channel(daemon.endpoint) as opened:
        yield opened


def content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def stored(daemon: Daemon, number: int = 1) -> Path:
    return daemon.store / f"models/policy/versions/{number:08}/model.safetensors"


def read(channel: Channel, manifest: VersionManifest, descriptors: list[int]) -> None:
    plan = plan_reads(manifest.files, all_boxes(manifest))
    arrived: list[int] = []
    files = [replace(file, path=str(fd)) for file, fd in zip(manifest.files, descriptors, strict=True)]
    mapped = MappedFiles(DESCRIPTORS, files, writable=True)
    PortReader(channel, manifest, 2).read(plan.jobs, mapped.contents, mapped.arrays, arrived.append)
    assert sorted(arrived) == list(range(len(plan.jobs)))


def test_the_helper_reads_a_version_by_ranges_and_its_files_are_the_stores(daemon: Daemon, channel: Channel) -> None:
    manifest = manifest_of(channel)
    with mirror(manifest) as descriptors:
        found = fetch(channel, [str(d) for d in descriptors], boxes_request(manifest.name, all_boxes(manifest)))
        assert found == list(manifest.digests.values())
        assert content(descriptors[0]) == stored(daemon).read_bytes()


def test_a_worker_stages_a_version_by_ranges_and_reports_how(daemon: Daemon, channel: Channel) -> None:
    manifest = manifest_of(channel)
    needs = {name: (box,) for name, box in all_boxes(manifest)}
    sources = Sources(channel, resources_pb2.StoreAccess(), PluginSettings(daemon.endpoint, "server", transport="http"))
    source = sources.open(manifest, needs)
    assert (source.transport, sources.transport, sources.transport_reason) == ("http", "http", "")
    assert source.arrays["big"].tobytes() == stored(daemon).read_bytes()[-source.arrays["big"].nbytes :]
    source.close()
    sources.close()


def test_after_a_cut_connection_the_rest_of_its_range_is_read(daemon: Daemon, channel: Channel) -> None:
    manifest = manifest_of(channel)
    proxy = Proxy(f"127.0.0.1:{manifest.data_address.rpartition(':')[2]}", cut_after=300)
    with mirror(manifest) as descriptors:
        read(channel, replace(manifest, data_address=proxy.endpoint), descriptors)
        assert content(descriptors[0]) == stored(daemon).read_bytes()
    assert proxy.cuts == 1
    proxy.close()


def test_bytes_that_differ_from_their_pieces_checksum_are_an_error(daemon: Daemon, channel: Channel) -> None:
    number = publish(daemon, 2)
    manifest = manifest_of(channel, number)
    with mirror(manifest) as descriptors:
        read(channel, manifest, descriptors)
        with stored(daemon, number).open("r+b") as file:  # a piece whose checksum the daemon has taken
            file.seek(PIECE_BYTES + 5)
            file.write(bytes(8))
        with pytest.raises(CorruptData, match=rf"expected checksum [0-9a-f]+ of bytes {PIECE_BYTES} to"):
            read(channel, manifest, descriptors)


def test_without_a_data_port_the_reader_says_what_to_start(channel: Channel) -> None:
    with pytest.raises(DaemonUnreachable, match="has no data port; start it with --data-listen") as error:
        PortReader(channel, replace(manifest_of(channel), data_address=""))
    assert error.value.reason == "DATA_PORT"


def test_a_port_that_cannot_be_reached_is_named_with_what_to_open(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_reader, "PATIENCE", 0.1)
    closed = replace(manifest_of(channel), data_address="127.0.0.1:1")
    monkeypatch.setattr(port_reader, "get_manifest", lambda *_, **__: closed)
    text = r"^cannot reach the daemon's data port at 127\.0\.0\.1:1: .*refused; open port 1 to this host$"
    with mirror(closed) as descriptors, pytest.raises(DaemonUnreachable, match=text) as error:
        read(channel, closed, descriptors)
    assert error.value.reason == "DATA_PORT"


def test_a_restarted_daemon_is_read_at_its_new_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_reader, "PATIENCE", 0.1)  # the daemon's absence is longer
    with Daemon() as daemon, Channel(daemon.endpoint) as channel:
        publish(daemon, 1, SMALL)
        manifest = manifest_of(channel)
        daemon.kill()
        with ThreadPoolExecutor(1) as pool, mirror(manifest) as descriptors:
            reading = pool.submit(read, channel, manifest, descriptors)
            wait_until(lambda: reading.running())
            daemon.start()
            reading.result()
            assert content(descriptors[0]) == stored(daemon).read_bytes()
        assert manifest_of(channel).data_address != manifest.data_address


def test_a_port_that_moves_and_moves_back_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = VersionManifest("models/policy/versions/1", 1, "f", "", {}, {}, (), "d:1")
    port = DaemonPort(SimpleNamespace(endpoint="d:7677", tls=None), first)  # type: ignore[arg-type]
    for number, moved in ((2, True), (2, False), (1, True), (1, False)):
        now = replace(first, data_address=f"d:{number}")
        monkeypatch.setattr(port_reader, "get_manifest", lambda *_, now=now, **__: now)
        assert (port.renew(port.address), port.address.port) == (moved, number)


def test_of_connections_that_fail_together_one_turns_to_the_proxy_and_none_asks_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RESHARDER_PROXY", "http://proxy:3128")
    monkeypatch.setattr(port_reader, "get_manifest", None)
    first = VersionManifest("models/policy/versions/1", 1, "f", "", {}, {}, (), "d:1")
    port = DaemonPort(SimpleNamespace(endpoint="d:7677", tls=None), first)  # type: ignore[arg-type]
    failed = port.address
    assert port.renew(failed)
    assert port.renew(failed)
    assert (port.address.host, port.address.proxy) == ("d", "http://proxy:3128")


def test_a_version_of_another_store_is_refused(channel: Channel) -> None:
    other = replace(manifest_of(channel), fingerprint="another store's")
    with mirror(other) as descriptors, pytest.raises(Refused, match="answered 412: the version's fingerprint is"):
        read(channel, other, descriptors)


def test_doctor_measures_the_data_port_of_a_daemon_on_another_host(daemon: Daemon) -> None:
    publish(daemon, 3)  # an earlier test damages the one before
    check = doctor.data_port(daemon.endpoint)
    assert check.verdict == "ok"
    assert check.found.endswith("GB/s from the daemon's host, 36.0 MiB")


def test_doctor_names_the_port_to_open(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PORT_SECONDS", 0.1)
    with Channel(daemon.endpoint) as opened:
        closed = replace(manifest_of(opened, 3), data_address="127.0.0.1:1")
    for module in (doctor, port_reader):
        monkeypatch.setattr(module, "get_manifest", lambda *_, **__: closed)
    check = doctor.data_port(daemon.endpoint)
    assert (check.verdict, check.hint) == ("fail", "open port 1 to this host")
    assert check.found.startswith("cannot reach the daemon's data port at 127.0.0.1:1: ")


def ask(address: str, path: str, **headers: str) -> tuple[int, bytes, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request(headers.pop("method", "GET"), path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(), response
    finally:
        connection.close()


FILE = "/models/policy/versions/1/model.safetensors"
CHUNKS = "/models/policy/versions/1/chunks"


def request_for(*boxes: Box, tensors: Sequence[str] = ("big",), **fields: object) -> dict[str, str]:
    """The header of a request for boxes of the first tensor."""
    message = server_pb2.BoxesRequest(tensors=tensors, boxes=boxes_to_proto((0, box, False) for box in boxes))
    for name, value in fields.items():
        setattr(message, name, value)
    return {BOXES: base64.urlsafe_b64encode(message.SerializeToString()).decode()}


ROW = (Range(0, 1), Range(0, 2048))
HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    ("path", "headers", "status", "reason"),
    [
        (FILE, {}, 400, b"expected a header Range"),
        ("/etc/passwd", {"Range": "bytes=0-1"}, 400, b"expected a path"),
        (FILE, {"Range": "bytes=99999999-99999999"}, 416, b"expected a range within"),
        (FILE.replace("model.", "other."), {"Range": "bytes=0-1"}, 404, b"has no safetensors file"),
        (FILE.replace("/1/", "/99/"), {"Range": "bytes=0-1"}, 404, b"VERSION_UNKNOWN"),
        (FILE.replace("policy", "nothing"), {"Range": "bytes=0-1"}, 404, b"MODEL_UNKNOWN"),
        (FILE, {"Range": "bytes=0-1", "If-Match": '"x"'}, 412, b"fingerprint"),
        (FILE, {"Range": "bytes=0-1", "Host": "evil.example"}, 421, b"expected an IP address"),
        (FILE, {"Range": "bytes=0-1", "method": "DELETE"}, 405, b"expected GET"),
        (CHUNKS, {}, 400, b"expected a header Range"),
        (FILE, request_for(ROW), 400, b"expected a path /models/MODEL/versions/NUMBER/chunks"),
        (CHUNKS, {BOXES: "!"}, 400, b"expected a header Resharder-Boxes"),
        (CHUNKS, {BOXES: ""}, 400, b"expected a header Resharder-Boxes"),
        (CHUNKS, {BOXES: "____"}, 400, b"expected a header Resharder-Boxes"),
        (CHUNKS, {BOXES: "A" * 11200}, 400, b"8192 bytes"),
        (CHUNKS, request_for(), 400, b"TOO_MANY_BOXES: expected boxes of 1 to"),
        (
            CHUNKS,
            request_for(*[(Range(0, 9 << 10), Range(0, 2047))] * 2),
            400,
            b"TOO_MANY_BOXES: expected boxes of 1 to 67108864",
        ),
        (CHUNKS, request_for(*[(Range(0, 9 << 10), Range(0, 2048))] * 3), 400, b"TOO_MANY_BOXES"),
        (CHUNKS, request_for((Range(-1, 2), Range(0, 2))), 400, b"BOX: box 0 of big: [-1:1, 0:2] is not inside"),
        (CHUNKS, request_for((Range(9 << 10, 1), Range(0, 1))), 400, b"is not inside"),
        (CHUNKS, request_for((Range(0, HUGE, HUGE), Range(0, 1))), 400, b"is not inside"),
        (CHUNKS, request_for((Range(0, 2, HUGE), Range(0, 1))), 400, b"is not inside"),
        (CHUNKS, request_for((Range(0, 0), Range(0, 1))), 400, b"is not inside"),
        (CHUNKS, request_for((Range(0, 1, 0), Range(0, 1))), 400, b"is not inside"),
        (CHUNKS, request_for((Range(0, 1),)), 400, b"is not inside"),
        (CHUNKS, request_for(ROW, tensors=[]), 400, b"BOX: box 0 is of tensor 0, the request names 0"),
        (CHUNKS, request_for(ROW, tensors=["x"]), 400, b"UNKNOWN_TENSOR"),
        (CHUNKS, request_for(ROW, chunk_bytes=1), 400, b"CHUNK_BYTES"),
        (CHUNKS, request_for(ROW, version="models/policy/versions/2"), 400, b"BOX: expected boxes of models/policy/versions/1"),
        (CHUNKS.replace("/1/", "/99/"), request_for(ROW), 404, b"VERSION_UNKNOWN"),
        (CHUNKS, request_for(ROW) | {"If-Match": '"x"'}, 412, b"fingerprint"),
        (CHUNKS, request_for(ROW) | {"Host": "evil.example"}, 421, b"expected an IP address"),
    ],
)
def test_a_request_that_names_no_part_of_a_version_is_refused(
    channel: Channel, path: str, headers: dict[str, str], status: int, reason: bytes
) -> None:
    found, body, _ = ask(manifest_of(channel).data_address, path, **headers)
    assert found == status
    assert reason in body


def test_a_part_that_is_no_piece_has_no_checksum(daemon: Daemon, channel: Channel) -> None:
    status, body, response = ask(manifest_of(channel).data_address, FILE, Range="bytes=8-19")
    assert (status, body, response.getheader(CHECKSUM)) == (206, stored(daemon).read_bytes()[8:20], None)


def test_a_version_stays_while_a_connection_reads_it() -> None:
    with Daemon(data_listen="127.0.0.1:0", keep_count=1) as daemon, Channel(daemon.endpoint) as channel:
        publish(daemon, 1, SMALL)
        reader = http.client.HTTPConnection(manifest_of(channel).data_address, timeout=30)

        def status() -> int:
            reader.request("GET", FILE, headers={"Range": "bytes=0-9"})
            response = reader.getresponse()
            response.read()
            return response.status

        assert status() == 206
        for step in (2, 3):
            publish(daemon, step, SMALL)
        assert status() == 206
        assert (daemon.store / "models/policy/versions/00000001").exists()
        reader.close()
        wait_until(lambda: not (daemon.store / "models/policy/versions/00000001").exists())


def test_the_longest_idle_connection_gives_way_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resharder.server.data.port._SETTLED_SECONDS", 0.0)
    port = DataPort("127.0.0.1", 0, DataReads(None, None, local_only=True), most=2)  # type: ignore[arg-type]
    opened = []
    for _ in range(3):
        opened.append(socket.create_connection(("127.0.0.1", port.port), 30))
        time.sleep(0.05)  # one after the other
    assert opened[0].recv(1) == b""
    wait_until(lambda: len(port._open) == 2, "the third is admitted in its place")
    threads = [port._accepting, *port._open.values()]
    opened[1].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert opened[1].recv(12) == b"HTTP/1.1 400"
    port.close()
    assert [connection.recv(1) for connection in opened[2:]] == [b""]
    wait_until(lambda: not any(thread.is_alive() for thread in threads), "its threads end")
    for connection in opened:
        connection.close()


def test_a_port_that_sends_all_it_may_is_busy_over_the_same_connection() -> None:
    places = threading.Semaphore(0)
    reads = DataReads(None, lambda *caller: nullcontext(), local_only=True, places=places)  # type: ignore[arg-type]
    port, target = DataPort("127.0.0.1", 0, reads), np.empty(4, np.uint8)
    connection = RangeConnection(DataAddress("127.0.0.1", port.port))
    part, opened = PartRequest("models/policy/versions/1", "f", "file", 9, 0, 4), []
    for _ in range(2):
        with pytest.raises(PortBusy, match="429: busy with other requests"):
            list(connection.blocks(part, target))
        opened.append(set(port._open))
    assert opened[0] == opened[1]
    connection.close()
    port.close()


def test_a_reader_needs_a_certificate_and_a_role_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path / "pki")
    roles = {f"dns:{PROBE}": ["publisher:policy"], "dns:server.test": ["server:policy"], "dns:other.test": ["server:another"]}
    with SecureDaemon(authority, roles, data_listen="127.0.0.1:0") as daemon:
        publish(daemon, 1, SMALL)
        with Channel(daemon.endpoint, tls=authority.tls("server.test")) as channel:
            manifest = manifest_of(channel)
            with mirror(manifest) as descriptors:
                read(channel, manifest, descriptors)
                assert content(descriptors[0]) == stored(daemon).read_bytes()
                refused = Channel(daemon.endpoint, tls=authority.tls("other.test"))
                with (
                    refused,
                    pytest.raises(AccessDenied, match=r"answered 403: NOT_ALLOWED: dns:other\.test@127\.0\.0\.1 may not"),
                ):
                    read(refused, manifest, descriptors)
                with (
                    Channel(daemon.endpoint, tls=authority.tls("other.test")) as refused,
                    pytest.raises(AccessDenied, match=r"answered 403: NOT_ALLOWED: dns:other\.test@127\.0\.0\.1 may not"),
                ):
                    list(PortReader(refused, manifest).windows(cut_windows([BoxPart(0, "a", COLUMN)], manifest.specs)))
                monkeypatch.setattr(port_reader, "PATIENCE", 0.1)
                without = Channel(daemon.endpoint, tls=authority.tls())
                with (
                    without,
                    pytest.raises(
                        DaemonUnreachable, match=r"cannot use .* at 127\.0\.0\.1:\d+: .*; set RESHARDER_TLS_CA"
                    ) as error,
                ):
                    read(without, manifest, descriptors)
                assert isinstance(error.value.__cause__, OSError)


def test_a_reader_waits_for_pieces_as_long_as_the_port_says_that_they_come(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    answers = [Unavailable("PIECES_ELSEWHERE", "the daemon fetches the others"), ResourceExhausted("TOO_FAST", "slower")]

    @contextmanager
    def reading(spans: object) -> Iterator[None]:
        if answers:
            raise answers.pop()
        yield

    with served(tmp_path, reading) as (address, manifest):
        patience = 0.1  # less than the port asks for
        connection = PortConnection(SimpleNamespace(address=address, manifest=manifest), patience)  # type: ignore[arg-type]
        target = np.zeros(7, np.uint8)
        connection.read_range(FileRange(0, 0, 7), target)
        connection.close()
    assert (target.tobytes(), answers) == (b"weights", [])


def test_a_reader_of_pieces_that_will_not_come_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weights")

    def reading(spans: object) -> AbstractContextManager[None]:
        raise ResourceNotFound("VERSION_GONE", "it is no longer READY")

    with served(tmp_path, reading) as (address, manifest):
        connection = PortConnection(SimpleNamespace(address=address, manifest=manifest), 0.1)  # type: ignore[arg-type]
        with pytest.raises(NotFound, match="404: VERSION_GONE: it is no longer READY"):
            connection.read_range(FileRange(0, 0, 7), np.zeros(7, np.uint8))
        connection.close()


@contextmanager
def served(folder: Path, reading: Reading) -> Iterator[tuple[DataAddress, VersionManifest]]:
    """A data port with a version of one file of seven bytes, and its manifest."""
    version = ServedVersion("models/m/versions/1", "f", {"file": 7}, folder, reading)
    versions = SimpleNamespace(pinned=lambda *_, **__: nullcontext(version))
    port = DataPort("127.0.0.1", 0, DataReads(versions, lambda *caller: nullcontext(), local_only=True))  # type: ignore[arg-type]
    try:
        manifest = VersionManifest(version.name, 1, "f", "", {}, {}, (FileLayout("file", b"", 7, ()),))
        yield DataAddress("127.0.0.1", port.port), manifest
    finally:
        port.close()
