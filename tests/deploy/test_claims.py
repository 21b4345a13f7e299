"""The package's metadata and the first pages name the releases of Python and megatron-core that the tests run with."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from resharder.converters.models.megatron.release import TESTED

from tools.parts import MEGATRON, REST

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CLAIMED = re.findall(r"Programming Language :: Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)


def setting(name: str) -> str:
    """Return the value of a variable of the Makefile."""
    found = re.search(rf"^{name} \??:?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_each_python_of_the_metadata_is_that_of_the_tests_or_has_a_run_of_its_own() -> None:
    oldest = setting("PYTHON").removeprefix("python")
    assert CLAIMED[0] == oldest
    assert PROJECT["requires-python"] == f">={oldest}"
    runs = {word.removeprefix("VERSION=") for part in REST if "test-python" in part.command for word in part.command}
    assert set(CLAIMED) <= runs | {oldest}


@pytest.mark.parametrize("page", ["README.md", "docs/install.md", "docs/start.md"])
def test_the_first_pages_name_the_pythons_of_the_metadata(page: str) -> None:
    ((first, last),) = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / page).read_text())
    assert [f"3.{minor}" for minor in range(int(first), int(last) + 1)] == CLAIMED


def test_the_extra_takes_the_releases_of_megatron_core_that_layouts_are_tested_with_and_no_later_one() -> None:
    (found,) = (each for each in map(Requirement, PROJECT["optional-dependencies"]["megatron"]) if each.name == "megatron-core")
    major, newest = map(int, TESTED[-1].split("."))
    assert found.specifier == SpecifierSet(f">={TESTED[0]},<{major}.{newest + 1}")
    assert found.specifier.contains(setting("MEGATRON"))
    assert found.specifier.contains(MEGATRON), "the newest that has a run of its own"


@pytest.mark.parametrize("page", ["README.md", "docs/reference/trainer.md"])
def test_the_pages_name_the_releases_of_megatron_core_that_the_extra_takes(page: str) -> None:
    named = re.findall(r"megatron-core,? (0\.\d+) to (0\.\d+)", (ROOT / page).read_text())
    assert {*named} == {(TESTED[0], TESTED[-1])}
