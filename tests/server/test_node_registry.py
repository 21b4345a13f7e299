"""The daemon's register of nodes, with a clock of its own: leases, names, capacity, readers, and what restarts leave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out
from resharder.converters.wire.pieces import Bitmap, number_pieces
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.holding.piece_fetcher import MOST_LINKS, LinkLog, bounded_link
from resharder.server.infra.change_signal import Pause
from resharder.server.nodes.records import DrainedNodes
from resharder.server.nodes.registry import NodeRegistry
from resharder.server.observability.metrics.gauges import NOTHING, families
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ResourceNotFound, Unavailable
from resharder.server.state.version import READY, RETIRED, VersionRecord
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import MissingPieces, VerifiedVersion
from resharder.v1 import node_pb2, resources_pb2

from tests.support.node_reports import pieces_at, report_of, with_values

FILES = tuple(lay_out([TensorSpec("a", "BF16", (40 << 10, 1024))]))
SIZE, PIECES = number_pieces(FILES).total, number_pieces(FILES).count
LEASE, FORGET = 10.0, 100.0
NAMES = [f"models/policy/versions/{number}" for number in range(1, 4)]


class World:
    """A register over versions 1 to 3 of one model."""

    def __init__(self, drained: Path) -> None:
        self.now, self.drained = 0.0, drained
        self.seen: dict[str, int] = {}
        self.events: list[tuple[str, str]] = []
        self.records = {number: VersionRecord("policy", number, READY, 1, number, "job", SIZE, 1, 0.0) for number in (1, 2, 3)}
        self.nodes = self.restart()

    def restart(self) -> NodeRegistry:
        self.nodes = NodeRegistry(
            lambda model, number: Manifest(self.records[number], FILES, {}, ()),
            lambda model, number: self.records[number],
            lease_seconds=LEASE,
            forget_seconds=FORGET,
            note=lambda kind, subject, what, reason: self.events.append((subject, what)),
            drained=DrainedNodes(self.drained),
            clock=lambda: self.now,
            wall=lambda: self.now,
        )
        return self.nodes

    def sync(self, node: node_pb2.SyncNodeRequest, caller: str = "", seen: int = 0, wait: float = 0.0) -> node_pb2.NodeOrders:
        """The answer to a report; a wait ends at its first pause."""
        waiting = self.nodes.sync(node, caller, seen, wait)
        try:
            pause = next(waiting)
            assert isinstance(pause, Pause)
            self.now += pause.seconds
            next(waiting)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        raise AssertionError("it waits on")

    def want(self, version: str, node: str = "one", pieces: Bitmap | None = None) -> node_pb2.HostVersion:
        needed = pieces.to_bytes() if pieces else b""
        return self.nodes.host_copy(version, "server", [(f"/{node}/nonce", node.encode())], needed)

    def retire(self, number: int) -> None:
        self.records[number] = replace(self.records[number], state=RETIRED)
        self.nodes.version_changed(self.records[number])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "drained.json")


def test_a_node_reports_three_times_within_its_lease(world: World) -> None:
    assert world.sync(report()).report_seconds <= LEASE / 3
    assert world.sync(report(), seen=world.sync(report()).revision, wait=60).revision
    assert world.now <= LEASE / 3


def report(node: str = "one", instance: str = "i", capacity: int = 10 * SIZE, **held: Bitmap | None) -> node_pb2.SyncNodeRequest:
    copies = [copy_of(NAMES[int(name[1:]) - 1], f"/{node}/{name}", bits) for name, bits in held.items()]
    return report_of(node, instance, capacity, versions=copies)


def copy_of(version: str, folder: str, held: Bitmap | None, **more: Any) -> node_pb2.NodeVersion:
    return node_pb2.NodeVersion(version=version, folder=folder, held=held.to_bytes() if held else b"", **more)


def ordered(orders: node_pb2.NodeOrders) -> list[str]:
    return [order.version for order in orders.versions]


def test_a_node_is_told_what_workers_on_its_host_need_the_newest_request_first(world: World) -> None:
    assert ordered(world.sync(report())) == []
    world.want(NAMES[0])
    world.want(NAMES[1])
    orders = world.sync(report())
    assert ordered(orders) == [NAMES[1], NAMES[0]]
    (source,) = orders.versions[0].peers
    assert (source.source, source.data_address) == (True, "")
    assert pieces_at(orders.versions[0], PIECES)["daemon"] == sorted(orders.versions[0].granted) != []
    assert world.sync(report(), seen=orders.revision, wait=5.0) == orders, "once the time has passed"


def test_a_worker_does_not_wait_for_a_node_that_is_full_of_replicas(world: World) -> None:
    world.sync(report(capacity=2 * SIZE))
    node, full = world.nodes._nodes["one"], Bitmap.full(PIECES)
    world.want(NAMES[0])
    world.want(NAMES[1])
    node.replicate({NAMES[0]: full, NAMES[1]: full}, ())
    assert world.want(NAMES[2]).problem == "nodes/one: replicas of other versions leave no room for it"
    assert NAMES[2] not in ordered(world.sync(report(capacity=2 * SIZE)))
    assert world.want(NAMES[1]).problem == "", "a replica itself"
    node.replicate({NAMES[0]: full}, ())
    assert world.want(NAMES[2]).problem == ""
    assert ordered(world.sync(report(capacity=2 * SIZE))) == [NAMES[0], NAMES[2]]
    world.sync(report(capacity=3 * SIZE))
    node.replicate({NAMES[0]: full, NAMES[1]: full}, ())
    assert world.want(NAMES[2]).problem == "", "it fits beside them"
    world.sync(report(capacity=2 * SIZE))
    world.nodes.set_drained("one", True)
    assert world.want(NAMES[2]).problem == "nodes/one: it is drained", "which comes first"


def test_versions_that_do_not_fit_beside_newer_ones_and_retired_ones_are_to_be_dropped(world: World) -> None:
    world.sync(report(capacity=2 * SIZE))
    for name in NAMES:
        world.want(name)
    assert ordered(world.sync(report(capacity=2 * SIZE))) == [NAMES[2], NAMES[1]]
    world.retire(3)
    assert ordered(world.sync(report(capacity=2 * SIZE))) == [NAMES[1], NAMES[0]]
    with pytest.raises(ResourceNotFound, match="is not READY"):
        world.want(NAMES[2])


def test_a_worker_learns_of_the_nonce_files_and_then_of_its_own_hosts_node(world: World) -> None:
    assert world.nodes.host_copy(NAMES[0], "s", []).nonce_files == []
    world.sync(report("one"))
    world.sync(report("two"))
    assert world.nodes.host_copy(NAMES[0], "s", []).nonce_files == ["/one/nonce", "/two/nonce"]
    assert world.nodes.host_copy(NAMES[0], "s", [("/one/nonce", b"another")]).node == ""
    found = world.nodes.host_copy(NAMES[0], "s", [("/two/nonce", b"two")])
    assert (found.node, found.folder, found.whole) == ("nodes/two", "", False)
    world.sync(report("two", v1=Bitmap.of(PIECES, [0])))
    assert not world.nodes.host_copy(NAMES[0], "s", [("/two/nonce", b"two")]).whole
    world.sync(report("two", v1=Bitmap.full(PIECES)))
    found = world.nodes.host_copy(NAMES[0], "s", [("/two/nonce", b"two")])
    assert (found.folder, found.whole, found.problem) == ("/two/v1", True, "")


def test_a_node_is_named_for_pieces_that_it_holds_until_it_is_lost(world: World) -> None:
    world.sync(report("one", v1=Bitmap.full(PIECES)))
    world.sync(report("two"))
    world.want(NAMES[0], "two")
    assert [source.data_address for source in world.sync(report("two")).versions[0].peers] == ["one:7679"]
    world.now += LEASE + 1
    world.sync(report("two"))
    world.nodes.expire()
    assert [source.data_address for source in world.sync(report("two")).versions[0].peers] == [""]
    assert world.nodes.host_copy(NAMES[0], "s", [("/one/nonce", b"one")]).node == ""
    assert [view.state for view in world.nodes.views()] == [resources_pb2.Node.LOST, resources_pb2.Node.LIVE]
    assert ("nodes/one", "lost") in world.events
    world.now += FORGET
    world.sync(report("two"))
    world.nodes.expire()
    assert [node.name for node in world.nodes.views()] == ["nodes/two"]


def test_other_nodes_learn_where_a_transfer_engine_has_a_version(world: World) -> None:
    world.sync(report("two"))
    for session, addresses in (("nixl/one:15001/a", (1 << 40,)), ("nixl/one:15001/b", ()), ("", (1 << 40,))):
        held = copy_of(NAMES[0], "/one/v1", Bitmap.full(PIECES), addresses=addresses)
        world.sync(with_values(report("one"), session=session, versions=[held]))
        world.want(NAMES[0], "two")
        (order,) = world.sync(report("two")).versions
        found = {source.node: (source.session, tuple(source.addresses)) for source in order.peers}
        assert found == {"nodes/one": (session, addresses if session else ())}


def test_a_daemon_that_restarts_takes_up_what_nodes_report(world: World) -> None:
    world.restart()
    held = report(v2=Bitmap.full(PIECES))
    assert ordered(world.sync(held)) == [NAMES[1]]
    world.sync(report("two"))
    world.want(NAMES[1], "two")
    assert [source.data_address for source in world.sync(report("two")).versions[0].peers] == ["one:7679"]


def test_a_drained_node_is_drained_after_restarts_of_daemon_and_node(world: World) -> None:
    world.sync(report(v1=Bitmap.full(PIECES)))
    world.nodes.set_drained("one", True)
    world.nodes.leave("one", "first")
    world.sync(report("two"))
    world.restart()
    assert world.sync(report(instance="second", v1=Bitmap.full(PIECES))).drained
    assert [view.state for view in world.nodes.views()] == [resources_pb2.Node.DRAINED]
    assert world.nodes.set_drained("one", False).state == resources_pb2.Node.LIVE
    world.restart()
    assert ordered(world.sync(report(v1=Bitmap.full(PIECES)))) == [NAMES[0]]


def test_a_node_is_not_drained_if_that_cannot_be_written(world: World) -> None:
    world.sync(report())
    world.drained.with_name("drained.json.part").mkdir()
    with pytest.raises(Unavailable, match="EISDIR"):
        world.nodes.set_drained("one", True)
    assert [view.state for view in world.nodes.views()] == [resources_pb2.Node.LIVE]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'["one"', b"\xff"])
def test_a_damaged_list_of_drained_nodes_is_no_list(world: World, content: bytes) -> None:
    world.drained.write_bytes(content)
    world.restart()
    assert not world.sync(report()).drained


def test_the_newest_process_of_a_name_is_the_node_and_with_an_identity_its_owner_alone(world: World) -> None:
    world.sync(report(instance="former"), "dns:one@host")
    world.sync(report(instance="newer"), "dns:one@host")
    with pytest.raises(FailedPrecondition, match="another process has become node 'one'"):
        world.sync(report(instance="former"), "dns:one@host")
    with pytest.raises(PermissionDenied, match="belongs to dns:one@host"):
        world.sync(report(instance="other"), "dns:other@host")
    known = world.sync(report(instance="newer"), "dns:one@host").revision
    waiting = world.nodes.sync(report(instance="newer"), "dns:one@host", known, 5.0)
    next(waiting)
    world.sync(report(instance="newest"), "dns:one@host")
    with pytest.raises(FailedPrecondition, match="another process"):
        next(waiting)
    world.nodes.leave("one", "former")
    assert [node.name for node in world.nodes.views()] == ["nodes/one"], "of the newest process"
    world.nodes.leave("one", "newest")
    assert world.nodes.views() == []


def test_a_node_hears_at_once_who_may_read_a_model(world: World) -> None:
    world.sync(report())
    world.want(NAMES[0])
    before = world.sync(report())
    world.nodes.admit(NAMES[0], "dns:two@host")
    after = world.sync(report(), seen=before.revision, wait=5.0)
    assert (before.versions[0].readers, after.versions[0].readers) == ([], ["dns:two"])


def test_a_node_should_hold_the_union_of_what_workers_on_its_host_need(world: World) -> None:
    world.sync(report())
    some, more = Bitmap.of(PIECES, [0, 1]), Bitmap.of(PIECES, [1, 3])
    world.want(NAMES[0], pieces=some)
    before = world.sync(report())
    assert before.versions[0].wanted == some.to_bytes()
    assert set(before.versions[0].granted) <= {0, 1}
    assert world.sync(report(), seen=before.revision, wait=5.0).revision == before.revision
    world.want(NAMES[0], pieces=more)
    after = world.sync(report(), seen=before.revision, wait=5.0)
    assert after.versions[0].wanted == (some | more).to_bytes()
    (copy,) = world.nodes.views()[0].copies
    assert (copy.wanted_pieces, copy.pieces) == (3, PIECES)


def test_a_worker_has_what_it_needs_while_pieces_of_others_are_missing_or_do_not_fit(world: World) -> None:
    some, more = Bitmap.of(PIECES, [0, 1]), Bitmap.of(PIECES, [3])
    held = copy_of(NAMES[0], "/one/v1", some, problem="memory full", wanted=some.to_bytes())
    world.sync(with_values(report(), versions=[held]))
    assert world.want(NAMES[0], pieces=some) == node_pb2.HostVersion(
        node="nodes/one", folder="/one/v1", whole=True, held_bytes=2 * PIECE_BYTES
    )
    assert world.want(NAMES[0], pieces=more).problem == "nodes/one: memory full"
    assert not world.want(NAMES[0]).whole


def test_parts_of_more_versions_fit_and_a_restarted_daemon_wants_no_more_than_before(world: World) -> None:
    capacity, some = SIZE + 2 * PIECE_BYTES, Bitmap.of(PIECES, [0, 1])
    world.sync(report(capacity=capacity))
    world.want(NAMES[0], pieces=some)
    world.want(NAMES[1])
    assert ordered(world.sync(report(capacity=capacity))) == [NAMES[1], NAMES[0]]
    world.restart()
    held = copy_of(NAMES[0], "/one/v1", some, wanted=some.to_bytes())
    (order,) = world.sync(with_values(report(), versions=[held])).versions
    assert order.wanted == some.to_bytes()


def test_a_node_whose_first_report_is_refused_is_not_known(world: World) -> None:
    world.want(NAMES[0], node="none")
    with pytest.raises(InvalidArgument, match="expected"):
        world.sync(report(v1=Bitmap.full(8 * PIECES + 8)))
    assert world.nodes.views() == []


def test_a_bitmap_of_another_version_is_refused(world: World) -> None:
    with pytest.raises(InvalidArgument, match="expected"):
        world.sync(report(v1=Bitmap.full(8 * PIECES)))
    world.sync(report())
    with pytest.raises(InvalidArgument, match="expected"):
        world.want(NAMES[0], pieces=Bitmap.full(8 * PIECES))


def test_gauges_count_nodes_their_bytes_and_missing_pieces(world: World) -> None:
    world.sync(
        with_values(
            report(v1=Bitmap.of(PIECES, [0])),
            received_daemon_bytes=7,
            received_peer_bytes=5,
            received_engine_bytes=4,
            used_bytes=3,
        )
    )
    world.sync(report("two"))
    world.nodes.set_drained("two", True)
    now = replace(NOTHING, nodes=world.nodes.views())
    found = {(s.name, *s.labels.values()): s.value for family in families(now) for s in family.samples}
    assert [found["resharder_nodes", state] for state in ("LIVE", "DRAINED", "LOST")] == [1, 1, 0]
    assert [found["resharder_node_received_bytes", source] for source in ("origin", "peer")] == [7, 5]
    assert found["resharder_node_engine_received_bytes",] == 4
    assert found[("resharder_node_missing_pieces",)] == PIECES - 1
    assert found[("resharder_node_used_bytes",)] == 3


def test_a_node_of_the_name_daemon_takes_no_pieces_from_the_daemons_row(world: World) -> None:
    world.want(NAMES[0])
    world.sync(report("daemon", v1=Bitmap.of(PIECES, [0])))
    world.sync(report("daemon"))
    world.sync(report())
    world.want(NAMES[0])
    (source,) = world.sync(report()).versions[0].peers
    assert (source.source, source.data_address) == (True, "")


def link(peer: str, size: int, seconds: float, failures: int, problem: str = "") -> resources_pb2.NodeLink:
    return resources_pb2.NodeLink(peer=peer, received_bytes=size, seconds=seconds, failures=failures, problem=problem)


def test_a_node_remembers_its_last_links_and_the_daemon_bounds_what_they_say() -> None:
    log = LinkLog()
    for peer in range(MOST_LINKS + 2):
        log.failed(f"nodes/{peer}", "refused")
    log.received("nodes/2", 100, 0.5)
    log.received("nodes/2", 100, 1.5)
    assert (len(log.all()), log.all()[-1]) == (MOST_LINKS, link("nodes/2", 200, 2.0, 1))
    strange = resources_pb2.NodeLink(peer="p" * 1000, received_bytes=-1, seconds=float("nan"), failures=-1, problem="x" * 1000)
    assert bounded_link(strange) == link("p" * 100, 0, 0.0, 0, "x" * 500)
    assert bounded_link(resources_pb2.NodeLink(seconds=float("inf"))).seconds == 1e9


def test_nodes_that_call_with_a_token_are_admitted_by_their_certificates_also_later_ones(world: World) -> None:
    def sync(name: str, certificate: str, seen: int = 0, wait: float = 0.0) -> node_pb2.NodeOrders:
        return world.sync(with_values(report(name), certificate=certificate), f"token:hosts@{name}", seen, wait)

    sync("one", "sha256:1")
    world.want(NAMES[0])
    world.nodes.admit(NAMES[0], "token:hosts@one")
    world.nodes.admit(NAMES[0], "dns:x.test@two")
    orders = sync("one", "sha256:1")
    assert orders.versions[0].readers == ["dns:x.test", "sha256:1"]
    waiting = world.nodes.sync(with_values(report("one"), certificate="sha256:1"), "token:hosts@one", orders.revision, 5.0)
    pause = next(waiting)
    assert isinstance(pause, Pause)
    sync("two", "sha256:2")
    assert pause.signal.count > pause.seen
    assert sync("one", "sha256:1").versions[0].readers == ["dns:x.test", "sha256:1", "sha256:2"]
    sync("two", "sha256:3")
    assert sync("one", "sha256:1").versions[0].readers == ["dns:x.test", "sha256:1", "sha256:3"]


def lacking(world: World, held: Bitmap, nodes: tuple[str, ...]) -> tuple[VerifiedVersion, list[str]]:
    """Let the daemon's store lack pieces of version 3; return what it has, and the reasons for which it is lost."""
    missing, lost = MissingPieces(held, (0,) * PIECES, frozenset(nodes)), list[str]()
    found = VerifiedVersion(Path("/nowhere"), Manifest(world.records[3], FILES, {}, ()), missing)
    world.nodes = NodeRegistry(
        lambda model, number: Manifest(world.records[number], FILES, {}, ()),
        lambda model, number: world.records[number],
        lease_seconds=LEASE,
        forget_seconds=FORGET,
        note=lambda kind, subject, what, reason: None,
        verified=lambda model, number: found if number == 3 else None,
        lose=lambda model, number, reason: lost.append(f"{model}/{number}: {reason}"),
        clock=lambda: world.now,
        wall=lambda: world.now,
    )
    return found, lost


