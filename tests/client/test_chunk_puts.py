"""Chunks by HTTP: ranks that publish to the data port of a real daemon, and requests that it refuses."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.client.trainer.publisher import Publisher
from resharder.client.transport import chunks as chunks_module
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.chunk_body import LENGTH, MOST_BODY_BYTES
from resharder.converters.wire.chunk_frame import ChunkHeader, frame, unframe

from tests.client.models import connected, equal, exported, publish_all, weights
from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon

SPECS = [TensorSpec("big", "BF16", (3 << 10, 1024)), TensorSpec("small", "F32", (7,))]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0") as running:
        yield running


def through(publisher: Publisher, data_address: str) -> None:
    """Let a rank send to another address than the daemon's data port."""
    registration = publisher._session.registration
    registration.data_address = data_address


def port_of(publisher: Publisher) -> str:
    return f"127.0.0.1:{publisher._session.registration.data_address.rpartition(':')[2]}"


def test_after_a_cut_connection_only_the_chunks_that_the_daemon_lacks_are_sent(daemon: Daemon, tmp_path: Path) -> None:
    full = weights(1)
    (publisher,) = connected(daemon.endpoint, 1, "cut", transport="http")
    proxy = Proxy(port_of(publisher), cut_after=40)
    through(publisher, proxy.endpoint)
    handle = publish_all([publisher], 1, full)[0]
    handle.wait_ready(60)
    assert (proxy.cuts, handle.transport, handle.transport_reason) == (1, "http", "")
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)
    proxy.close()


def test_where_the_data_port_cannot_be_reached_a_rank_publishes_by_grpc_and_says_why(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(chunks_module, "_PATIENCE", 0.1)
    full = weights(2)
    (publisher,) = connected(daemon.endpoint, 1, "away", transport="http")
    through(publisher, "127.0.0.1:1")
    handle = publish_all([publisher], 1, full)[0]
    handle.wait_ready(60)
    assert handle.transport == "grpc"
    assert "127.0.0.1:1: " in handle.transport_reason
    assert "refused" in handle.transport_reason
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)
    through(publisher, "")
    handle = publish_all([publisher], 2, full)[0]
    handle.wait_ready(60)
    assert (handle.transport, handle.transport_reason) == ("grpc", "the daemon has no data port: its data_listen is empty")


@pytest.fixture
def job(daemon: Daemon) -> Job:
    return Job(daemon.channel, SPECS, [whole(SPECS)], job="raw", model="raw").connect()


def address_of(job: Job) -> tuple[str, int]:
    host, _, port = job.create().data_address.rpartition(":")
    return host, int(port)


def put(job: Job, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address_of(job), timeout=30)
    try:
        connection.request("PUT", path, body=body, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def body(*chunks: bytes) -> bytes:
    return b"".join(LENGTH.pack(len(chunk)) + chunk for chunk in chunks)


def damaged(chunk: bytes, **changes: int) -> bytes:
    header, data, model = unframe(chunk)
    return frame(header._replace(**changes), data, model)


def test_chunks_by_http_are_those_of_the_stream(daemon: Daemon, job: Job) -> None:
    values = random_weights(SPECS, 1)
    version = job.begin(1)
    chunks = job.chunks(version.number, 0, values)
    assert put(job, f"/{version.name}/chunks", body(*chunks[:-1])) == (204, "")
    assert job.missing(version.name, 0) == [len(chunks) - 1]
    job.upload(version.number, 0, values, only=[len(chunks) - 1])
    job.seal(version.name, 0, values)
    assert job.wait(version.name).state == version.READY
    status, text = put(job, f"/{version.name}/chunks", body(*chunks))
    assert (status, text[:14]) == (409, "VERSION_READY:")


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"checksum": 1}, 422, "CHECKSUM: rank 0 chunk 0: expected xxh3 0000000000000001"),
        ({"epoch": 1 << 40}, 409, "STALE_EPOCH: "),
        ({"rank": 7}, 400, "RANK: "),
        ({"index": 99}, 400, "CHUNK_INDEX: "),
        ({"index": 6}, 400, "CHUNK_LENGTH: "),
        ({"version": 1 << 30}, 400, "CHUNK: expected chunks of version"),
    ],
)
def test_a_wrong_chunk_changes_no_byte(job: Job, change: dict[str, int], status: int, reason: str) -> None:
    version = job.begin(2)
    chunks = job.chunks(version.number, 0, random_weights(SPECS, 2))
    found, text = put(job, f"/{version.name}/chunks", body(damaged(chunks[0], **change), *chunks[1:]))
    assert found == status
    assert text.startswith(reason)
    assert job.missing(version.name, 0) == list(range(len(chunks)))


@pytest.mark.parametrize(
    ("path", "sent", "status", "reason"),
    [
        ("/models/raw/versions/1", b"1234", 400, "expected a path /models/MODEL/versions/NUMBER/chunks"),
        ("/models/raw/versions/99/chunks", body(frame(ChunkHeader(99, 1, 0, 0, 0), b"")), 404, "VERSION_UNKNOWN"),
        ("/models/none/versions/1/chunks", body(frame(ChunkHeader(1, 1, 0, 0, 0), b"")), 404, "MODEL_UNKNOWN"),
        ("/models/raw/versions/1/chunks", b"123", 400, "CHUNK: expected the length of a chunk"),
        ("/models/raw/versions/1/chunks", LENGTH.pack(1 << 31) + b"12", 400, "CHUNK: expected a chunk of 1 to 2 bytes"),
        ("/models/raw/versions/1/chunks", body(b"\xff\xff"), 400, "CHUNK: "),
    ],
)
def test_a_body_that_is_not_of_chunks_is_refused(job: Job, path: str, sent: bytes, status: int, reason: str) -> None:
    found, text = put(job, path, sent)
    assert (found, reason in text) == (status, True), text


def test_a_refused_request_ends_no_connection_and_a_long_body_is_not_read(job: Job) -> None:
    connection = http.client.HTTPConnection(*address_of(job), timeout=30)
    for _ in range(2):
        connection.request("PUT", "/nothing", body=bytes(1 << 20))
        response = connection.getresponse()
        assert (response.status, response.read()[:8]) == (400, b"expected")
    with socket.create_connection(address_of(job), timeout=30) as raw:
        raw.sendall(b"PUT /x HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1))
        assert raw.recv(1000).startswith(b"HTTP/1.1 413 ")
    connection.close()


def test_only_publishers_of_a_model_write_to_the_data_port(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    roles = {f"dns:{PROBE}": ["publisher:*"], "dns:reader.test": ["server:*"]}
    with SecureDaemon(authority, roles, data_listen="127.0.0.1:0") as daemon:
        full = weights(3)
        (publisher,) = connected(daemon.endpoint, 1, "secure", transport="http", tls=authority.tls(PROBE))
        handle = publish_all([publisher], 1, full)[0]
        handle.wait_ready(60)
        assert (handle.transport, handle.transport_reason) == ("http", "")
        host, _, port = publisher._session.registration.data_address.rpartition(":")
        context = authority.tls("reader.test").context()
        context.check_hostname = False
        connection = http.client.HTTPSConnection(host, int(port), timeout=30, context=context)
        connection.request("PUT", "/models/policy/versions/1/chunks", body=body(b"x"))
        response = connection.getresponse()
        assert (response.status, b"may not call UploadChunks" in response.read()) == (403, True)
        connection.close()
