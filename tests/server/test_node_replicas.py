"""With three replicas, a version is READY once the daemon and two nodes hold it: real processes."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.home_site import Site
from tests.support.namespaces import unavailable
from tests.support.node import Node, nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole

REASON = unavailable()
SPECS = [TensorSpec("big", "BF16", (20 << 10, 1024)), TensorSpec("small", "F32", (7,))]
READY, ABORTED = resources_pb2.Version.READY, resources_pb2.Version.ABORTED
PIECES, REPLICAS = 3, 3


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    options = {"data_listen": "127.0.0.1:0", "keep_count": 2, "lease_seconds": 15, "replicas": REPLICAS}
    with Daemon(**options, replica_seconds=getattr(request, "param", 60)) as running:
        yield running


def state(daemon: Daemon, name: str) -> resources_pb2.Version:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return stub.GetVersion(operator_pb2.GetVersionRequest(version=name))


def shortages(daemon: Daemon) -> dict[str, operator_pb2.ReplicaShortage]:
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return {each.version: each for each in stub.ListNodes(operator_pb2.ListNodesRequest()).shortages}


def begin(daemon: Daemon, step: int) -> str:
    """Publish a version as far as its last seal, and return its name."""
    weights = random_weights(SPECS, step)
    job = Job(daemon.channel, SPECS, [whole(SPECS)], job=f"job{step}").connect()
    version = job.begin(step)
    job.upload(version.number, 0, weights)
    job.seal(version.name, 0, weights)
    return version.name


def settled(daemon: Daemon, name: str) -> resources_pb2.Version:
    wait_until(lambda: state(daemon, name).state != resources_pb2.Version.UPLOADING)
    return state(daemon, name)


def whole_on(daemon: Daemon, name: str) -> set[str]:
    """Nodes that have reported all pieces of a version."""
    found = nodes(daemon).items()
    return {id for id, node in found for copy in node.copies if copy.version == name and copy.held_pieces == PIECES}


def copy_on(daemon: Daemon, node: str, name: str) -> bool:
    """Whether a node has reported a version that it holds."""
    return any(copy.version == name and copy.held_pieces for copy in nodes(daemon)[f"nodes/{node}"].copies)


@pytest.mark.full
def test_ready_waits_for_two_nodes_and_one_that_leaves_is_replaced(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "a") as first:
        wait_live(daemon, "a")
        name = begin(daemon, 1)
        wait_until(lambda: shortages(daemon).get(name) is not None and shortages(daemon)[name].short_pieces == PIECES)
        found = shortages(daemon)[name]
        assert found.waits
        assert f"fewer than {REPLICAS} holders" in found.problem
        with Node(daemon.endpoint, "b") as second, Node(daemon.endpoint, "c") as third:
            assert settled(daemon, name).state == READY
            held = whole_on(daemon, name)
            assert len(held) == REPLICAS - 1
            content = stored_files(daemon, name)
            by_name = {f"nodes/{node.name}": node for node in (first, second, third)}
            assert all(by_name[id].files(name) == content for id in held)
            assert shortages(daemon) == {}
            gone = next(iter(held))
            assert by_name[gone].stop() == 0
            wait_until(lambda: len(whole_on(daemon, name) - {gone}) == REPLICAS - 1 and not shortages(daemon))
            assert state(daemon, name).state == READY
            daemon.stop()
            daemon.start()
            wait_live(daemon, *(id.partition("/")[2] for id in by_name.keys() - {gone}))
            wait_until(lambda: len(whole_on(daemon, name)) == REPLICAS - 1 and not shortages(daemon))


@pytest.mark.full
@pytest.mark.parametrize("daemon", [4], indirect=True)
def test_a_version_without_enough_nodes_is_aborted_with_the_reason(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "a"), Node(daemon.endpoint, "full", limit_bytes=1 << 20):
        wait_live(daemon, "a", "full")
        name = begin(daemon, 1)
        found = settled(daemon, name)
        assert found.state == ABORTED
        assert f"{PIECES} of {PIECES} pieces have fewer than {REPLICAS} holders" in found.reason
        assert f"no node is left for {PIECES} of them among 2 live ones" in found.reason, found.reason
        wait_until(lambda: not any(node.copies for node in nodes(daemon).values()))


@pytest.mark.full
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_the_node_into_whose_files_ranks_wrote_is_one_of_the_holders() -> None:
    with ExitStack() as stack:
        site = Site(stack, replicas=REPLICAS, replica_seconds=60, lease_seconds=15)
        others = {name: stack.enter_context(Node(site.daemon.endpoint, name)) for name in "cd"}
        wait_live(site.daemon, *others)
        site.attach("first")
        version, found = site.publish(1)
        site.check(version)
        assert [transport for _, transport, _ in found] == ["node"] * 4
        content = stored_files(site.daemon, version.name)
        everywhere = site.nodes | others

        def holders(file: str) -> int:
            copies = (node.files(version.name) for name, node in everywhere.items() if copy_on(site.daemon, name, version.name))
            return sum(copy.get(file) == content[file] for copy in copies)

        assert any(copy_on(site.daemon, name, version.name) for name in others), "a third holder"
        wait_until(lambda: all(holders(file) >= REPLICAS - 1 for file in content) and not shortages(site.daemon))
