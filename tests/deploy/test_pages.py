"""Rules for every page of the documentation."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("deploy/**/*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_a_page_installs_from_a_checkout_or_a_wheel_not_by_a_name_that_no_index_has(page: Path) -> None:
    assert re.findall(r"pip install[^`\n]*?['\" ]resharder\b.*", page.read_text()) == []


def test_no_page_has_a_merge_that_was_left_open() -> None:
    found = [page.name for page in PAGES if re.search(r"^(<<<<<<<|=======|>>>>>>>)( |$)", page.read_text(), re.M)]
    assert found == []


def test_the_pages_of_a_contributor_are_not_among_the_guides() -> None:
    (contributing,) = re.findall(r"^  - Contributing:\n(.*?)(?=^  - |\Z)", (ROOT / "mkdocs.yml").read_text(), re.M | re.S)
    named = {"architecture.md", "one-tensor.md", "protocol.md", "adding-a-family.md", "robustness.md"}
    assert {page for page in named if f": {page}\n" not in contributing} == set()
