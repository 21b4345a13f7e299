"""The table of vLLM releases, and the pages that name them, agree with the results of the tests."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.release_results import FEATURES, Outcome, is_whole, write
from tools import releases_table
from tools.releases_table import PLUGIN, files, named, on_cpus, results

RELEASE = {"vllm": "0.30.0", "torch": "2.13.0+cpu"}


def features(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "0.30.0.json").read_text())["features"]
    return found


@pytest.mark.skipif(not results(), reason="no run has written tests/vllm/releases yet")
def test_the_table_the_pages_and_the_plugins_list_are_those_of_the_runs() -> None:
    for path, text in files().items():
        assert path.read_text() == text, "run `make docs-releases`"
        assert named() in text or path == PLUGIN, path


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


def test_a_run_of_all_tests_replaces_what_was_known(tmp_path: Path) -> None:
    write(tmp_path, RELEASE, {"a": Outcome("boot", "failed"), "b": Outcome("sleep", "passed")}, whole=True)
    write(tmp_path, RELEASE, {"a": Outcome("boot", "passed"), "c": Outcome("boot", "skipped", "no MLA")}, whole=True)
    assert features(tmp_path) == {"boot": {"passed": 1, "failed": [], "skipped": {"no MLA": 1}}}


def test_a_run_of_some_tests_counts_those_that_failed_before_or_fail_now(tmp_path: Path) -> None:
    first = {name: Outcome("boot", "passed") for name in "ab"} | {name: Outcome("boot", "failed") for name in "cd"}
    write(tmp_path, RELEASE, first, whole=True)
    again = {"a": Outcome("boot", "passed"), "b": Outcome("boot", "failed"), "c": Outcome("boot", "passed")}
    write(tmp_path, RELEASE, again, whole=False)
    assert features(tmp_path) == {"boot": {"passed": 2, "failed": ["d", "b"], "skipped": {}}}
    write(tmp_path, RELEASE, {"d": Outcome("boot", "passed"), "b": Outcome("boot", "skipped", "no MLA")}, whole=False)
    assert features(tmp_path) == {"boot": {"passed": 3, "failed": [], "skipped": {"no MLA": 1}}}


def test_a_release_is_tested_when_every_feature_is_shown_and_nothing_failed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(releases_table, "RELEASES", tmp_path)
    shown = {feature: Outcome(feature, "passed") for feature in FEATURES}
    write(tmp_path, RELEASE, shown, whole=True)
    write(tmp_path, RELEASE | {"vllm": "0.31.0"}, shown | {"b": Outcome("boot", "failed")}, whole=True)
    write(tmp_path, RELEASE | {"vllm": "0.32.0"}, {"b": Outcome("boot", "passed")}, whole=True)
    assert on_cpus() == [(0, 30)]
    table = releases_table.table()
    assert "| 0.31.0 | 2.13.0 | 1 passed, **1 failed** | 1 passed" in table
    assert "| 0.32.0 | 2.13.0 | 1 passed | – |" in table