def pass_time(world: World, seconds: int, *reports: node_pb2.SyncNodeRequest) -> None:
    """Let nodes report each second, with the revision of their last orders."""
    for _ in range(seconds):
        world.now += 1
        for each in reports:
            world.seen[each.node] = world.sync(each, seen=world.seen.get(each.node, 0)).revision
        world.nodes.expire()


def test_a_piece_that_no_node_has_reported_yet_is_lost_once_no_expected_node_can_report_it(world: World) -> None:
    _, lost = lacking(world, Bitmap.of(PIECES, [0]), ("one", "two"))

    def without_holder() -> int:
        return len(world.nodes._table.orphans(NAMES[2]))

    half, rest = Bitmap.of(PIECES, [1, 2]), Bitmap.full(PIECES) - Bitmap.of(PIECES, [0, 1, 2])
    world.nodes.version_changed(world.records[3])
    assert without_holder() == PIECES - 1
    pass_time(world, int(LEASE) - 1, report("one", v3=half))
    assert (lost, without_holder()) == ([], PIECES - 3), "two may still report"
    pass_time(world, 3, report("one", v3=half), report("two", v3=rest))
    assert without_holder() == 0
    pass_time(world, 30, report("one", v3=half), report("two", v3=rest))
    assert lost == []
    pass_time(world, int(LEASE) + 1, report("one", v3=half))
    assert (lost, without_holder()) == ([], PIECES - 3), "one may have got them since"
    pass_time(world, 1, report("one", v3=half), report("two", v3=rest))
    pass_time(world, int(LEASE), report("one", v3=half))
    assert (lost, world.nodes._table.doubts()) == ([], [])
    pass_time(world, 3, report("one", v3=half))
    assert lost[0] == f"policy/3: neither the daemon nor a node holds {PIECES - 3} of {PIECES} pieces"


