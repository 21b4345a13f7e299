"""Journal files: rotation by size, lines that were cut short, and appends after a close."""

from pathlib import Path

from resharder.server.infra.journal import JournalFile, read_records


def numbers(path: Path) -> list[int]:
    return list(read_records(path, lambda content: int(content["number"])))


def test_a_file_beyond_its_bytes_is_rotated_before_the_next_line(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "x.jsonl", max_late=10, max_bytes=30)
    for number in range(5):
        journal.append({"number": number})
    assert (numbers(journal.older), numbers(journal.path)) == ([0, 1, 2], [3, 4])


def test_a_line_that_was_cut_short_costs_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"number": 1}\n{"num')
    JournalFile(path, max_late=10).append({"number": 2})
    assert numbers(path) == [1, 2]


def test_an_append_opens_a_closed_file_again(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "x.jsonl", max_late=10)
    journal.append({"number": 1})
    journal.close()
    journal.append({"number": 2})
    assert numbers(journal.path) == [1, 2]
