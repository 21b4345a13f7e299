"""A version that nodes replicate before READY: its manifest and pieces are for nodes of fleets that follow its model alone."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.port_probe import parts_of
from resharder.converters.wire.range_client import DataAddress, PartRefused, PartRequest, RangeConnection
from resharder.server.holding.tls import NodeTls
from resharder.server.node.daemon_client import DaemonClient, RemoteVersion
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

from tests.support.node import Node
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole
from tests.support.secure import PROBE, Authority, SecureDaemon

SPECS = [TensorSpec("big", "BF16", (2 << 10, 1024))]
READY = resources_pb2.Version.READY
OTHERS = {"worker": ["server:*"], "trainer": ["publisher:*"], "ops": ["operator"], "look": ["viewer"], "stranger": ["node:other"]}
ROLES = {
    f"dns:{PROBE}": ["publisher:*", "server:*", "operator"],
    "dns:*.hosts.test": ["node:policy"],
    **{f"dns:{name}.test": roles for name, roles in OTHERS.items()},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[SecureDaemon]:
    options = {"data_listen": "127.0.0.1:0", "replicas": 3, "replica_seconds": 120}
    with SecureDaemon(Authority(tmp_path / "pki"), ROLES, **options) as running:
        yield running


def node(daemon: SecureDaemon, name: str) -> Node:
    tls = daemon.authority.tls(f"{name}.hosts.test")
    return Node(daemon.endpoint, name, tls_ca=tls.ca, tls_cert=tls.certificate, tls_key=tls.key)


def manifest(daemon: SecureDaemon, caller: str, version: str, *, replica: bool) -> server_pb2.Manifest:
    with grpc.secure_channel(daemon.endpoint, daemon.authority.tls(caller).credentials()) as channel:
        request = server_pb2.GetManifestRequest(version=version, replica=replica)
        return server_pb2_grpc.ServerServiceStub(channel).GetManifest(request)


def read(daemon: SecureDaemon, caller: str, found: RemoteVersion) -> bytes:
    """The first piece of a version, from the data port."""
    (part, *_) = parts_of(found.name, found.fingerprint, found.files)
    host, _, port = found.data_address.rpartition(":")
    return read_part(DataAddress(host, int(port), daemon.authority.tls(caller).context), part)


def read_part(address: DataAddress, part: PartRequest) -> bytes:
    target = np.empty(part.end - part.start, np.uint8)
    with closing(RangeConnection(address)) as connection:
        list(connection.blocks(part, target))
    return target.tobytes()


def test_before_ready_nodes_that_follow_the_model_alone_read_it(daemon: SecureDaemon) -> None:
    weights = random_weights(SPECS, 1)
    job = Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect()
    version = job.begin(1)
    job.upload(version.number, 0, weights)
    job.seal(version.name, 0, weights)
    operator = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    wait_until(lambda: any(each.waits for each in operator.ListNodes(operator_pb2.ListNodesRequest()).shortages))

    tls = daemon.authority.tls("one.hosts.test")
    with closing(DaemonClient(daemon.endpoint, NodeTls(tls.ca, tls.certificate, tls.key))) as client:
        found = client.version(version.name)
    content = read(daemon, "one.hosts.test", found)
    for caller in (PROBE, *(f"{name}.test" for name in OTHERS)):
        with pytest.raises(grpc.RpcError, match=r"may not call GetManifest: expected a role (of node|for models/policy)"):
            manifest(daemon, caller, version.name, replica=True)
        with pytest.raises(PartRefused, match=r"answered (404|403)") as refused:
            read(daemon, caller, found)
        assert (", not READY" in str(refused.value)) == (caller in (PROBE, "worker.test", "trainer.test", "ops.test"))
    with pytest.raises(grpc.RpcError, match=", not READY"):
        manifest(daemon, "worker.test", version.name, replica=False)

    with node(daemon, "one"), node(daemon, "two"):
        wait_until(lambda: operator.GetVersion(operator_pb2.GetVersionRequest(version=version.name)).state == READY)
        for caller in (PROBE, "worker.test", "trainer.test", "ops.test", "one.hosts.test"):
            assert read(daemon, caller, found) == content
            assert manifest(daemon, caller, version.name, replica=False).version.fingerprint == found.fingerprint
