"""With certificates, a node keeps the registry of models that it may read, and a daemon takes back what it has sealed."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.server.holding.tls import NodeTls
from resharder.server.node.daemon_client import DaemonClient
from resharder.v1 import node_pb2, operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.node import Node, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon

SPECS = [TensorSpec("big", "BF16", (2 << 10, 1024))]
READY = resources_pb2.Version.READY
ROLES = {
    f"dns:{PROBE}": ["publisher:*", "server:*", "operator", "viewer"],
    "dns:*.hosts.test": ["node:policy"],
    "dns:stranger.test": ["node:other"],
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SecureDaemon]:
    (tmp_path / "key").write_bytes(b"secret " * 5)
    options = {"data_listen": "127.0.0.1:0", "replicas": 2, "lease_seconds": 4, "registry_key": tmp_path / "key"}
    with SecureDaemon(Authority(tmp_path / "pki"), ROLES, **options) as running:
        yield running


def client(daemon: SecureDaemon, name: str) -> DaemonClient:
    tls = daemon.authority.tls(name)
    assert tls.certificate is not None
    assert tls.key is not None
    return DaemonClient(daemon.endpoint, NodeTls(tls.ca, tls.certificate, tls.key))


def told(node: DaemonClient, name: str) -> list[str]:
    """The models whose snapshots a daemon tells a node to keep."""
    request = node_pb2.SyncNodeRequest(node=f"nodes/{name}", instance="i", keeps_snapshots=True)
    return [each.model for each in node.sync(request).snapshots]


def state(daemon: SecureDaemon, version: str) -> resources_pb2.Version:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return stub.GetVersion(operator_pb2.GetVersionRequest(version=version))


def test_a_node_keeps_what_it_may_read_and_a_daemon_takes_back_what_it_has_sealed(daemon: SecureDaemon, tmp_path: Path) -> None:
    tls = daemon.authority.tls("one.hosts.test")
    files = {"tls_ca": tls.ca, "tls_cert": tls.certificate, "tls_key": tls.key}
    with (
        Node(daemon.endpoint, "one", **files) as node,
        closing(client(daemon, "two.hosts.test")) as reader,
        closing(client(daemon, "stranger.test")) as stranger,
    ):
        wait_live(daemon, "one")
        version = Job(daemon.channel, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))
        assert version.state == READY, version.reason
        assert told(reader, "two") == ["policy"]
        assert told(stranger, "stranger") == []
        with pytest.raises(grpc.RpcError, match="may not call GetSnapshot"):
            stranger.snapshot("stranger", "policy", [])
        kept = reader.snapshot("two", "policy", []).snapshot

        daemon.kill()
        shutil.rmtree(daemon.store)
        daemon.options["from_nodes"] = True
        daemon.launch()
        wait_until(lambda: "it waits for nodes" in daemon.log.read_text())
        forged = node_pb2.Snapshot()
        forged.CopyFrom(kept)
        forged.revision += 100

        def refuses() -> bool:
            try:
                reader.put_snapshots("two", [forged], [])
            except grpc.RpcError as error:
                return "it is not sealed with this daemon's registry_key" in (error.details() or "")
            return False

        wait_until(refuses, timeout=30)
        wait_until(lambda: "listening" in "".join(daemon.log.read_text().split("registry_restored")[1:]), timeout=60)
        wait_live(daemon, "one")
        wait_until(lambda: "snapshots_returned" in node.log.read_text())
        found = state(daemon, version.name)
        assert (found.state, found.fingerprint) == (READY, version.fingerprint)
        assert "registry_restored" in daemon.log.read_text()


def test_a_short_key_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"short")
    with closing(SecureDaemon(Authority(tmp_path / "pki"), ROLES, registry_key=tmp_path / "key")) as daemon:
        daemon.launch()
        assert daemon.wait(60) == 2
        assert f"resharderd: --registry-key: {tmp_path}/key has 5 bytes" in daemon.log.read_text()
        assert not (daemon.store / "term.json").exists()
