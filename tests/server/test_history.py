"""The history of a store over its rotation."""

import json
from dataclasses import asdict
from pathlib import Path

from resharder.server.state.version import RETIRED, VersionRecord
from resharder.server.store.history import History, read_history

COUNT, MAX_BYTES = 100, 4000


def record(number: int) -> VersionRecord:
    return VersionRecord("policy", number, RETIRED, 1, number, "j", size_bytes=1, tensor_count=1, create_time=1.0)


def test_a_full_file_is_rotated_and_both_are_read_oldest_first(tmp_path: Path) -> None:
    history = History(tmp_path, MAX_BYTES)
    for number in range(COUNT):
        history.add(record(number))
    history.close()
    found = [each.number for each in read_history(tmp_path)]
    line = (tmp_path / "history.jsonl").stat().st_size // len((tmp_path / "history.jsonl").read_bytes().splitlines())
    assert found == [*range(found[0], COUNT)]
    assert len(found) >= MAX_BYTES // line
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2 * (MAX_BYTES + line)


def test_a_line_that_a_power_cut_put_together_from_parts_of_others_is_no_version(tmp_path: Path) -> None:
    history = History(tmp_path, MAX_BYTES)
    for number in (1, 2, 3):
        history.add(record(number))
    history.close()
    file = tmp_path / "history.jsonl"
    content = file.read_text()
    file.write_text(
        content.replace('"number": 2', '"number": 7') + content.splitlines()[0].replace(', "crc32"', ', "other"') + "\n"
    )
    assert [each.number for each in read_history(tmp_path)] == [1, 3, 1]


def test_lines_of_releases_that_wrote_no_checksums_are_read(tmp_path: Path) -> None:
    fields = {name: value for name, value in asdict(record(4)).items() if name != "slots"}
    (tmp_path / "history.jsonl").write_text(json.dumps(fields) + "\n")
    assert list(read_history(tmp_path)) == [record(4)]
