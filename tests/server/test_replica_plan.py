"""The choice of nodes for replicas: bounds that hold for any nodes, and the order of the choice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.pieces import Bitmap, PieceNumbering
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.nodes.placement import ReplicaNeed, place

PIECES = 5
NUMBERING = PieceNumbering([("a", 3 * PIECE_BYTES), ("b", PIECE_BYTES + 1)])
SIZE = NUMBERING.total
VERSION = "models/policy/versions/1"


def need(holders: int, version: str = VERSION, **given: object) -> ReplicaNeed:
    return ReplicaNeed(version, NUMBERING, np.full(PIECES, holders, np.int64), **{"held": {}, "coming": Bitmap(PIECES)} | given)  # type: ignore[arg-type]


def test_pieces_go_to_the_nodes_with_the_most_free_memory() -> None:
    found = place([need(2)], {"a": SIZE, "b": 3 * SIZE, "c": 2 * SIZE})[VERSION]
    assert {id: pieces.whole() for id, pieces in found.pieces.items()} == {"b": True, "c": True}
    assert (found.short, found.lacking, found.unplaced) == (PIECES, 2 * PIECES, 0)


def test_nodes_that_hold_pieces_and_those_of_the_last_plan_come_first() -> None:
    held, free = Bitmap.of(PIECES, [0, 1]), {"a": SIZE, "b": 3 * SIZE, "c": 2 * SIZE}
    assert place([need(1, held={"a": held})], free)[VERSION].pieces == {"a": Bitmap.full(PIECES)}
    assert place([need(1, held={"c": held}, former=["a"])], free)[VERSION].pieces == {
        "c": held, "a": Bitmap.full(PIECES) - held,
    }  # fmt: skip
    assert place([need(1, readers=["c"])], free)[VERSION].pieces == {"c": Bitmap.full(PIECES)}


def test_what_the_daemon_fetches_is_short_and_needs_no_further_node() -> None:
    coming = Bitmap.of(PIECES, [0, 1])
    found = place([need(1, coming=coming)], {"a": SIZE})[VERSION]
    assert found.pieces == {"a": Bitmap.full(PIECES) - coming}
    assert (found.short, found.lacking, found.unplaced) == (PIECES, PIECES, 0)


def test_held_pieces_suffice_and_nothing_moves() -> None:
    halves = {"a": Bitmap.of(PIECES, [0, 1]), "b": Bitmap.of(PIECES, [2, 3, 4]), "c": Bitmap.full(PIECES)}
    found = place([need(2, held=halves)], dict.fromkeys("abcd", SIZE))[VERSION]
    assert found.pieces == halves
    assert (found.short, found.unplaced) == (0, 0)


def test_a_barred_node_keeps_what_it_holds_and_gets_nothing() -> None:
    held = Bitmap.of(PIECES, [0])
    found = place([need(1, held={"a": held}, barred=["a"])], {"a": SIZE})[VERSION]
    assert found.pieces == {"a": held}
    assert (found.short, found.unplaced) == (PIECES - 1, PIECES - 1)


def test_a_node_that_failed_gets_pieces_if_no_other_has_room() -> None:
    assert place([need(1, failing=["a"])], {"a": 9 * SIZE, "b": SIZE})[VERSION].pieces == {"b": Bitmap.full(PIECES)}
    assert place([need(1, failing=["a"])], {"a": 9 * SIZE, "b": 0})[VERSION].pieces == {"a": Bitmap.full(PIECES)}


def test_a_version_is_spread_over_nodes_that_are_too_small_for_it_and_newer_ones_come_first() -> None:
    newer, older = need(1, "models/policy/versions/2"), need(1)
    free = {"a": 3 * PIECE_BYTES, "b": 3 * PIECE_BYTES}
    found = place([newer, older], free)
    assert found[newer.version].unplaced == 0
    assert found[older.version].unplaced == PIECES - sum(map(len, found[older.version].pieces.values())) > 0


@given(st.data())
def test_no_node_takes_more_than_its_memory_and_no_piece_has_more_holders_than_needed(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.sampled_from("abcdef"), unique=True))
    free = {id: data.draw(st.integers(0, 2 * SIZE)) for id in ids}
    bitmaps = st.sets(st.integers(0, PIECES - 1)).map(lambda pieces: Bitmap.of(PIECES, pieces))
    holders = data.draw(st.integers(0, 3))
    held = {id: data.draw(bitmaps) for id in ids if data.draw(st.booleans())}
    barred = {id for id in ids if data.draw(st.booleans())}
    needs = [need(holders, held=held, barred=barred)]
    found = place(needs, free)[VERSION]
    assert place(needs, dict(reversed(free.items()))) == {VERSION: found}, "the order of the nodes does not matter"
    for id, pieces in found.pieces.items():
        assert NUMBERING.size_of(pieces) <= free[id]
        assert id not in barred or not len(pieces - held.get(id, Bitmap(PIECES)))
    counts = sum((pieces.flags().astype(int) for pieces in found.pieces.values()), np.zeros(PIECES, int))
    assert (counts <= holders).all()
    assert found.unplaced == (counts < holders).sum()
    assert found.unplaced <= found.short
