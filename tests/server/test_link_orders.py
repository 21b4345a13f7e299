"""Orders to nodes to measure links: which, in which order, whose results count, and when they end."""

import math
import threading
from collections.abc import Iterator

import pytest
from resharder.server.infra.change_signal import Pause
from resharder.server.nodes.known_node import KnownNode
from resharder.server.nodes.link_orders import MOST_LINKS, LinkEnds, LinkOrders, links_of, next_links
from resharder.server.nodes.reports import CopyReport, LinkOrder, StateReport
from resharder.server.state.errors import InvalidArgument, PermissionDenied, ResourceNotFound
from resharder.v1 import resources_pb2

HELD = "models/policy/versions/2"


class World:
    """Orders to nodes a, b and c, with a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nodes = {id: KnownNode(report(id), f"dns:{id}", 0.0, 0.0) for id in "abc"}
        self.orders = LinkOrders(self.nodes, threading.Lock(), {HELD}, lambda: self.now)

    def order(self, id: str) -> LinkOrder:
        found = self.nodes[id].link
        assert found is not None
        return found

    def put(self, id: str, caller: str = "", instance: str = "i", order: str = "", **found: object) -> None:
        measured = resources_pb2.LinkMeasurement(**found)  # type: ignore[arg-type]
        self.orders.put(id, instance, caller or f"dns:{id}", order or self.order(id).id, measured)


def report(id: str, instance: str = "i") -> StateReport:
    copies = (CopyReport("models/policy/versions/1", "", b"\xff"), CopyReport(HELD, "", b"\x01"), CopyReport("empty", "", b""))
    return StateReport(id, instance, f"{id}:7679", "", b"", 0, 0, copies=copies)


def step(call: Iterator[resources_pb2.LinkMeasurement | Pause]) -> list[resources_pb2.LinkMeasurement]:
    """Return the measurements that a call sends until it waits or ends."""
    sent = list[resources_pb2.LinkMeasurement]()
    for found in call:
        if isinstance(found, Pause):
            break
        sent.append(found)
    return sent


@pytest.fixture
def world() -> World:
    return World()


def test_links_go_from_live_nodes_to_all_others_and_the_daemon() -> None:
    found = links_of([], [], {"a": True, "b": False})
    assert found == [LinkEnds("a", "daemon"), LinkEnds("a", "nodes/b")]
    assert links_of(["b"], ["nodes/a", "nodes/a"], {"a": True, "b": False}) == [LinkEnds("b", "nodes/a")]


def test_unknown_nodes_and_too_many_links_are_refused() -> None:
    for sources, targets in ((["none"], []), ([], ["nodes/none"]), ([], ["other"])):
        with pytest.raises(ResourceNotFound, match="unknown; there are daemon, nodes/a"):
            links_of(sources, targets, {"a": True})
    many = {f"n{number}": True for number in range(16)}
    assert len(links_of([], [], many)) == MOST_LINKS
    with pytest.raises(InvalidArgument, match="expected 1 to 256 links between two hosts each, got 289"):
        links_of([], [], many | {"n16": True})
    with pytest.raises(InvalidArgument, match="got 0"):
        links_of(["a"], ["nodes/a"], {"a": True})


def test_a_host_is_in_one_measurement_at_a_time() -> None:
    waiting = [
        LinkEnds("a", "nodes/b"),
        LinkEnds("b", "daemon"),
        LinkEnds("c", "daemon"),
        LinkEnds("d", "nodes/e"),
        LinkEnds("e", "nodes/d"),
    ]
    assert next_links(waiting, {"nodes/e"}) == [LinkEnds("a", "nodes/b"), LinkEnds("c", "daemon")]


def test_nodes_are_ordered_in_turn_and_their_results_come_back(world: World) -> None:
    call = world.orders.measure([], ["nodes/a", "nodes/b"], [], 60)
    assert not step(call)
    first = world.order("a")
    assert (first.target, first.data_address, first.versions) == ("nodes/b", "b:7679", (HELD,))
    assert world.nodes["b"].link is None
    assert world.nodes["c"].link is None  # both of its targets take part in another
    world.put("a", target="nodes/x", source="nodes/x", round_trip_seconds=0.5, rates=[{"streams": 1, "bytes": 8, "seconds": 2}])
    (found,) = step(call)
    assert (found.source, found.target, found.data_address) == ("nodes/a", "nodes/b", "b:7679")
    assert (found.round_trip_seconds, found.rates[0].bytes) == (0.5, 8)
    assert not step(call)
    assert world.nodes["a"].link is None
    ordered = {id: node.link.target for id, node in world.nodes.items() if node.link}
    assert ordered == {"b": "nodes/a"}
    world.put("b", unread="it holds no piece")
    assert [each.unread for each in step(call)] == ["it holds no piece"]
    for _ in range(2):
        step(call)
        world.put("c")
        assert [each.source for each in step(call)] == ["nodes/c"]
    assert list(call) == []


def test_the_daemon_is_a_target_with_its_own_versions(world: World) -> None:
    call = world.orders.measure(["a"], ["daemon"], ["models/policy/versions/9"], 60)
    step(call)
    assert (world.order("a").data_address, world.order("a").versions) == ("", ("models/policy/versions/9",))
    world.put("a", data_address="daemon:7679")
    assert [(each.target, each.data_address) for each in step(call)] == [("daemon", "daemon:7679")]


def test_two_operators_do_not_measure_with_one_host_at_once(world: World) -> None:
    first, second = (world.orders.measure(["a"], [target], [], 60) for target in ("nodes/b", "nodes/c"))
    step(first)
    step(second)
    assert world.order("a").target == "nodes/b"
    world.put("a")
    assert [each.target for each in step(first)] == ["nodes/b"]
    step(second)
    assert world.order("a").target == "nodes/c"


def test_results_of_others_and_of_ended_orders_do_not_count(world: World) -> None:
    call = world.orders.measure(["a"], ["nodes/b"], [], 60)
    step(call)
    with pytest.raises(PermissionDenied):
        world.put("a", caller="dns:b")
    with pytest.raises(ResourceNotFound):
        world.orders.put("none", "i", "", "", resources_pb2.LinkMeasurement())
    world.put("a", instance="other")
    world.put("a", order="other")
    world.orders.put("b", "i", "dns:b", world.order("a").id, resources_pb2.LinkMeasurement())
    assert not step(call)
    order = world.order("a").id
    call.close()  # type: ignore[attr-defined]
    assert world.nodes["a"].link is None
    world.put("a", order=order)
    assert not step(world.orders.measure(["a"], ["nodes/b"], [], 60))


def test_a_source_that_is_lost_restarts_or_is_silent_ends_its_measurement(world: World) -> None:
    call = world.orders.measure(["a"], ["nodes/b"], [], 600)
    step(call)
    world.nodes["a"].lost = True
    assert [each.problem for each in step(call)] == ["nodes/a is lost, and measures nothing"]
    assert [each.problem for each in step(world.orders.measure(["a"], ["nodes/b"], [], 600))] == [
        "nodes/a is lost, and measures nothing"
    ]
    world.nodes["a"].lost = False
    call = world.orders.measure(["a"], ["nodes/b"], [], 600)
    step(call)
    world.nodes["a"].report = report("a", "later")
    assert [each.problem for each in step(call)] == ["nodes/a has started again"]
    call = world.orders.measure(["a"], ["nodes/b"], [], 600)
    step(call)
    world.now += 61
    assert [each.problem for each in step(call)] == ["nodes/a has sent no result in 61 s"]
    assert list(call) == []
    call = world.orders.measure(["a"], ["nodes/b"], [], 600)
    step(call)
    del world.nodes["a"]
    assert [each.problem for each in step(call)] == ["nodes/a has left"]


def test_links_that_are_left_at_the_end_of_the_wait_are_problems(world: World) -> None:
    call = world.orders.measure(["a"], [], [], 5)
    step(call)
    world.now += 5
    assert [each.problem for each in step(call)] == ["nodes/a has sent no result in 5 s"] + 2 * ["not measured within 5 s"]
    assert world.nodes["a"].link is None


def test_numbers_and_texts_of_results_are_bounded(world: World) -> None:
    call = world.orders.measure(["a"], ["nodes/b"], [], 60)
    step(call)
    rates = [resources_pb2.LinkRate(streams=-1, bytes=-1, seconds=value) for value in (math.nan, math.inf, *range(20))]
    world.put("a", round_trip_seconds=-1.0, rates=rates, problem="p" * 1000, mend="m" * 1000, unread="u" * 1000)
    (found,) = step(call)
    assert (len(found.problem), len(found.mend), len(found.unread), len(found.rates)) == (500, 500, 500, 8)
    assert found.round_trip_seconds == 0.0
    assert (found.rates[0].streams, found.rates[0].bytes, found.rates[0].seconds) == (1, 0, 0.0)
    assert math.isfinite(found.rates[1].seconds)
