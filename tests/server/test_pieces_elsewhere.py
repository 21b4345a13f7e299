"""A READY version that only a node holds completely: a real daemon fetches its pieces, after restarts and kills too."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import get_manifest
from resharder.client.versions.source import SCHEME, open_source
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.converters.wire.range_client import Cut, DataAddress, PartRequest, RangeConnection
from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.server.store import manifest
from resharder.server.store.partial import PIECES_FILE
from resharder.v1 import node_pb2, node_pb2_grpc, operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, holds, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.partial_versions import missing_of, overwrite_pieces
from tests.support.publishing import Job, random_weights, whole
from tests.support.staging import stage

SPECS = [TensorSpec("big", "BF16", (40 << 10, 1024)), TensorSpec("small", "F32", (7,))]
LACKS = (0, 2, 3, 5)


def publish(daemon: Daemon, step: int) -> str:
    job = Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect()
    return job.publish(step, random_weights(SPECS, step)).name


def folder_of(daemon: Daemon, version: str) -> Path:
    _, model, _, number = version.split("/")
    return daemon.store / f"models/{model}/versions/{int(number):08}"


def take_away(daemon: Daemon, version: str, node: str) -> dict[str, bytes]:
    """Let a stopped daemon's store lack pieces of a whole version, as if it had been committed without; return its content."""
    folder = folder_of(daemon, version)
    found, content = manifest.read(folder), stored_files(daemon, version)
    missing_of(content, found.files, LACKS, [node]).write(folder)
    encoded = manifest._encoded({**manifest.load(folder), "format": manifest.PARTIAL_FORMAT})
    (folder / manifest.MANIFEST_FILE).write_bytes(encoded)
    overwrite_pieces(folder, number_pieces(found.files), LACKS, found.files)
    return content


def version_of(daemon: Daemon, version: str) -> resources_pb2.Version:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return stub.GetVersion(operator_pb2.GetVersionRequest(version=version))


def is_whole(daemon: Daemon, version: str) -> bool:
    content = json.loads((folder_of(daemon, version) / manifest.MANIFEST_FILE).read_bytes())
    return bool(content["format"] == manifest.FORMAT) and version_of(daemon, version).folder != ""


def checksums(daemon: Daemon, version: str) -> list[int]:
    size = (folder_of(daemon, version) / "model.safetensors").stat().st_size
    request = node_pb2.GetPieceChecksumsRequest(version=version, file="model.safetensors", start=0, end=size)
    return list(node_pb2_grpc.NodeServiceStub(daemon.channel).GetPieceChecksums(request).checksums)


def read_piece(daemon: Daemon, version: str, fingerprint: str, content: dict[str, bytes], piece: int) -> None:
    with Channel(daemon.endpoint) as channel:
        address = get_manifest(channel, version).data_address
    host, _, port = address.rpartition(":")
    data = content["model.safetensors"]
    start = piece * PIECE_BYTES
    target = np.zeros(PIECE_BYTES, np.uint8)
    connection = RangeConnection(DataAddress(host or "127.0.0.1", int(port)))
    try:
        request = PartRequest(version, fingerprint, "model.safetensors", len(data), start, start + PIECE_BYTES)
        for _ in connection.blocks(request, target):
            pass
    except Cut:
        assert not target.any()
        raise
    finally:
        connection.close()
    assert target.tobytes() == data[start : start + PIECE_BYTES]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", keep_count=2, lease_seconds=10) as running:
        yield running


def test_a_daemon_fetches_the_pieces_that_a_node_alone_holds_and_serves_no_byte_before(daemon: Daemon, tmp_path: Path) -> None:
    version = publish(daemon, 1)
    with Node(daemon.endpoint, "home") as node:
        wait_live(daemon, "home")
        assert stage(daemon.endpoint, version)["transport"] == "node"
        wait_until(lambda: holds(daemon, "home", version))
        expected = checksums(daemon, version)
        daemon.kill()
        content = take_away(daemon, version, "home")
        daemon.launch(failpoint="node.held@2=kill")  # it may die before its health can be asked for
        daemon.wait()
        assert node.process is not None
        node.process.send_signal(signal.SIGSTOP)  # no piece arrives meanwhile
        daemon.start()
        known = version_of(daemon, version)
        assert (known.state, known.folder) == (resources_pb2.Version.READY, ""), "no process may map what is not there"
        assert checksums(daemon, version) == expected, "of missing pieces too, for other nodes"
        held = Bitmap.from_bytes(len(expected), (folder_of(daemon, version) / HELD_FILE).read_bytes())
        missing = next(piece for piece in LACKS if piece not in held)  # one of them had arrived before the kill
        with pytest.raises(Cut):
            read_piece(daemon, version, known.fingerprint, content, missing)
        node.process.send_signal(signal.SIGCONT)
        weights = random_weights(SPECS, 1)
        with open_source(f"{SCHEME}{daemon.endpoint}/{version}") as source:  # before the pieces have arrived: it waits
            for at, box, array in source.parts([(spec.name, full_box(spec.shape)) for spec in SPECS]):
                expected_part = weights[SPECS[at].name][tuple(slice(r.start, r.start + r.count) for r in box)]
                assert np.array_equal(array, expected_part)
        wait_until(lambda: is_whole(daemon, version))
        assert stored_files(daemon, version) == content
        assert not (folder_of(daemon, version) / HELD_FILE).exists()
        assert not (folder_of(daemon, version) / PIECES_FILE).exists()
        read_piece(daemon, version, known.fingerprint, content, missing)
        assert node.files(version) == content
        daemon.kill()
        daemon.start()
        assert version_of(daemon, version).folder
        with Operator(daemon.endpoint) as operator:
            operator.export(version_of(daemon, version).number, tmp_path / "exported", model="policy")
        assert (tmp_path / "exported/model.safetensors").read_bytes() == content["model.safetensors"]


@pytest.mark.full
def test_a_version_whose_last_copy_is_gone_is_lost_and_the_one_before_is_the_newest(daemon: Daemon) -> None:
    before, version = publish(daemon, 1), publish(daemon, 2)
    with Node(daemon.endpoint, "home"):
        wait_live(daemon, "home")
        assert stage(daemon.endpoint, version)["transport"] == "node"
        wait_until(lambda: holds(daemon, "home", version))
        daemon.kill()
        take_away(daemon, version, "home")
    daemon.start()
    assert version_of(daemon, version).state == resources_pb2.Version.READY, "the node may still report"
    wait_until(lambda: version_of(daemon, version).state == resources_pb2.Version.RETIRED)
    assert version_of(daemon, version).reason == f"LOST: neither the daemon nor a node holds {len(LACKS)} of 6 pieces"
    with Operator(daemon.endpoint) as operator:
        assert operator.latest("policy").name == before
        retired = [(event.subject, event.reason) for event in operator.events() if event.what == "retired"]
    assert retired == [(version, version_of(daemon, version).reason)]
    assert not folder_of(daemon, version).exists()
