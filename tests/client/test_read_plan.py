"""Which HTTP ranges and windows boxes need: pure."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resharder.client.versions import read_plan
from resharder.client.versions.read_plan import FileRange, plan_reads
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, box_size, full_box
from resharder.converters.geometry.rows import box_rows
from resharder.converters.storage.files import FileLayout, lay_out
from resharder.converters.wire import windows as windows_module
from resharder.converters.wire.chunk_body import boxes_header, parse_boxes
from resharder.converters.wire.ranges import MOST_BYTES, PIECE_BYTES, FilePart, is_piece, parse_part, path_of
from resharder.converters.wire.windows import BoxPart, boxes_request, cut_windows

SPECS = [TensorSpec(f"t{i}", "BF16", (16, 24 + i)) for i in range(6)]
FILES = lay_out(SPECS, max_file_bytes=2500)


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


def bytes_of(name: str, box: Box) -> tuple[int, set[int]]:
    """The file of a box, and the positions of its bytes there."""
    file, layout, offset = place(name)
    spec = layout.by_name[name].spec
    items = np.arange(spec.size // 2).reshape(spec.shape)[box_index(box)].reshape(-1)
    return file, {offset + 2 * int(item) + byte for item in items for byte in (0, 1)}


@settings(max_examples=40, deadline=None)
@given(boxes(), st.integers(1, 1500), st.integers(0, 800), st.sampled_from([16, 1 << 20]), st.integers(50, 2000))
def test_every_box_comes_whole_by_ranges_or_by_windows(
    wanted: list[tuple[str, Box]], piece: int, gap: int, long_run: int, window: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE_BYTES": piece, "MOST_GAP": gap, "LONG_RUN": long_run}.items():
            patch.setattr(read_plan, name, value)
        patch.setattr(windows_module, "WINDOW_BYTES", window)
        plan = plan_reads(FILES, wanted)
    ranges = [job for job in plan.jobs if isinstance(job, FileRange)]
    windows = [job for job in plan.jobs if not isinstance(job, FileRange)]
    assert plan.jobs == (*sorted(ranges), *windows)
    covered: dict[int, set[int]] = {}
    for file, start, end in ranges:
        assert start < end <= FILES[file].size
        assert start // piece == (end - 1) // piece
        assert not covered.setdefault(file, set()) & set(range(start, end))
        covered[file] |= set(range(start, end))
    asked: dict[int, set[int]] = {}
    for position, (name, box) in enumerate(wanted):
        jobs = [plan.jobs[number] for number in plan.of_box[position]]
        file, own = bytes_of(name, box)
        dense = len(own) >= 0.75 * (max(own) + 1 - min(own))
        spec = FILES[file].by_name[name].spec
        if dense or next(box_rows(box, spec)).length >= long_run:
            assert own <= {byte for job in jobs if isinstance(job, FileRange) for byte in range(job.start, job.end)}
            assert all(isinstance(job, FileRange) and job.file == file for job in jobs)
            asked.setdefault(file, set()).update(range(min(own), max(own) + 1) if dense else own)
        else:
            parts = [part for job in jobs for part in job if isinstance(part, BoxPart) and part.position == position]
            found = [byte for part in parts for byte in bytes_of(part.name, part.box)[1]]
            assert (sorted(found), {part.name for part in parts}) == (sorted(own), {name})
    for file, bytes_ in covered.items():
        for byte in bytes_ - asked[file]:  # only between two parts that are close
            assert {byte - i for i in range(1, gap + 1)} & asked[file]
            assert {byte + i for i in range(1, gap + 1)} & asked[file]
    assert all(sum(box_size(part.box) * 2 for part in job) <= window for job in windows)


def test_half_of_all_columns_are_packed_most_of_them_and_long_runs_are_ranges() -> None:
    specs = [TensorSpec("columns", "BF16", (64, 4096)), TensorSpec("experts", "BF16", (4, 2048, 1024))]
    files = lay_out(specs)
    columns = [(Range(0, 64), Range(start, count)) for start, count in ((0, 2048), (7, 3072))]
    rows = (Range(0, 4), Range(0, 1024), Range(0, 1024))
    plan = plan_reads(files, [("columns", columns[0]), ("columns", columns[1]), ("experts", rows)])
    assert plan.of_box[0] == range(len(plan.jobs) - 1, len(plan.jobs))
    assert plan.jobs[-1] == (BoxPart(0, "columns", columns[0]),)
    by_range = [job for job in plan.jobs[:-1] if isinstance(job, FileRange)]
    assert len(by_range) == len(plan.jobs) - 1
    assert sum(end - start for _, start, end in by_range) == 2 * (64 * 4096 - 7) + 4 * 1024 * 1024 * 2  # with the gap between


@given(st.lists(st.tuples(st.text("äb", min_size=1, max_size=3000), st.integers(1, 1 << 40)), min_size=1, max_size=30))
@settings(max_examples=30, deadline=None)
def test_the_request_of_a_window_fits_into_its_header(tensors: list[tuple[str, int]]) -> None:
    specs = {name: TensorSpec(name, "U8", (2, size)) for name, size in tensors}
    parts = [BoxPart(i, name, (Range(0, 2), Range(size - 1, 1))) for i, (name, size) in enumerate(tensors)]
    specs |= {name: TensorSpec(name, "U8", (2, max(s for n, s in tensors if n == name))) for name in specs}
    windows = cut_windows(parts, specs)
    assert [part for window in windows for part in window] == parts
    for window in windows:
        header = boxes_header(boxes_request("", [(part.name, part.box) for part in window]))
        assert [box.box.start[1] for box in parse_boxes(header).boxes] == [part.box[1].start for part in window]


def test_a_whole_version_is_read_in_whole_pieces_but_for_its_first() -> None:
    specs = [TensorSpec("a", "BF16", (3 * PIECE_BYTES // 2, 1)), TensorSpec("b", "BF16", (PIECE_BYTES // 4, 1))]
    (file,) = lay_out(specs)
    plan = plan_reads([file], [(spec.name, full_box(spec.shape)) for spec in specs])
    assert [is_piece(job[1], job[2], file.size) for job in plan.jobs if isinstance(job, FileRange)] == [False, True, True, True]
    assert plan.jobs[0] == FileRange(0, len(file.header), PIECE_BYTES)
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