def test_a_version_in_doubt_waits_for_a_report_of_each_live_node_that_follows_the_doubt(world: World) -> None:
    _, lost = lacking(world, Bitmap(PIECES), ("one",))
    world.nodes.version_changed(world.records[3])
    one, two = report("one", v3=Bitmap.full(PIECES)), report("two")
    pass_time(world, 1, one, two)
    before, notified = world.seen["nodes/two"], world.nodes._nodes["two"].changed.count
    world.nodes.leave("one", "i")
    pass_time(world, 1)
    assert len(world.nodes._table.doubts()) == 1
    assert world.nodes._nodes["two"].changed.count > notified, "it is asked at once"
    world.now += 1
    orders = world.sync(two, seen=before)
    world.nodes.expire()
    assert (lost, orders.revision == before) == ([], False), "that report may be older than the doubt"
    world.now += 1
    world.sync(report("two", v3=Bitmap.full(PIECES)), seen=orders.revision)
    world.nodes.expire()
    assert (lost, world.nodes._table.doubts()) == ([], []), "it got them from the other one"
    world.nodes.leave("two", "i")
    world.nodes.expire()
    assert len(lost) == 1, "no node is left"


def test_an_expected_node_that_never_returns_is_not_awaited_beyond_a_lease(world: World) -> None:
    _, lost = lacking(world, Bitmap(PIECES), ("gone",))
    world.nodes.version_changed(world.records[3])
    pass_time(world, int(LEASE))
    assert (lost, world.nodes._table.doubts()) == ([], [])
    pass_time(world, 1)
    assert len(lost) > 0


