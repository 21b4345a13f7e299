"""docs/guarantees.md: each promise names tests, and each that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
ROWS = [line.split(" | ") for line in re.findall(r"^\| (.+) \|$", PAGE, re.MULTILINE)]


def named(cell: str) -> list[Path]:
    """The files and folders that a cell names; a file alone is in the folder of the one before it."""
    found, folder = list[Path](), Path("tests")
    for name in re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py|tests/\w+)`", cell):
        path = Path(name) if "/" in name else folder / name
        folder = path.parent if path.suffix else path
        found.append(path)
    return found


def test_every_promise_names_tests_that_are_there() -> None:
    promises = [(cells[0], named(cells[-1])) for cells in ROWS if "test_" in cells[-1]]
    assert len(promises) > 40
    assert [promise for promise, paths in promises if not paths] == []
    missing = [str(path) for _, paths in promises for path in paths if not (ROOT / path).exists()]
    assert missing == []
