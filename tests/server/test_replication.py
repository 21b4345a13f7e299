"""Replicas before READY and afterwards, in the register of nodes alone: what nodes are told, and when a version fails."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.server.nodes.decisions import ReplicasShort
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import ABORTED, READY, UPLOADING, VersionRecord
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import VerifiedVersion
from resharder.v1 import node_pb2

from tests.support.node_reports import report_of
from tests.support.observing import wait_until

FILES = tuple(lay_out([TensorSpec("a", "BF16", (40 << 10, 1024))]))
SIZE, PIECES = number_pieces(FILES).total, number_pieces(FILES).count
NAME = "models/policy/versions/1"
LEASE, REPLICAS = 10.0, 3


class World:
    """A register over one version that is verified, and its replication on a thread."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.now, self.stopped, self._pool = 0.0, False, pool
        self.record = VersionRecord("policy", 1, UPLOADING, 1, 1, "job", SIZE, 1, 0.0)
        found = Manifest(replace(self.record, state=READY), FILES, {}, ())
        self.verified = VerifiedVersion(Path("/nowhere"), found, durable=False)
        self.nodes = NodeRegistry(
            lambda model, number: Manifest(self.record, FILES, {}, ()),
            lambda model, number: self.record,
            lease_seconds=LEASE,
            forget_seconds=100.0,
            note=lambda kind, subject, what, reason: None,
            replicas=REPLICAS,
            replica_seconds=5.0,
            verified=lambda model, number: self.verified if self.record.state == UPLOADING else None,
            clock=lambda: self.now,
        )

    def replicate(self) -> "Future[None]":
        self.nodes.begin([self.verified])
        running = self._pool.submit(self.nodes.await_holders, [self.verified], lambda: self.stopped)
        wait_until(lambda: running.done() or self.nodes.shortages())
        return running

    def become(self, state: str) -> None:
        self.record = replace(self.record, state=state)
        self.nodes.version_changed(self.record)

    def report(self, node: str, held: Bitmap | None = None, problem: str = "", instance: str = "i") -> node_pb2.NodeOrders:
        copy = node_pb2.NodeVersion(version=NAME, folder="/f", held=held.to_bytes() if held else b"", problem=problem)
        state = report_of(node, instance, 2 * SIZE, versions=[copy] if held is not None or problem else [])
        waiting = self.nodes.sync(state, "", 0, 0.0)
        try:
            next(waiting)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise AssertionError("it waits")

    def has_orders(self, node: str) -> bool:
        """Whether the node should hold all pieces of the version."""
        return [order.wanted for order in self.report(node).versions] == [Bitmap.full(PIECES).to_bytes()]


@pytest.fixture
def world() -> Iterator[World]:
    with ThreadPoolExecutor() as pool:
        made = World(pool)
        yield made
        made.stopped = True


def test_two_nodes_hold_a_version_before_it_is_ready_and_no_worker_learns_of_it(world: World) -> None:
    for node in "abc":
        world.report(node)
    running = world.replicate()
    wait_until(lambda: sum(map(world.has_orders, "abc")) == REPLICAS - 1)
    chosen = [node for node in "abc" if world.has_orders(node)]
    with pytest.raises(ResourceNotFound, match="is not READY"):
        world.nodes.host_copy(NAME, "server", [("/a/nonce", b"a")])
    world.report(chosen[0], Bitmap.full(PIECES))
    world.report(chosen[1], Bitmap.of(PIECES, range(1, PIECES)))
    (short,) = world.nodes.shortages()
    wait_until(lambda: world.nodes.shortages()[0].short_pieces == 1)
    assert short.waits
    world.report(chosen[1], Bitmap.full(PIECES))
    running.result(timeout=30)
    world.become(READY)
    assert world.nodes.shortages() == []
    assert world.nodes.host_copy(NAME, "server", [("/a/nonce", b"a")]).node == "nodes/a"


def test_a_node_with_a_problem_is_replaced_for_some_time(world: World) -> None:
    for node in "ab":
        world.report(node)
    world.replicate()
    wait_until(lambda: world.has_orders("a") and world.has_orders("b"))
    world.report("c")
    world.report("b", problem="memory full")
    wait_until(lambda: world.has_orders("c"))
    assert not world.report("b").versions
    world.now += 1.0
    assert not world.report("b").versions


def test_a_version_fails_once_nothing_has_changed_for_some_seconds(world: World) -> None:
    world.report("a")
    running = world.replicate()
    wait_until(lambda: world.has_orders("a"))
    world.now += 4.0
    world.report("a", Bitmap.of(PIECES, [0]))
    wait_until(lambda: world.nodes._placements[NAME].lacking == 2 * PIECES - 1)
    for _ in range(2):
        assert not running.done(), "a piece has arrived"
        world.now += 2.5
        world.report("a", Bitmap.of(PIECES, [0]))
    with pytest.raises(
        ReplicasShort, match=r"6 of 6 pieces have fewer than 3 holders, and no node is left for 6 of them among 1"
    ):
        running.result(timeout=30)
    world.become(ABORTED)
    assert not world.report("a", Bitmap.of(PIECES, [0])).versions
    assert world.nodes.shortages() == []


def test_an_abort_and_a_shutdown_end_the_wait(world: World) -> None:
    running = world.replicate()
    world.stopped = True
    with pytest.raises(ReplicasShort, match="the version is aborted"):
        running.result(timeout=30)
    world.become(ABORTED)
    world.stopped, world.record = False, replace(world.record, state=UPLOADING)
    running = world.replicate()
    world.nodes.close()
    with pytest.raises(ReplicasShort, match="the daemon is shutting down"):
        running.result(timeout=30)


def test_replicas_of_a_dead_or_drained_node_are_made_up_after_the_nodes_have_reported(world: World) -> None:
    world.record = replace(world.record, state=READY)
    world.nodes.version_changed(world.record)
    for node in "ab":
        world.report(node, Bitmap.full(PIECES))
    world.report("c")
    world.nodes.expire()
    assert world.nodes.shortages() == []
    world.nodes.set_drained("b", True)
    world.nodes.expire()
    assert [each.waits for each in world.nodes.shortages()] == [False]
    assert not world.report("c").versions, "others may report replicas yet, because the daemon has just started"
    world.now += LEASE + 1
    for node in "ac":
        world.report(node, Bitmap.full(PIECES) if node == "a" else None)
    world.nodes.expire()
    assert world.has_orders("c")
    world.report("c", Bitmap.full(PIECES))
    world.nodes.expire()
    assert world.nodes.shortages() == []


def test_a_replica_does_not_make_way_for_a_version_that_a_worker_wants(world: World) -> None:
    world.record = replace(world.record, state=READY)
    world.nodes.version_changed(world.record)
    world.now += LEASE + 1
    for node in "ab":
        world.report(node, Bitmap.full(PIECES))
    world.nodes.expire()
    for number in (2, 3):
        world.record = replace(world.record, number=number)
        world.nodes.host_copy(f"models/policy/versions/{number}", "server", [("/a/nonce", b"a")])
    assert [order.version for order in world.report("a", Bitmap.full(PIECES)).versions] == [
        NAME, "models/policy/versions/3",
    ]  # fmt: skip
