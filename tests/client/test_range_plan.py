"""Which HTTP ranges boxes need: pure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharder.client.versions import range_plan
from resharder.client.versions.range_plan import FileRange, plan_ranges
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Range, TensorSpec, box_size, full_box, run_start
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.converters.wire.ranges import MOST_BYTES, PIECE_BYTES, FilePart, is_piece, parse_part, path_of

SPECS = [TensorSpec(f"t{i}", "BF16", (64, 96 + i)) for i in range(6)]
FILES = lay_out(SPECS, max_file_bytes=40_000)


@st.composite
def boxes(draw: st.DrawFn) -> list[tuple[str, Box]]:
    chosen = []
    for spec in draw(st.lists(st.sampled_from(SPECS), max_size=8)):
        box = []
        for n in spec.shape:
            start = draw(st.integers(0, n - 1))
            box.append(draw(st.sampled_from([Range(0, n), Range(start, draw(st.integers(1, n - start)))])))
        chosen.append((spec.name, tuple(box)))
    return chosen


def place(name: str) -> tuple[int, FileLayout, int]:
    return next((i, file, file.by_name[name].offset) for i, file in enumerate(FILES) if name in file.by_name)


@settings(max_examples=40)
@given(boxes(), st.integers(1, 5000), st.integers(0, 3000))
def test_every_contiguous_box_is_covered_by_its_ranges_and_the_others_are_streamed(
    wanted: list[tuple[str, Box]], piece: int, gap: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_plan, "PIECE_BYTES", piece)
        patch.setattr(range_plan, "MOST_GAP", gap)
        plan = plan_ranges(FILES, wanted)
    assert list(plan.ranges) == sorted(plan.ranges)
    covered: dict[int, set[int]] = {}
    for file, start, end in plan.ranges:
        assert start < end <= FILES[file].size
        assert start // piece == (end - 1) // piece
        assert not covered.setdefault(file, set()) & set(range(start, end))
        covered[file] |= set(range(start, end))
    needed: dict[int, set[int]] = {}
    for position, (name, box) in enumerate(wanted):
        file, layout, offset = place(name)
        spec = layout.by_name[name].spec
        start = run_start(box, spec)
        assert (position in plan.streamed) == (start is None)
        if start is None:
            continue
        own = range(offset + start, offset + start + box_size(box) * ITEM_SIZES[spec.dtype])
        ranges = [plan.ranges[number] for number in plan.of_box[position]]
        assert set(own) <= {byte for each in ranges for byte in range(each.start, each.end)}
        assert all(each.file == file and each.start < own.stop and each.end > own.start for each in ranges)
        needed.setdefault(file, set()).update(own)
    for file, bytes_ in covered.items():
        for byte in bytes_ - needed[file]:  # only between two parts that are close
            assert {byte - i for i in range(1, gap + 1)} & needed[file]
            assert {byte + i for i in range(1, gap + 1)} & needed[file]


def test_a_whole_version_is_read_in_whole_pieces_but_for_its_first() -> None:
    specs = [TensorSpec("a", "BF16", (3 * PIECE_BYTES // 2, 1)), TensorSpec("b", "BF16", (PIECE_BYTES // 4, 1))]
    (file,) = lay_out(specs)
    plan = plan_ranges([file], [(spec.name, full_box(spec.shape)) for spec in specs])
    assert [is_piece(start, end, file.size) for _, start, end in plan.ranges] == [False, True, True, True]
    assert plan.ranges[0] == FileRange(0, len(file.header), PIECE_BYTES)
    assert plan.of_box == (range(0, 4), range(3, 4))


def test_a_request_names_a_part_as_the_reader_writes_it() -> None:
    path = path_of("models/policy/versions/7", "model-00001-of-00002.safetensors")
    assert parse_part(path, "bytes=5-9") == FilePart("policy", 7, "model-00001-of-00002.safetensors", 5, 10)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/models/policy/versions/1/../../claim.json", "bytes=0-1"),
        ("/models/policy/versions/1/a%2fb", "bytes=0-1"),
        ("/models/policy/versions/x/a", "bytes=0-1"),
        ("/models/policy/versions/1/a", ""),
        ("/models/policy/versions/1/a", "bytes=0-"),
        ("/models/policy/versions/1/a", "bytes=-5"),
        ("/models/policy/versions/1/a", "bytes=0-1,4-5"),
        ("/models/policy/versions/1/a", "bytes=5-4"),
        ("/models/policy/versions/1/a", f"bytes=0-{MOST_BYTES}"),
        ("/models/policy/versions/1/a", "bytes=0-1\n"),
    ],
)
def test_a_request_for_anything_else_is_refused(path: str, asked: str) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_part(path, asked)
