"""Pieces between real nodes by the Mooncake Transfer Engine over TCP. Needs its wheel: `make test-mooncake`."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.layout import TensorSpec
from resharder.server.holding.memory import EngineFailed
from resharder.server.node.mooncake import MooncakeEngine
from resharder.v1 import node_pb2, node_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, holds, nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole

pytest.importorskip("mooncake.engine", exc_type=ImportError)  # also without libibverbs, which it loads

SPECS = [TensorSpec("big", "BF16", (40 << 10, 1024)), TensorSpec("small", "F32", (7,))]
MOONCAKE = {"transfer": "mooncake", "transfer_protocol": "tcp", "insecure": True}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", keep_count=2, lease_seconds=15) as running:
        yield running


def publish(daemon: Daemon, step: int) -> str:
    return Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect().publish(step, random_weights(SPECS, step)).name


def want(daemon: Daemon, node: Node, version: str) -> None:
    """Ask for a version on a node's host, as a worker there does."""
    path = node.folder / "nonce"
    readable = [resources_pb2.StoreAccess(nonce_file=str(path), nonce=path.read_bytes())]
    request = node_pb2.GetHostVersionRequest(version=version, server="servers/s", readable=readable)
    node_pb2_grpc.NodeServiceStub(daemon.channel).GetHostVersion(request)


def bring(daemon: Daemon, node: Node, version: str) -> None:
    """Bring a version to a node, and compare every file with the store's."""

    def arrived() -> bool:
        want(daemon, node, version)  # again, as a worker does: the daemon may not have heard of a restarted node
        return holds(daemon, node.name, version)

    wait_until(arrived)
    assert node.files(version) == stored_files(daemon, version)


def by_engine(daemon: Daemon, node: Node) -> int:
    return nodes(daemon)[f"nodes/{node.name}"].received_engine_bytes


def test_a_node_reads_pieces_from_the_memory_of_another_which_survives_the_retirement_of_versions(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "one", **MOONCAKE) as one, Node(daemon.endpoint, "two", **MOONCAKE) as two:
        wait_live(daemon, "one", "two")
        for step in range(1, 5):
            version = publish(daemon, step)
            before = by_engine(daemon, two)
            bring(daemon, one, version)
            bring(daemon, two, version)
            wait_until(lambda before=before: by_engine(daemon, two) > before)
        wait_until(lambda: len(list(one.folder.glob("versions/*/*"))) == 2 == len(list(two.folder.glob("versions/*/*"))))
        assert (one.stop(), two.stop()) == (0, 0)
        assert "session_suspended" not in one.log.read_text() + two.log.read_text()


def test_nodes_with_and_without_the_engine_exchange_pieces_by_http(daemon: Daemon) -> None:
    version = publish(daemon, 5)
    with Node(daemon.endpoint, "moon", **MOONCAKE) as moon, Node(daemon.endpoint, "plain") as plain:
        wait_live(daemon, "moon", "plain")
        bring(daemon, moon, version)
        bring(daemon, plain, version)
        version = publish(daemon, 6)
        bring(daemon, plain, version)
        bring(daemon, moon, version)
        for node in (moon, plain):
            wait_until(lambda node=node: nodes(daemon)[f"nodes/{node.name}"].received_peer_bytes > 0)
            assert by_engine(daemon, node) == 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_version_arrives_though_the_node_that_it_comes_from_dies_or_hangs(daemon: Daemon, sign: signal.Signals) -> None:
    version = publish(daemon, 7 if sign is signal.SIGKILL else 8)
    name = sign.name.lower()
    with Node(daemon.endpoint, f"a-{name}", **MOONCAKE) as source, Node(daemon.endpoint, f"b-{name}", **MOONCAKE) as reader:
        wait_live(daemon, source.name, reader.name)
        bring(daemon, source, version)
        assert source.process is not None
        source.process.send_signal(sign)  # the daemon offers its session for the seconds of its lease
        bring(daemon, reader, version)
        assert by_engine(daemon, reader) == 0


def test_a_restarted_node_is_read_by_its_new_session(daemon: Daemon) -> None:
    version = publish(daemon, 9)
    with Node(daemon.endpoint, "c", **MOONCAKE) as source, Node(daemon.endpoint, "d", **MOONCAKE) as reader:
        wait_live(daemon, "c", "d")
        bring(daemon, source, version)
        bring(daemon, reader, version)
        source.kill()
        source.start()
        wait_until(lambda: holds(daemon, "c", version))
        before, version = by_engine(daemon, reader), publish(daemon, 10)
        bring(daemon, source, version)
        bring(daemon, reader, version)
        wait_until(lambda: by_engine(daemon, reader) > before)


def test_memory_that_is_not_registered_is_not_read() -> None:
    one, two = (MooncakeEngine("127.0.0.1", "tcp") for _ in range(2))
    content, target = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    bounds = byte_bounds(content)
    with pytest.raises(EngineFailed, match="the read failed"):
        two.read(one.session, bounds[0], byte_bounds(target))
    one.register(bounds)
    two.read(one.session, bounds[0], byte_bounds(target))
    assert (target == content).all()
    one.unregister(bounds)
    with pytest.raises(EngineFailed, match="the read failed"):
        two.read(one.session, bounds[0], byte_bounds(target))
    with pytest.raises(EngineFailed, match="expected a session of mooncake-tcp, got mooncake-rdma/"):
        two.read("mooncake-rdma/127.0.0.1:1", bounds[0], byte_bounds(target))
    with pytest.raises(EngineFailed, match="no connection"):
        two.read("mooncake-tcp/127.0.0.1:1", bounds[0], byte_bounds(target))


def test_without_an_rdma_device_the_engine_does_not_fall_back_to_tcp_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resharder.server.node.mooncake._DEVICES", Path("/nonexistent"))
    with pytest.raises(EngineFailed, match="this host has no RDMA device"):
        MooncakeEngine("127.0.0.1", "rdma")
