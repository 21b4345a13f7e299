"""Tensors of which ranks of two hosts send parts: one host's node gathers them, and the daemon receives none. Real processes."""

import itertools
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from resharder.converters.storage.files import read_layout
from resharder.server.holding.part_files import AHEAD
from resharder.v1 import resources_pb2

from tests.support.home_rank import Rows
from tests.support.home_site import Site
from tests.support.namespaces import unavailable
from tests.support.node import nodes, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
ABORTED = resources_pb2.Version.ABORTED
STEPS = itertools.count(10)
MATRIX, TALL, EXPERTS = [512, 1024], [3000, 256], [8, 64, 96]


class ParallelSite(Site):
    """Ranks 0 and 1 on host a and 2 and 3 on host b, with a quarter of most tensors each, by tensor and expert parallelism.

    `embedding` is on host a alone, and `pair` has a half on each host.
    """

    hosts = "aabb"
    holdings = [  # noqa: RUF012
        [
            ("column", MATRIX, 128 * rank, 128),
            ("row", MATRIX, 256 * rank, 256, 1),
            ("experts", EXPERTS, 2 * rank, 2),
            *((f"small.{number}", [64, 32], 16 * rank, 16) for number in range(40)),
            *([("embedding", TALL, 1500 * rank, 1500)] if rank < 2 else []),
            *([("pair", TALL, 1500 * (rank // 2), 1500)] if rank % 2 else []),
        ]
        for rank in range(4)
    ]


class OneSidedSite(Site):
    """Ranks on host b have parts alone of tensors, of which host a has the most."""

    hosts = "aab"
    holdings: list[Rows] = [  # noqa: RUF012
        [("mine", TALL, 0, 3000)],
        [("row", MATRIX, 0, 700, 1), ("column", MATRIX, 0, 400)],
        [("row", MATRIX, 700, 324, 1), ("column", MATRIX, 400, 112)],
    ]


@pytest.fixture(scope="module")
def site() -> Iterator[ParallelSite]:
    with ExitStack() as stack:
        yield ParallelSite(stack, web_listen=f"127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def one_sided() -> Iterator[OneSidedSite]:
    with ExitStack() as stack:
        yield OneSidedSite(stack, replicas=1)


def transports(found: list[list[str]]) -> list[str]:
    return [transport for _, transport, _ in found]


def settled_whole(site: Site, version: resources_pb2.Version) -> None:
    """Wait until the daemon has copied a version, and compare it with what the ranks have published."""
    wait_until(lambda: not list(site.daemon.store.glob(f"models/policy/versions/{version.number:08}/held")))
    site.check(version)


def counted(site: Site) -> dict[str, float]:
    """The bytes of models that the daemon has counted, by transport."""
    with urllib.request.urlopen(f"http://{site.daemon.options['web_listen']}/metrics") as answer:
        families = {family.name: family.samples for family in text_string_to_metric_families(answer.read().decode())}
    samples = [sample for sample in families["resharder_received_bytes"] if sample.name.endswith("_total")]
    return {sample.labels["transport"]: sample.value for sample in samples if sample.value}


def of_rank_2(folder: Path) -> tuple[str, Path, int]:
    """A tensor of which host b has a part for host a: its name, its file on host b, and the offset of rank 2's first byte."""
    starts = {"experts": 4 * 64 * 96, "column": 256 * 1024, "row": 512, **{f"small.{n}": 32 * 32 for n in range(40)}}
    for file in read_layout(folder):
        path = folder / file.path
        for name, placed in file.by_name.items():
            if name in starts and path.stat().st_blocks * 512 < file.size:
                return name, path, placed.offset + 2 * starts[name]
    raise AssertionError("expected a file with holes")


def test_parts_are_written_on_each_host_and_gathered_on_one(site: ParallelSite) -> None:
    site.attach("first")
    for step in (1, 2, 3):
        version, found = site.publish(step, once=step == 2)
        assert transports(found) == ["node"] * 4
        settled_whole(site, version)
    received = {name: node.received_peer_bytes for name, node in nodes(site.daemon).items()}
    shared = sum(prod(shape) for shape in (MATRIX, MATRIX, EXPERTS, [40, 64, 32], TALL))
    assert sum(received.values()) == 3 * shared, "half of each tensor, of two bytes an element, and nothing else"
    assert min(received.values()) > 0, "both nodes are homes"
    assert counted(site) == {"node": 3 * 2 * (shared + prod(TALL))}, "no rank has sent anything to the daemon"


def test_a_wrong_byte_of_a_part_aborts_the_version(site: ParallelSite) -> None:
    site.attach("second")
    site.publish(1)
    name = site.ranks["a"].call("publish", 2)[0][0]
    tensor, path, offset = of_rank_2(Path(next(home.folder for home in site.version(name).homes if home.node == "nodes/b")))
    site.ranks["b"].call("publish", 2, spoil=[str(path), offset])
    version = site.settled(name)
    assert version.state == ABORTED
    assert tensor in version.reason
    version, found = site.publish(2)
    assert transports(found) == ["node"] * 4
    settled_whole(site, version)


@pytest.mark.full
def test_without_the_other_node_whole_tensors_stay_on_their_host(site: ParallelSite) -> None:
    site.attach("third")
    site.publish(1)
    site.nodes["b"].kill()
    wait_until(lambda: nodes(site.daemon)["nodes/b"].state == resources_pb2.Node.LOST)
    version, found = site.publish(2)
    assert transports(found) == ["node", "node", "http", "http"], "`embedding` is written on host a"
    settled_whole(site, version)
    site.nodes["b"].start()
    wait_live(site.daemon, "b")
    wait_until(lambda: transports(site.publish(next(STEPS))[1]) == ["node"] * 4)


@pytest.mark.full
def test_a_node_that_dies_while_another_one_gathers_costs_one_version(site: ParallelSite) -> None:
    site.nodes["b"].stop()
    site.nodes["b"].start(failpoint="data.send@1=kill")
    wait_live(site.daemon, "b")
    site.attach("fourth")
    version, _ = site.publish(1)
    assert version.state == ABORTED
    assert "nodes/b" in version.reason
    site.nodes["b"].wait()
    wait_until(lambda: nodes(site.daemon)["nodes/b"].state == resources_pb2.Node.LOST)
    site.nodes["b"].start()
    wait_live(site.daemon, "b")
    site.attach("fifth")
    version, found = site.publish(1)
    assert transports(found) == ["node"] * 4
    settled_whole(site, version)


@pytest.mark.full
def test_a_host_that_has_parts_alone_holds_nothing_of_a_ready_version(one_sided: OneSidedSite) -> None:
    site = one_sided
    site.attach("first")
    for step in range(1, 5):
        version, found = site.publish(step)
        assert transports(found) == ["node"] * 3
        settled_whole(site, version)
    found_nodes = nodes(site.daemon)
    assert [copy.version for copy in found_nodes["nodes/b"].copies if copy.held_pieces] == []
    wait_until(lambda: len(list((site.nodes["b"].folder / "sets").iterdir())) <= AHEAD)
    wait_until(lambda: nodes(site.daemon)["nodes/b"].used_bytes < AHEAD * (MATRIX[0] * MATRIX[1] * 2 * 2))


@pytest.mark.full
def test_after_a_node_could_not_be_reached_its_parts_go_to_the_daemon_for_some_time(one_sided: OneSidedSite) -> None:
    site = one_sided
    site.nodes["b"].stop()
    site.nodes["b"].start(environment={"RESHARDER_NODE_ADDRESS": f"127.0.0.1:{free_port()}"})
    wait_live(site.daemon, "b")
    site.attach("second")
    version, found = site.publish(1)
    assert transports(found) == ["node"] * 3
    assert version.state == ABORTED
    assert "nodes/a: nodes/b does not deliver boxes" in version.reason
    for step in (1, 2):
        version, found = site.publish(step)
        assert transports(found) == ["node", "http", "http"]
        settled_whole(site, version)
