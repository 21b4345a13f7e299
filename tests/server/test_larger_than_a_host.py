"""A version that no host may hold: three nodes hold a third each, the daemon's host none. Real processes on emulated hosts."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.namespaces import unavailable
from tests.support.node import nodes, wait_live
from tests.support.observing import wait_until
from tests.support.spread_site import SIZE, Spread

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
READY, RETIRED, ABORTED = resources_pb2.Version.READY, resources_pb2.Version.RETIRED, resources_pb2.Version.ABORTED


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
def test_what_a_node_held_is_lost_with_it_and_the_version_says_so(site: Spread) -> None:
    site.attach("fourth")
    version, _ = site.publish(1)
    site.nodes["c"].kill()
    wait_until(lambda: site.version(version.name).state == RETIRED)
    assert "LOST: neither the daemon nor a node holds" in site.version(version.name).reason
    site.nodes["c"].start()
    wait_live(site.daemon, "c")
