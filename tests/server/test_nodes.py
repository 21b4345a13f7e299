"""Nodes on one host, each with a folder of its own: real daemon and node processes, and workers that map their files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker import source as worker_source
from resharder.client.inference.worker.source import Sources
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import get_manifest
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.converters.wire.pieces import Bitmap
from resharder.converters.wire.range_client import DataAddress, PartRefused, PartRequest, RangeConnection
from resharder.converters.wire.ranges import HELD_FILE, PIECE_BYTES
from resharder.v1 import node_pb2, node_pb2_grpc, operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, holds, nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon
from tests.support.staging import stage

SPECS = [TensorSpec("big", "BF16", (40 << 10, 1024)), TensorSpec("small", "F32", (7,))]
PIECES = 6
ARRIVED = {"verified": True, "transport": "node", "reason": ""}


def publish(daemon: Daemon, step: int) -> str:
    job = Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect()
    return job.publish(step, random_weights(SPECS, step)).name


def drain(daemon: Daemon, name: str, drained: bool) -> None:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    stub.SetNodeDrained(operator_pb2.SetNodeDrainedRequest(node=f"nodes/{name}", drained=drained))


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", keep_count=2, lease_seconds=10) as running:
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_source, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(worker_source, "_PATIENCE", 1.0)


def test_a_worker_maps_the_version_of_the_node_on_its_host(daemon: Daemon) -> None:
    version = publish(daemon, 1)
    with Node(daemon.endpoint, "a") as node:
        wait_live(daemon, "a")
        assert stage(daemon.endpoint, version) == ARRIVED
        assert node.files(version) == stored_files(daemon, version)
        wait_until(lambda: holds(daemon, "a", version))
        copy = nodes(daemon)["nodes/a"].copies[0]
        assert (copy.version, copy.held_pieces, copy.pieces) == (version, PIECES, PIECES)
        assert (copy.wanted, list(copy.servers)) == (True, ["server"])
        assert node.stop() == 0
        assert "nodes/a" not in nodes(daemon)
        assert not list(node.folder.glob("versions/*/*"))


def received_bytes(daemon: Daemon, name: str) -> tuple[int, int]:
    """Bytes that a node has reported as received: from the daemon, and from other nodes."""
    found = nodes(daemon)[f"nodes/{name}"]
    return found.received_daemon_bytes, found.received_peer_bytes


def test_a_node_takes_pieces_from_another_and_refuses_bytes_that_are_wrong(daemon: Daemon) -> None:
    version = publish(daemon, 2)
    with Node(daemon.endpoint, "b") as first:
        wait_live(daemon, "b")
        stage(daemon.endpoint, version)
        path = next(first.folder.glob("versions/*/*/model.safetensors"))
        with path.open("r+b") as file:
            file.seek(PIECE_BYTES + 5)
            file.write(bytes(8))
        (first.folder / "nonce").rename(first.folder / "hidden")  # from here on, workers are on the host of the second one
        with Node(daemon.endpoint, "two") as second:
            wait_live(daemon, "two")
            assert stage(daemon.endpoint, version) == ARRIVED
            assert second.files(version) == stored_files(daemon, version)
            wait_until(lambda: min(received_bytes(daemon, "two")) > 0)  # a report may be of the time before
            received = nodes(daemon)["nodes/two"]
            # The wrong piece comes from the daemon, and others may: it is the only source for a second.
            assert received.received_daemon_bytes >= PIECE_BYTES
            assert received.received_peer_bytes >= PIECE_BYTES
            assert received.received_daemon_bytes + received.received_peer_bytes < PIECES * PIECE_BYTES  # nothing comes twice
            assert "expected checksum" in second.log.read_text()


def test_a_host_fetches_the_pieces_that_its_workers_need_and_a_later_worker_adds_to_them(daemon: Daemon) -> None:
    version = publish(daemon, 30)
    rows = SPECS[0].shape[0]
    halves = [{"big": ((Range(start, rows // 2), Range(0, 1024)),)} for start in (0, rows // 2)]
    with Node(daemon.endpoint, "first") as first, Node(daemon.endpoint, "last") as last:
        wait_live(daemon, "first", "last")
        for node, other, half in ((first, last, halves[0]), (last, first, halves[1])):
            (other.folder / "nonce").rename(other.folder / "hidden")  # of a host that the worker cannot read
            assert stage(daemon.endpoint, version, half) == ARRIVED
            (other.folder / "hidden").rename(other.folder / "nonce")
            wait_until(lambda node=node: holds(daemon, node.name, version))
        content = stored_files(daemon, version)["model.safetensors"]
        for node in (first, last):
            (copy,) = nodes(daemon)[f"nodes/{node.name}"].copies
            assert copy.held_pieces == copy.wanted_pieces < PIECES == copy.pieces
            folder = node.copy_of(version)
            held = set(Bitmap.from_bytes(PIECES, (folder / HELD_FILE).read_bytes()))
            found = (folder / "model.safetensors").read_bytes()
            for piece in range(PIECES):
                part = slice(piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES)
                assert found[part] == (content[part] if piece in held else bytes(len(content[part])))
            received = nodes(daemon)[f"nodes/{node.name}"]
            assert received.received_daemon_bytes + received.received_peer_bytes <= copy.wanted_pieces * PIECE_BYTES
        (last.folder / "nonce").rename(last.folder / "hidden")
        assert stage(daemon.endpoint, version) == ARRIVED
        assert first.files(version) == stored_files(daemon, version)
        wait_until(lambda: nodes(daemon)["nodes/first"].received_peer_bytes > 0)


@pytest.mark.full
def test_a_version_that_a_worker_has_mapped_outlives_its_retirement(daemon: Daemon) -> None:
    version = publish(daemon, 3)
    with Node(daemon.endpoint, "c") as node, Channel(daemon.endpoint) as channel:
        wait_live(daemon, "c")
        manifest = get_manifest(channel, version)
        sources = Sources(channel, resources_pb2.StoreAccess(), PluginSettings(daemon.endpoint, "server"))
        needs = {name: (full_box(spec.shape),) for name, spec in manifest.specs.items()}
        rest = sources.open(manifest, needs, frozenset({"big"}))
        assert (rest.transport, rest.whole) == ("http", False), "for what arrives on the direct path, no node fetches a version"
        rest.close()
        source = sources.open(manifest, needs)
        assert source.transport == "node"
        folder = next(node.folder.glob("versions/policy/*"))
        for step in (4, 5):
            publish(daemon, step)
        wait_until(lambda: not any(copy.wanted for copy in nodes(daemon)["nodes/c"].copies))
        assert source.arrays["small"].tobytes() == random_weights(SPECS, 3)["small"].tobytes()
        assert folder.exists()
        source.close()
        wait_until(lambda: not folder.exists())
        sources.close()


@pytest.mark.usefixtures("impatient")
def test_after_the_death_of_its_node_a_worker_reads_from_the_daemon_and_says_why(daemon: Daemon) -> None:
    version = publish(daemon, 6)
    with Node(daemon.endpoint, "d").start(failpoint="node.held@3=kill") as node:
        wait_live(daemon, "d")
        found = stage(daemon.endpoint, version)
        assert (found["verified"], found["transport"]) == (True, "http")
        assert str(found["reason"]).startswith("nodes/d: ")
        node.wait()
        node.start()  # with the same name: it is told what it held, and begins anew
        wait_until(lambda: holds(daemon, "d", version))
        assert stage(daemon.endpoint, version) == ARRIVED
        assert node.files(version) == stored_files(daemon, version)


def test_after_a_restart_of_the_daemon_a_node_has_what_it_had(daemon: Daemon) -> None:
    version = publish(daemon, 7)
    with Node(daemon.endpoint, "e") as node:
        wait_live(daemon, "e")
        stage(daemon.endpoint, version)
        inode = next(node.folder.glob("versions/*/*/model.safetensors")).stat().st_ino
        daemon.kill()
        daemon.start()
        wait_until(lambda: "nodes/e" in nodes(daemon) and holds(daemon, "e", version))
        assert stage(daemon.endpoint, version) == ARRIVED
        assert next(node.folder.glob("versions/*/*/model.safetensors")).stat().st_ino == inode


@pytest.mark.full
def test_a_node_without_memory_for_a_version_says_so_and_the_worker_reads_elsewhere(daemon: Daemon) -> None:
    version = publish(daemon, 8)
    with Node(daemon.endpoint, "small", limit_bytes=1 << 20):
        wait_live(daemon, "small")
        found = stage(daemon.endpoint, version)
        assert (found["verified"], found["transport"]) == (True, "http")
        assert "nodes/small: memory full: it needs" in str(found["reason"])
        assert "memory full" in nodes(daemon)["nodes/small"].copies[0].problem


def test_a_drained_node_drops_its_versions_and_takes_none_until_it_is_resumed(daemon: Daemon) -> None:
    version = publish(daemon, 9)
    with Node(daemon.endpoint, "g") as node:
        wait_live(daemon, "g")
        stage(daemon.endpoint, version)
        drain(daemon, "g", True)
        wait_until(lambda: not list(node.folder.glob("versions/*/*")))
        assert nodes(daemon)["nodes/g"].state == resources_pb2.Node.DRAINED
        found = stage(daemon.endpoint, version)
        assert (found["transport"], found["reason"]) == ("http", "nodes/g: it is drained")
        node.kill()
        daemon.kill()
        daemon.start()
        node.start()
        wait_until(lambda: "nodes/g" in nodes(daemon))
        assert nodes(daemon)["nodes/g"].state == resources_pb2.Node.DRAINED
        drain(daemon, "g", False)
        assert stage(daemon.endpoint, version) == ARRIVED


def test_a_node_passes_the_session_of_its_transfer_engine_on_to_others(daemon: Daemon) -> None:
    version, stub = publish(daemon, 10), node_pb2_grpc.NodeServiceStub(daemon.channel)

    def sync(name: str, **more: Any) -> node_pb2.NodeOrders:
        access = resources_pb2.StoreAccess(nonce_file=f"/{name}/nonce", nonce=name.encode())
        size = {"capacity_bytes": 1 << 30}
        return stub.SyncNode(node_pb2.SyncNodeRequest(node=f"nodes/{name}", instance="i", store=access, **size, **more))

    held = node_pb2.NodeVersion(version=version, folder="/m", held=Bitmap.full(PIECES).to_bytes(), addresses=[1 << 40])
    sync("nixl", session="nixl/host:15001/a", received_engine_bytes=9, versions=[held])
    sync("sun")
    readable = [resources_pb2.StoreAccess(nonce_file="/sun/nonce", nonce=b"sun")]
    stub.GetHostVersion(node_pb2.GetHostVersionRequest(version=version, server="servers/s", readable=readable))
    (order,) = sync("sun").versions
    sources = {peer.node: (peer.session, list(peer.addresses)) for peer in order.peers}
    assert sources["nodes/nixl"] == ("nixl/host:15001/a", [1 << 40])
    assert nodes(daemon)["nodes/nixl"].received_engine_bytes == 9
    for name in ("nixl", "sun"):
        sync(name, leaving=True)


def test_the_newest_process_of_a_name_is_the_node(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "h") as former:
        wait_live(daemon, "h")
        with Node(daemon.endpoint, "h"):
            assert former.wait() == 1
            assert "another process has become node 'h'" in former.log.read_text()


@pytest.mark.full
def test_a_node_serves_pieces_to_nodes_that_the_daemon_lets_read_the_model(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    roles = {f"dns:{PROBE}": ["publisher:*", "server:*", "operator"]}
    roles |= {f"dns:{name}.test": [f"node:{fleet}"] for name, fleet in (("one", "policy"), ("two", "policy"), ("three", "other"))}
    with SecureDaemon(authority, roles, data_listen="127.0.0.1:0") as daemon:
        version = publish(daemon, 1)

        def node(name: str) -> Node:
            tls = authority.tls(f"{name}.test")
            files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
            return Node(daemon.endpoint, name, **files, tls_peer_name="one.test")

        with node("one") as first, node("two") as second, pytest.MonkeyPatch.context() as patch:
            for name, value in authority.environment(PROBE).items():
                patch.setenv(name, value)
            wait_live(daemon, "one", "two")

            def stage_on(here: Node, there: Node, version: str) -> dict[str, object]:
                """Stage a version on the host of one node, as the files of the other one cannot be read there."""
                (there.folder / "nonce").rename(there.folder / "hidden")
                found = stage(daemon.endpoint, version)
                (there.folder / "hidden").rename(there.folder / "nonce")
                assert here.files(version) == stored_files(daemon, version)
                return found

            assert stage_on(second, first, version) == ARRIVED
            newer = publish(daemon, 2)
            assert stage_on(first, second, newer) == ARRIVED
            assert stage_on(second, first, newer) == ARRIVED
            wait_until(lambda: nodes(daemon)["nodes/two"].received_peer_bytes > 0)
            for each in (first, second):
                (each.folder / "nonce").rename(each.folder / "hidden")
            with node("three"):
                wait_live(daemon, "three")
                found = stage(daemon.endpoint, version)
                assert (found["verified"], found["transport"]) == (True, "http")
                assert "may not call GetManifest: expected a role for models/policy, got node:other" in str(found["reason"])


def test_nodes_with_tokens_read_from_the_daemon_by_them_and_from_each_other_by_their_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    authority.allow(probe="probe-token", hosts="hosts-token", guest="guest-token")
    roles = {
        "token:probe": ["publisher:*", "server:*", "operator"],
        "token:hosts": ["node:policy"],
        "token:guest": ["node:other"],
    }
    with SecureDaemon(authority, roles, certificates=False, data_listen="127.0.0.1:0") as daemon:

        def node(name: str, token: str, **options: object) -> Node:
            (tmp_path / name).write_text(f"{token}\n")
            tls = authority.tls(f"{name}.test")
            files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key, "token_file": tmp_path / name}
            return Node(daemon.endpoint, name, **files, tls_peer_name="one.test", **options)

        with pytest.MonkeyPatch.context() as patch, node("one", "hosts-token") as first, node("two", "hosts-token") as second:
            patch.setenv("RESHARDER_TLS_CA", str(authority.folder / "ca.pem"))
            patch.setenv("RESHARDER_TOKEN", "probe-token")
            with Channel(daemon.endpoint) as channel, Operator(daemon.endpoint) as operator:
                job = Job(channel.grpc, SPECS, [whole(SPECS)], job="job").connect()
                version = job.publish(1, random_weights(SPECS, 1)).name

                def live() -> list[str]:
                    return [found.name for found in operator.nodes() if found.state == "LIVE"]

                wait_until(lambda: live() == ["nodes/one", "nodes/two"])
                for here, there in ((first, second), (second, first)):
                    (there.folder / "nonce").rename(there.folder / "hidden")
                    assert stage(daemon.endpoint, version) == ARRIVED
                    assert here.files(version) == stored_files(daemon, version)
                    (there.folder / "hidden").rename(there.folder / "nonce")
                wait_until(lambda: operator.nodes()[1].received_peer_bytes > 0)
                assert not [link.problem for found in operator.nodes() for link in found.links if link.problem]
                authority.issue("two.test", "two.test")  # another certificate of the same node
                newer = job.publish(2, random_weights(SPECS, 2)).name
                for there in (second, first):
                    (there.folder / "nonce").rename(there.folder / "hidden")
                    assert stage(daemon.endpoint, newer) == ARRIVED
                    (there.folder / "hidden").rename(there.folder / "nonce")
                with node("guest", "guest-token") as guest:
                    wait_until(lambda: "nodes/guest" in live())
                    for each in (first, second):
                        (each.folder / "nonce").rename(each.folder / "hidden")
                    found = stage(daemon.endpoint, newer)
                    assert (found["verified"], found["transport"]) == (True, "http")
                    assert "expected a role for models/policy, got node:other" in str(found["reason"])
                    address = operator.nodes()[1].data_address
                    assert guest.name == "guest"
                    host, _, port = address.rpartition(":")
                    at = DataAddress(host, int(port), authority.tls("guest.test").context, "one.test")
                    manifest = get_manifest(channel, newer)
                    file = manifest.files[0]
                    part = PartRequest(newer, manifest.fingerprint, file.path, file.size, 0, 1)
                    with pytest.raises(PartRefused, match="403: NOT_ALLOWED"):
                        list(RangeConnection(at).blocks(part, np.empty(1, np.uint8)))
