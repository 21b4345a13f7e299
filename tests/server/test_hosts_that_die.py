"""With two replicas, a version outlives hosts of which the daemon's holds none: real processes on emulated hosts."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.namespaces import unavailable
from tests.support.node import nodes
from tests.support.observing import wait_until
from tests.support.spread_site import SIZE, Spread

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
READY = resources_pb2.Version.READY


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
