"""Numbers and bitmaps of pieces, and the daemon's table of them, on random histories."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.pieces import MOST_PIECES, Bitmap, PieceNumbering, piece_bytes_for
from resharder.converters.wire.ranges import PIECE_BYTES, is_piece
from resharder.server.nodes.pieces import PieceTable

VERSION = "models/policy/versions/1"
sizes = st.lists(st.integers(1, 5 * PIECE_BYTES), min_size=1, max_size=6)
sets = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)), st.sets(st.integers(0, n - 1))))


@given(sizes, st.sampled_from([1, 2, 4]))
def test_pieces_tile_every_byte_of_every_file_once(sizes: list[int], factor: int) -> None:
    files = [(f"f{i}", size) for i, size in enumerate(sizes)]
    numbering = PieceNumbering(files, factor * PIECE_BYTES)
    spans = [numbering.span(piece) for piece in range(numbering.count)]
    for name, size in files:
        mine = [span for span in spans if span.file == name]
        assert [span.start for span in mine] == list(range(0, size, factor * PIECE_BYTES))
        assert [span.end for span in mine] == [min(span.start + factor * PIECE_BYTES, size) for span in mine]
        for start, end in [(0, 1), (size - 1, size), (size // 3, size), (0, size)]:
            touched = [p for p, s in enumerate(spans) if s.file == name and s.start < end and start < s.end]
            assert list(numbering.touched(name, start, end)) == touched


@given(sizes)
def test_each_part_of_a_piece_is_one_that_has_a_checksum(sizes: list[int]) -> None:
    numbering = PieceNumbering([(f"f{i}", size) for i, size in enumerate(sizes)], 2 * PIECE_BYTES)
    for piece in range(numbering.count):
        whole, parts = numbering.span(piece), list(numbering.parts(piece))
        assert [part.start for part in parts[1:]] == [part.end for part in parts[:-1]]
        assert (parts[0].start, parts[-1].end) == (whole.start, whole.end)
        assert all(is_piece(part.start, part.end, sizes[int(part.file[1:])]) for part in parts)


@given(st.integers(1, 1 << 44))
def test_a_version_of_any_size_has_a_bounded_number_of_pieces(total: int) -> None:
    length = piece_bytes_for(total)
    assert -(-total // length) <= MOST_PIECES
    assert length == PIECE_BYTES or -(-total // (length // 2)) > MOST_PIECES


def test_numbers_and_files_that_a_version_does_not_have_are_refused() -> None:
    numbering = PieceNumbering([("a", 3), ("b", 4)])
    with pytest.raises(ValueError, match="expected a piece of 0 to 1, got 2"):
        numbering.span(2)
    with pytest.raises(ValueError, match="one of 2 files"):
        numbering.touched("c", 0, 1)
    with pytest.raises(ValueError, match="expected a piece of 0 to 1, got -1"):
        Bitmap.of(2, [-1])


@given(sets)
def test_a_bitmap_is_the_set_of_its_pieces(drawn: tuple[int, set[int], set[int]]) -> None:
    count, a, b = drawn
    first, second = Bitmap.of(count, a), Bitmap.of(count, b)
    assert Bitmap.from_bytes(count, first.to_bytes()) == first
    assert (set(first), len(first), first.whole()) == (a, len(a), len(a) == count)
    assert (set(first | second), set(first & second), set(first - second)) == (a | b, a & b, a - b)
    assert set(first.missing()) == set(range(count)) - a
    assert [piece in first for piece in range(count)] == [piece in a for piece in range(count)]


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0\x08"])
def test_bytes_of_another_number_of_pieces_are_no_bitmap(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected 2 bytes with bits for 11 pieces"):
        Bitmap.from_bytes(11, data)


NODES = ["a", "b", "c", "d", "e", "f"]
pieces = st.sets(st.integers(0, 10))
steps = st.lists(st.tuples(st.booleans(), st.sampled_from(NODES), pieces), max_size=30)


@given(steps)
def test_the_table_has_the_pieces_that_nodes_reported_last_and_no_others(history: list[tuple[bool, str, set[int]]]) -> None:
    table, model, seen = PieceTable(), dict[str, set[int]](), set[int]()
    table.add_version(VERSION, 11)
    for gone, node, drawn in history:
        if gone:
            table.remove_node(node)
            model.pop(node, None)
        else:
            table.report(VERSION, node, Bitmap.of(11, drawn))
            model[node] = drawn
            seen |= drawn
    holders = [{node for node, held in model.items() if piece in held} for piece in range(11)]
    assert all(set(table.bitmap(VERSION, node)) == model.get(node, set()) for node in NODES)
    assert set(table.scarce(VERSION)) == {piece for piece in range(11) if len(holders[piece]) == 1}
    assert set(table.orphans(VERSION)) == {piece for piece in seen if not holders[piece]}
    assert table.lacking("a") == ([VERSION] if len(model.get("a", set())) < 11 else [])
    more = {(a, b) for a in NODES for b in NODES if model.get(a, set()) - model.get(b, set())}
    assert {(a, b) for a in NODES for b in NODES if table.has_more(VERSION, a, b)} == more


def test_after_a_restart_no_piece_is_lost_until_its_nodes_have_reported_or_are_gone() -> None:
    table = PieceTable()
    table.add_version(VERSION, 3, ready=True, awaited=["a", "b"])
    table.report(VERSION, "a", Bitmap.of(3, [0]))
    assert (set(table.orphans(VERSION)), table.settle(1.0, {}, 10.0)) == ({1, 2}, [])
    table.remove_node("b")
    assert table.settle(2.0, {"a": 0.0}, 10.0) == []
    assert table.doubts() == [(VERSION, 2.0)]
    assert table.settle(3.0, {"a": 2.5}, 10.0) == [(VERSION, "neither the daemon nor a node holds 2 of 3 pieces")]
    table.report(VERSION, "c", Bitmap.of(3, [1, 2]))
    assert (table.settle(4.0, {"a": 2.5}, 10.0), table.doubts()) == ([], [])


def test_a_version_whose_last_copy_of_a_piece_goes_is_in_doubt_and_others_are_not() -> None:
    table, other = PieceTable(), "models/policy/versions/2"
    for version in (VERSION, other):
        table.add_version(version, 2)
        table.report(version, "a", Bitmap.full(2))
    table.report(other, "b", Bitmap.full(2))
    table.remove_node("a")
    assert table.settle(1.0, {"b": 0.0}, 10.0) == []
    assert table.doubts() == [(VERSION, 1.0)]


def test_a_bitmap_of_another_version_is_refused() -> None:
    table = PieceTable()
    table.add_version(VERSION, 3)
    with pytest.raises(ValueError, match="expected a bitmap of the 3 pieces"):
        table.report(VERSION, "a", Bitmap.full(9))
    table.drop_version(VERSION)
    assert VERSION not in table
    assert table.nbytes == 0
