"""A node that is stopped waits for the daemon's copy of what it alone holds: by orders, and with real processes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from resharder.server.node.agent import await_departure, needing
from resharder.v1 import node_pb2, resources_pb2

from tests.support.home_site import Site
from tests.support.namespaces import unavailable
from tests.support.node import nodes, wait_live
from tests.support.observing import wait_until

REASON = unavailable()
NAME = "models/policy/versions/1"
States = node_pb2.FileSetOrder


def alone() -> node_pb2.NodeOrders:
    return node_pb2.NodeOrders(versions=[node_pb2.NodeOrder(version=NAME, sole_holder=True)])


def written(state: "States.State.ValueType") -> node_pb2.NodeOrders:
    order = node_pb2.ReservationOrder(id="r", sets=[node_pb2.FileSetOrder(id="s", version=NAME, state=state)])
    return node_pb2.NodeOrders(reservations=[order])


def test_versions_that_the_node_alone_holds_or_that_ranks_write_need_it() -> None:
    assert list(needing(node_pb2.NodeOrders(versions=[node_pb2.NodeOrder(version=NAME)]))) == []
    for orders in (alone(), written(States.UPLOADING), written(States.VERIFYING)):
        (reason,) = needing(orders)
        assert reason.startswith(f"{NAME}: ")
    assert list(needing(written(States.READY))) == list(needing(written(States.ENDED))) == []


class Answers:
    """Answers of a daemon, one after the other; the last one again and again. An empty list is a daemon that is away."""

    def __init__(self, *orders: node_pb2.NodeOrders, then: Callable[[], object] = lambda: None) -> None:
        self.orders, self.asked, self._then = list(orders), 0, then

    def __call__(self) -> node_pb2.NodeOrders:
        self.asked += 1
        if self.asked > 3:
            self._then()
        if not self.orders:
            raise grpc.RpcError
        return self.orders.pop(0) if len(self.orders) > 1 else self.orders[0]


def test_it_waits_until_no_version_needs_the_node() -> None:
    answers = Answers(alone(), alone(), node_pb2.NodeOrders())
    assert await_departure(alone(), answers, 60.0, threading.Event())
    assert answers.asked == 3


def test_a_second_signal_and_the_bound_end_the_wait() -> None:
    forced = threading.Event()
    assert not await_departure(node_pb2.NodeOrders(), Answers(alone(), then=forced.set), 60.0, forced)
    assert not await_departure(node_pb2.NodeOrders(), Answers(alone()), 0.0, threading.Event())


def test_while_the_daemon_is_away_the_last_orders_count() -> None:
    forced = threading.Event()
    assert await_departure(node_pb2.NodeOrders(), Answers(), 60.0, forced)
    assert not await_departure(alone(), Answers(then=forced.set), 60.0, forced)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, lease_seconds=15)


def publish_with_a_slow_copy(site: Site, job: str, seconds: int) -> resources_pb2.Version:
    """A READY version that ranks wrote on nodes, one piece of which the daemon fetches late. The nodes have SIGTERM, and wait."""
    site.daemon.stop()
    site.daemon.start(failpoint=f"node.piece@3=delay:{seconds}")  # the first two are requests before READY
    for node in site.nodes.values():
        if node.process is None:
            node.start()
    wait_live(site.daemon, *site.nodes)
    site.attach(job)
    version, found = site.publish(1)
    assert version.state == resources_pb2.Version.READY, version.reason
    assert [transport for _, transport, _ in found] == ["node"] * 4
    for node in site.nodes.values():
        node.send_signal(signal.SIGTERM)
    wait_until(lambda: any("departure_waits" in node.log.read_text().rpartition("listening")[2] for node in site.nodes.values()))
    return version


@pytest.mark.full
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_stopped_node_ends_once_the_daemon_has_its_copy(site: Site) -> None:
    version = publish_with_a_slow_copy(site, "first", 3)
    assert [node.wait() for node in site.nodes.values()] == [0, 0]
    assert nodes(site.daemon) == {}
    assert site.version(version.name).state == resources_pb2.Version.READY
    site.check(site.version(version.name))


@pytest.mark.full
@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_second_signal_ends_a_node_at_once(site: Site) -> None:
    version = publish_with_a_slow_copy(site, "second", 50)
    for node in site.nodes.values():
        node.send_signal(signal.SIGTERM)  # one that has ended already is a zombie, which takes it
    assert [node.wait(40) for node in site.nodes.values()] == [0, 0]
    assert any("departs_anyway" in node.log.read_text() for node in site.nodes.values())
    folder = site.daemon.store / f"models/policy/versions/{version.number:08}"
    assert not folder.exists() or (folder / "held").exists(), "the daemon had no copy yet"
