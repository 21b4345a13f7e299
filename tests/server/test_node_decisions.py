"""The daemon's decisions about nodes: bounds of replicas that hold for any nodes, the order of the choice, and what is late."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.nodes.decisions import (
    HeldVersion,
    ReplicaPlacement,
    ReplicaRules,
    chosen,
    late,
    place,
    revision_of,
    shortage,
)
from resharder.server.nodes.known_node import KnownNode
from resharder.server.state.version import DAEMON
from resharder.v1 import node_pb2

PIECES = 5
NUMBERING = PieceNumbering([("a", 3 * PIECE_BYTES), ("b", PIECE_BYTES + 1)])
SIZE = NUMBERING.total
VERSION, NEWER = "models/policy/versions/1", "models/policy/versions/2"
ALL, NONE = Bitmap.full(PIECES), Bitmap(PIECES)
NO_STORE = ReplicaRules(1, hold=False)


def version(name: str = VERSION, **given: Any) -> HeldVersion:
    return HeldVersion(name, NUMBERING, **given)


def node(capacity: int = SIZE, *, id: str = "n", caller: str = "", **given: Any) -> KnownNode:
    report = node_pb2.SyncNodeRequest(node=f"nodes/{id}", capacity_bytes=capacity, data_address="host:1")
    report.versions.extend(given.pop("copies", ()))
    found = KnownNode(report, caller, 0.0, 0.0, **given)
    for name, pieces in found.replicas.items():
        found.want(name, (), pieces)
    return found


def nodes(**capacities: int) -> dict[str, KnownNode]:
    return {id: node(capacity, id=id) for id, capacity in capacities.items()}


def placed(found: HeldVersion, among: Mapping[str, KnownNode], rules: ReplicaRules = NO_STORE) -> ReplicaPlacement:
    return place([found], among, {}, rules)[VERSION]


def test_pieces_go_to_the_nodes_with_the_most_free_memory() -> None:
    found = placed(version(), nodes(a=SIZE, b=3 * SIZE, c=2 * SIZE), ReplicaRules(2, hold=False))
    assert {id: pieces.whole() for id, pieces in found.pieces.items()} == {"b": True, "c": True}
    assert (found.short, found.lacking, found.unplaced) == (PIECES, 2 * PIECES, 0)


def test_memory_that_is_reserved_for_ranks_is_not_free() -> None:
    among = nodes(a=3 * SIZE, b=2 * SIZE)
    assert place([version()], among, {"a": 2 * SIZE}, NO_STORE)[VERSION].pieces == {"b": ALL}


def test_nodes_that_hold_pieces_those_of_the_last_plan_and_readers_come_first() -> None:
    held = Bitmap.of(PIECES, [0, 1])
    assert placed(version(rows={"a": held}), nodes(a=SIZE, b=3 * SIZE)).pieces == {"a": ALL}
    planned = nodes(b=3 * SIZE, c=2 * SIZE) | {"a": node(id="a", replicas={VERSION: ALL})}
    assert placed(version(rows={"c": held}), planned).pieces == {"c": held, "a": ALL - held}
    reads = nodes(a=SIZE, b=3 * SIZE) | {"c": node(2 * SIZE, id="c", caller="dns:c@1.2.3.4")}
    assert placed(version(readers={"dns:c"}), reads).pieces == {"c": ALL}


def test_what_the_daemon_fetches_is_short_and_needs_no_further_node() -> None:
    assert placed(version(), nodes(a=SIZE), ReplicaRules(1)) == ReplicaPlacement({}, PIECES, PIECES, 0)
    own = Bitmap.of(PIECES, [0, 1])
    found = placed(version(rows={DAEMON: own}), nodes(a=SIZE))
    assert (found.pieces, found.short, found.unplaced) == ({"a": ALL - own}, PIECES - 2, 0)


def test_what_ranks_wrote_on_a_node_counts_before_ready_and_gets_no_second_copy_there() -> None:
    wrote = {"a": Bitmap.of(PIECES, [0, 1, 2])}
    found = placed(version(waits=True, written=wrote, rows=wrote), nodes(a=9 * SIZE, b=SIZE), ReplicaRules(2, hold=False))
    assert found.pieces == {"a": ALL - wrote["a"], "b": ALL}
    assert (found.lacking, found.unplaced) == (3 + 2 * 2, 0)
    ready = placed(version(written=wrote, rows=wrote), nodes(a=9 * SIZE, b=SIZE))
    assert ready.pieces == {"a": ALL}, "READY, they are a copy like any other"


def test_held_pieces_suffice_and_nothing_moves() -> None:
    halves = {"a": Bitmap.of(PIECES, [0, 1]), "b": Bitmap.of(PIECES, [2, 3, 4]), "c": ALL}
    found = placed(version(rows=halves), nodes(**dict.fromkeys("abcd", SIZE)), ReplicaRules(2, hold=False))
    assert found.pieces == halves
    assert (found.short, found.unplaced) == (0, 0)


@pytest.mark.parametrize("gone", [{"lost": True}, {"drained": True}])
def test_a_node_that_is_lost_or_leaves_counts_for_nothing(gone: dict[str, bool]) -> None:
    among = {"a": node(id="a", **gone)} | nodes(b=SIZE)
    assert placed(version(rows={"a": ALL}), among).pieces == {"b": ALL}


def test_until_nodes_have_reported_a_ready_version_stays_where_it_is() -> None:
    held, rules = Bitmap.of(PIECES, [0]), ReplicaRules(1, hold=False, settled=False)
    found = placed(version(rows={"a": held}), nodes(a=SIZE, b=SIZE), rules)
    assert found.pieces == {"a": held}
    assert (found.short, found.unplaced) == (PIECES - 1, PIECES - 1)
    assert placed(version(waits=True, rows={"a": held}), nodes(a=SIZE), rules).pieces == {"a": ALL}


def test_a_node_that_failed_gets_pieces_if_no_other_has_room() -> None:
    rules = ReplicaRules(1, hold=False, failing={(VERSION, "a"): "no memory"})
    assert placed(version(), nodes(a=9 * SIZE, b=SIZE), rules).pieces == {"b": ALL}
    assert placed(version(), nodes(a=9 * SIZE, b=0), rules).pieces == {"a": ALL}


def test_a_version_is_spread_over_nodes_that_are_too_small_for_it_and_newer_ones_come_first() -> None:
    among = nodes(a=3 * PIECE_BYTES, b=3 * PIECE_BYTES)
    found = place([version(), version(NEWER)], among, {}, NO_STORE)
    assert found[NEWER].unplaced == 0
    assert found[VERSION].unplaced == PIECES - sum(map(len, found[VERSION].pieces.values())) > 0
    waits = place([version(waits=True), version(NEWER)], among, {}, NO_STORE)
    assert (waits[VERSION].unplaced, waits[NEWER].unplaced > 0) == (0, True)


@given(st.data())
def test_no_node_takes_more_than_its_memory_and_no_piece_has_more_holders_than_needed(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from("abcdef"), unique=True))
    bitmaps = st.sets(st.integers(0, PIECES - 1)).map(lambda pieces: Bitmap.of(PIECES, pieces))
    rules = ReplicaRules(data.draw(st.integers(0, 3)), hold=False, settled=data.draw(st.booleans()))
    held = {id: data.draw(bitmaps) for id in ids if data.draw(st.booleans())}
    among = {id: node(data.draw(st.integers(0, 2 * SIZE)), id=id) for id in ids}
    found = placed(version(rows=held), among, rules)
    assert placed(version(rows=held), dict(reversed(among.items())), rules) == found, "the order of the nodes does not matter"
    for id, pieces in found.pieces.items():
        assert NUMBERING.size_of(pieces) <= among[id].report.capacity_bytes
        assert rules.settled or not len(pieces - held.get(id, NONE))
    counts = sum((pieces.flags().astype(int) for pieces in found.pieces.values()), np.zeros(PIECES, int))
    assert (counts <= rules.replicas).all()
    assert found.unplaced == (counts < rules.replicas).sum()
    assert found.unplaced <= found.short


def test_a_shortage_says_which_nodes_cannot_help() -> None:
    among = {"a": node(id="a", drained=True), "b": node(id="b", lost=True), "c": node(0, id="c")}
    rules = ReplicaRules(1, hold=False, failing={(VERSION, "c"): "no memory", (NEWER, "a"): "another version's"})
    assert shortage(version(), placed(version(), among, rules), among, rules) == (
        "5 of 5 pieces have fewer than 1 holders, and no node is left for 5 of them among 2 live ones; nodes/a: drained; "
        "nodes/c: no memory"
    )
    assert shortage(version(), ReplicaPlacement(short=2, lacking=2), among, rules) == "2 of 5 pieces have fewer than 1 holders"


def test_a_version_is_late_until_its_pieces_have_holders_and_its_homes_say_so() -> None:
    half = Bitmap.of(PIECES, [0, 1])
    waits = version(waits=True, written={"a": half}, rows={"a": half})
    short = {VERSION: ReplicaPlacement(short=3, lacking=4)}
    assert late([waits], short, nodes(a=SIZE), NO_STORE) == (5, "3 of 5 pieces have fewer than 1 holders")
    silent = (1, "nodes/a does not hold what ranks have written there")
    assert late([waits], {}, nodes(a=SIZE), NO_STORE) == silent
    assert late([waits], {}, {}, NO_STORE) == silent
    for held, expected in ((Bitmap.of(PIECES, [0]), silent), (half, (0, "")), (ALL, (0, ""))):
        says = {"a": node(copies=[node_pb2.NodeVersion(version=VERSION, held=held.to_bytes())])}
        assert late([waits], {VERSION: ReplicaPlacement()}, says, NO_STORE) == expected


def wanting(*names: str, capacity: int, **given: Any) -> KnownNode:
    found = node(capacity, **given)
    for name in names:
        found.want(name, {"server"}, ALL)
    return found


def test_a_node_holds_what_it_alone_has_and_replicas_and_the_last_requests_that_fit() -> None:
    numberings = dict.fromkeys(["v1", "v2", "v3"], NUMBERING)
    all_three = wanting("v1", "v2", "v3", capacity=2 * SIZE)
    assert chosen(all_three, numberings, (), 0) == ["v3", "v2"]
    assert chosen(all_three, numberings, {"v1"}, 0) == ["v1", "v3"]
    assert chosen(all_three, numberings, (), SIZE) == ["v3"]
    assert chosen(wanting("v1", capacity=0), numberings, (), 0) == ["v1"], "one version, whatever its size"
    replica = wanting("v2", "v3", capacity=2 * SIZE, replicas={"v1": ALL})
    assert chosen(replica, numberings, (), 0) == ["v1", "v3"]
    assert chosen(wanting("v2", "v3", capacity=9 * SIZE, drained=True), numberings, {"v2"}, 0) == ["v2"]
    assert chosen(all_three, {}, (), 0) == [], "no version that is gone"


def test_orders_have_a_new_revision_if_what_is_needed_changes_and_not_for_the_next_pieces() -> None:
    def orders(**given: Any) -> node_pb2.NodeOrders:
        made = {"version": VERSION, "wanted": ALL.to_bytes(), "readers": ["x"]} | given
        return node_pb2.NodeOrders(lease_seconds=1, versions=[node_pb2.NodeOrder(**made)])

    before = revision_of(orders(), [])
    assert before
    peers = [node_pb2.NodePeer(node="nodes/a", held=b"\1")]
    assert revision_of(orders(peers=peers, granted=[1]), []) == before
    drained = orders()
    drained.drained = True
    asked = orders()
    asked.snapshots.add(model="policy", revision=2)
    changed = [
        revision_of(orders(wanted=NONE.to_bytes()), []),
        revision_of(orders(version=NEWER), []),
        revision_of(orders(readers=["y"]), []),
        revision_of(orders(), [(VERSION, 3.0)]),
        revision_of(drained, []),
        revision_of(asked, []),
    ]
    assert len({before, *changed}) == 7
