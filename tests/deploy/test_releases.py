"""The tables of releases of vLLM and megatron-core, and the pages that name them, agree with the results of the tests."""

import ast
import json
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from resharder.converters.models.megatron.release import TESTED

from tests.support.release_results import MEGATRON, VLLM, Component, Outcome, is_whole, write
from tools.releases_table import NAMING, files, named, on_cpus, results, table

ROOT = Path(__file__).parents[2]
PACKAGES = packages_distributions()
RELEASE = {"vllm": "0.30.0", "python": "3.11.7", "torch": "2.13.0+cpu"}


def features(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "0.30.0.json").read_text())["features"]
    return found


@pytest.fixture
def vllm(tmp_path: Path) -> Component:
    return VLLM._replace(folder=tmp_path)


def test_the_tables_the_pages_and_the_plugins_list_are_those_of_the_runs() -> None:
    texts = files()
    for path, text in texts.items():
        assert path.read_text() == text, "run `make docs-releases`"
    assert not results(VLLM) or all(named() in texts[path] for path in NAMING)


def test_releases_of_megatron_core_that_were_run_are_supported_if_no_test_failed() -> None:
    recorded = {".".join(each["megatron-core"].split(".")[:2]) for each in results(MEGATRON)}
    assert recorded & set(TESTED) == {f"{major}.{minor}" for major, minor in on_cpus(MEGATRON)}


@pytest.mark.parametrize(
    ("options", "args", "whole"),
    [
        ({"lf": False}, ["tests/vllm"], True),
        ({}, ["tests/vllm"], True),
        ({"lf": True}, ["tests/vllm"], False),
        ({"keyword": "sleep"}, ["tests/vllm"], False),
        ({}, ["tests/vllm/test_fence.py"], False),
    ],
    ids=["all", "without pytest's cache", "those that failed before", "by name", "of a file"],
)
def test_a_run_is_of_all_tests_unless_some_are_chosen(options: dict[str, Any], args: list[str], whole: bool) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(**({"keyword": "", "maxfail": 0} | options)), args=args)
    assert is_whole(config) == whole


def test_a_run_of_all_tests_replaces_what_was_known(vllm: Component) -> None:
    write(vllm, RELEASE, {"a": Outcome("boot", "failed"), "b": Outcome("sleep", "passed")}, whole=True)
    write(vllm, RELEASE, {"a": Outcome("boot", "passed"), "c": Outcome("boot", "skipped", "no MLA")}, whole=True)
    assert features(vllm.folder) == {"boot": {"passed": 1, "failed": [], "skipped": {"no MLA": 1}}}


def test_a_run_of_some_tests_counts_those_that_failed_before_or_fail_now(vllm: Component) -> None:
    first = {name: Outcome("boot", "passed") for name in "ab"} | {name: Outcome("boot", "failed") for name in "cd"}
    write(vllm, RELEASE, first, whole=True)
    again = {"a": Outcome("boot", "passed"), "b": Outcome("boot", "failed"), "c": Outcome("boot", "passed")}
    write(vllm, RELEASE, again, whole=False)
    assert features(vllm.folder) == {"boot": {"passed": 2, "failed": ["d", "b"], "skipped": {}}}
    write(vllm, RELEASE, {"d": Outcome("boot", "passed"), "b": Outcome("boot", "skipped", "no MLA")}, whole=False)
    assert features(vllm.folder) == {"boot": {"passed": 3, "failed": [], "skipped": {"no MLA": 1}}}


def test_a_release_is_tested_when_every_feature_is_shown_and_nothing_failed(vllm: Component) -> None:
    assert table(vllm) == "No run has been recorded yet."
    shown = {feature: Outcome(feature, "passed") for feature in vllm.features}
    write(vllm, RELEASE, shown, whole=True)
    write(vllm, RELEASE | {"vllm": "0.31.0"}, shown | {"b": Outcome("boot", "failed")}, whole=True)
    write(vllm, RELEASE | {"vllm": "0.32.0"}, {"b": Outcome("boot", "passed")}, whole=True)
    assert on_cpus(vllm) == [(0, 30)]
    assert "| 0.31.0 | 3.11 | 2.13.0 | 1/2 **1 failed** | 1 |" in table(vllm)
    assert "| 0.32.0 | 3.11 | 2.13.0 | 1 | – |" in table(vllm)


def test_what_tests_of_the_engine_import_is_in_the_venv_of_a_release() -> None:
    """A release is collected with vLLM, the package and what the Makefile names, not with the `dev` group."""
    recipe = (ROOT / "Makefile").read_text().partition(".venv-vllm-%/.ready:")[2].partition("\n\n")[0]
    words = [word.strip("'") for line in recipe.splitlines() for word in line.partition("pip install -q ")[2].split()]
    wanted = [word.replace("$*", "0").replace(".[", "resharder[") for word in words if word != "-e"]
    installed = requirements(wanted)
    tests = ROOT / "tests"
    collected = [tests / "conftest.py", tests / "vllm" / "conftest.py", *(tests / "vllm").glob("test_*.py")]
    missing = {
        f"{module} (by {path.relative_to(ROOT)})"
        for path in reached(collected)
        for module in imports(path)
        if module in PACKAGES and not installed & {canonicalize_name(each) for each in PACKAGES[module]}
    }
    assert not missing


def requirements(wanted: list[str]) -> set[str]:
    """Return the distributions that these requirements bring, as installed here."""
    left, found = list(map(Requirement, wanted)), set[tuple[str, str]]()
    while left:
        requirement = left.pop()
        for extra in ("", *requirement.extras):
            key = canonicalize_name(requirement.name), extra
            if key in found:
                continue
            found.add(key)
            with suppress(PackageNotFoundError):
                needs = map(Requirement, requires(requirement.name) or ())
                left += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


def reached(paths: list[Path]) -> set[Path]:
    """Return the modules of `tests` and `tools` that these import when they are imported, themselves included."""
    left, found = list(paths), set[Path]()
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in imports(path, whole=True):
            if name.split(".")[0] in ("tests", "tools"):
                base = ROOT / name.replace(".", "/")
                left += [each for each in (base.with_suffix(".py"), base / "__init__.py") if each.exists()]
    return found


def imports(path: Path, *, whole: bool = False) -> set[str]:
    """Return the modules that a module names outside its functions and `if TYPE_CHECKING`, or their top-level packages."""
    names, left = set[str](), list[ast.AST](ast.parse(path.read_text()).body)
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        elif isinstance(node, ast.If | ast.Try | ast.With):
            left += ast.iter_child_nodes(node)
        elif isinstance(node, ast.ClassDef):
            left += node.body
    return names if whole else {name.split(".")[0] for name in names}