def test_a_report_without_a_copy_counts_and_a_lasting_one_alone(world: World) -> None:
    _, lost = lacking(world, Bitmap(PIECES), ("one",))
    world.nodes.version_changed(world.records[3])
    world.sync(report("one"))
    assert len(world.nodes._table.orphans(NAMES[2])) == PIECES
    world.nodes.expire()
    pass_time(world, 30, report("one", v3=Bitmap.full(PIECES)))
    assert lost == [], "a report that was under way is older than the version"


def test_a_node_keeps_pieces_that_the_daemon_lacks_also_when_it_is_drained_or_full(world: World) -> None:
    found, _ = lacking(world, Bitmap.full(PIECES) - Bitmap.of(PIECES, [1]), ("one",))
    held = Bitmap.of(PIECES, [0, 1])
    world.nodes.version_changed(world.records[3])
    small = report("one", capacity=1, v3=held)
    assert ordered(world.sync(small)) == [NAMES[2]]
    world.want(NAMES[0])
    assert ordered(world.sync(small)) == [NAMES[2]]
    world.nodes.set_drained("one", True)
    assert ordered(world.sync(small)) == [NAMES[2]]
    found.want(Bitmap.full(PIECES))
    order = world.nodes.own_order(found, ())
    assert ([peer.data_address for peer in order.peers], pieces_at(order, PIECES)) == (["one:7679"], {"nodes/one": [1]})
    assert [peer.node for peer in world.nodes.holders(NAMES[2], 0)] == ["nodes/one"]
    assert world.nodes.holders(NAMES[2], 2) == []
    found._held = Bitmap.full(PIECES)
    world.nodes.count_own()
    assert ordered(world.sync(small)) == []
    assert not world.nodes.own_order(found, ()).peers


def test_the_daemon_is_named_for_the_pieces_alone_that_it_has(world: World) -> None:
    lacking(world, Bitmap.of(PIECES, [0]), ("one",))
    world.nodes.version_changed(world.records[3])
    held = with_values(
        report(), versions=[copy_of(NAMES[2], "/one/v3", Bitmap.of(PIECES, [1]), wanted=Bitmap.of(PIECES, [1]).to_bytes())]
    )
    world.sync(held)
    world.sync(report("two"))
    world.want(NAMES[2], "two")
    (order,) = world.sync(report("two")).versions
    assert pieces_at(order, PIECES) == {"daemon": [0], "nodes/one": [1]}
