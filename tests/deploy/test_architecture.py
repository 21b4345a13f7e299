"""The pages about the tree name files that exist, and the tree keeps to its bounds."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:client|server|converters)/[\w/.]+)`")
SOURCES = [path for side in ("client", "server", "converters") for path in (ROOT / side).rglob("*.py")]


@pytest.mark.parametrize("page", ["one-tensor.md", "architecture.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 10
    folders = {path: (ROOT / path.partition("/")[0] / "resharder", ROOT / "tests", ROOT) for path in named}
    assert [path for path in named if not any((folder / path).exists() for folder in folders[path])] == []


def test_every_folder_says_what_it_is_for() -> None:
    packages = {path.parent for path in SOURCES} - {ROOT / side / "resharder" / side for side in ("server", "converters")}
    without = [folder for folder in packages if not (folder / "__init__.py").read_text().startswith('"""')]
    assert without == []
