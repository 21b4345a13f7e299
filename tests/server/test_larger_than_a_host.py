"""A version that no host may hold: three nodes hold a third each, the daemon's host none. Real processes on emulated hosts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from resharder.client.operator import Operator
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.home_rank import Ranks, weights
from tests.support.home_site import Site
from tests.support.namespaces import Hosts, unavailable
from tests.support.node import Node, nodes, patient, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import read_folder
from tests.support.remote import Remote

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
READY, RETIRED, ABORTED = resources_pb2.Version.READY, resources_pb2.Version.RETIRED, resources_pb2.Version.ABORTED
SHAPE = [12_000, 1024]
SIZE = 3 * SHAPE[0] * SHAPE[1] * 2
LIMIT = SIZE * 8 // 10


class Spread(Site):
    """The daemon, which holds no version; hosts a, b and c with a rank and a node each; host d, whose node holds nothing."""

    holdings, hosts = [[(f"{name}.up", SHAPE, 0, SHAPE[0])] for name in "abc"], "abc"

    def __init__(self, stack: ExitStack, archive: Path, limit: int = LIMIT, replicas: int = 1) -> None:
        hosts = stack.enter_context(Hosts(4, rate="1gbit"))
        options = {"hold": "none", "shared_memory": False, "keep_count": 1, "lease_seconds": 10, "archive_url": archive}
        options["replicas"] = replicas
        self.daemon = patient(Daemon(insecure=True, data_listen=f"{hosts.second_address}:{free_port()}", **options))
        self.daemon.endpoint = f"{hosts.address}:{self.daemon.port}"
        stack.enter_context(self.daemon)
        self.nodes, self.ranks = {}, {}
        for number, name in enumerate("abcd"):
            given = {"listen": "0.0.0.0:7679", "insecure": True, "limit_bytes": limit if name != "d" else 0}
            node = Node(self.daemon.endpoint, name, command=tuple(hosts.command(number)), **given)
            self.nodes[name] = stack.enter_context(node)
        for number, name in enumerate("abcd"):
            hidden = [node.root for other, node in self.nodes.items() if other != name]
            process = stack.enter_context(Remote(Ranks, hidden=hidden, namespace=hosts.namespace(number)))
            if name == "d":
                self.worker = process
            else:
                self.ranks[name] = process
        wait_live(self.daemon, *self.nodes)

    def held_bytes(self) -> int:
        """Memory of the files of versions on the daemon's host."""
        return sum(file.stat().st_blocks * 512 for file in self.daemon.store.glob("models/*/*/*/*.safetensors"))

    def is_published(self, folder: Path, step: int) -> bool:
        """Whether a checkpoint folder has exactly what the ranks have published."""
        return {name: found.tobytes() for name, found in read_folder(str(folder)).items()} == {
            name: weights(name, shape, step).view(torch.uint8).numpy().tobytes()
            for rows in self.holdings
            for name, shape, *_ in rows
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    with ExitStack() as stack:
        yield Spread(stack, tmp_path_factory.mktemp("archive"))


def test_a_version_that_no_host_may_hold_is_published_served_exported_archived_and_retired(site: Spread, tmp_path: Path) -> None:
    site.attach("first")
    versions = []
    for step in (1, 2, 3):
        version, found = site.publish(step)
        assert (version.state, [transport for _, transport, _ in found]) == (READY, ["node"] * 3), version.reason
        versions.append(version.name)
    assert site.held_bytes() < SIZE // 3, "one part of each home, which shows that the daemon reaches it"
    daemon = operator_pb2_grpc.OperatorServiceStub(site.daemon.channel).GetDaemon(operator_pb2.GetDaemonRequest())
    assert daemon.store_used_bytes < SIZE // 100, "holes and headers"
    for node in nodes(site.daemon).values():
        assert node.used_bytes <= node.capacity_bytes < SIZE
    assert nodes(site.daemon)["nodes/d"].capacity_bytes == 0
    arrived = site.worker.call("stage", site.daemon.endpoint, versions[-1])
    assert (arrived["verified"], arrived["transport"]) == (True, "http"), arrived
    slices = {f"{name}.up": [500, 100] for name in "abc"}  # whose digests the daemon computes
    assert site.worker.call("stage", site.daemon.endpoint, versions[-1], slices)["verified"]
    with Operator(site.daemon.endpoint) as operator:
        operator.export(version.number, tmp_path / "export")
        assert site.is_published(tmp_path / "export", 3)
        archived = operator.archive(version.number)
        assert site.is_published(Path(archived.url.removeprefix("file://")), 3)
    assert [site.version(name).state for name in versions[:2]] == [RETIRED] * 2


def test_a_daemon_that_is_killed_goes_on_with_what_nodes_hold(site: Spread, tmp_path: Path) -> None:
    site.attach("second")
    version, _ = site.publish(1)
    site.daemon.kill()
    site.daemon.start()
    wait_live(site.daemon, *site.nodes)
    assert site.version(version.name).state == READY
    assert site.worker.call("stage", site.daemon.endpoint, version.name)["verified"]
    with Operator(site.daemon.endpoint) as operator:
        operator.export(version.number, tmp_path / "export")
    assert site.is_published(tmp_path / "export", 1)


def test_a_version_whose_files_no_node_takes_is_aborted_and_says_so(site: Spread) -> None:
    site.attach("third", transport="http")
    with pytest.raises(Exception, match=r"no node takes 1 of the version's files, .*this daemon's host holds none"):
        site.publish(1)
    with Operator(site.daemon.endpoint) as operator:
        newest = site.version(f"models/policy/versions/{max(each.number for each in operator.versions('policy'))}")
    assert (newest.state, "hold: none" in newest.reason) == (ABORTED, True), newest.reason


@pytest.mark.full
def test_with_two_replicas_a_version_outlives_hosts_of_which_the_daemons_holds_none(tmp_path: Path) -> None:
    with ExitStack() as stack:
        site = Spread(stack, tmp_path / "archive", limit=4 * SIZE, replicas=2)
        site.attach("first")
        version, _ = site.publish(1)
        assert version.state == READY, version.reason
        with Operator(site.daemon.endpoint) as operator:
            for gone in "cb":
                site.nodes[gone].kill()
                wait_until(lambda gone=gone: nodes(site.daemon)[f"nodes/{gone}"].state == resources_pb2.Node.LOST)
                operator.export(version.number, tmp_path / gone)
                assert site.is_published(tmp_path / gone, 1)
                wait_until(lambda gone=gone: gone == "b" or not operator.replica_shortages())
        assert site.version(version.name).state == READY


@pytest.mark.full
def test_what_a_node_held_is_lost_with_it_and_the_version_says_so(site: Spread) -> None:
    site.attach("fourth")
    version, _ = site.publish(1)
    site.nodes["c"].kill()
    wait_until(lambda: site.version(version.name).state == RETIRED)
    assert "LOST: neither the daemon nor a node holds" in site.version(version.name).reason
    site.nodes["c"].start()
    wait_live(site.daemon, "c")
