"""The tables of releases of vLLM and megatron-core, and the pages that name them, agree with the results of the tests."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.converters.models.megatron.release import TESTED

from tests.support.release_results import MEGATRON, VLLM, Component, Outcome, is_whole, write
from tools.releases_table import NAMING, files, named, on_cpus, results, table

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
