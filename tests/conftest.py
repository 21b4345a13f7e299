"""Settings and fixtures of every test."""

import gc
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.tiers import TIERS, Guard, Reach

if TYPE_CHECKING:
    from resharder.client.trainer.publisher import Publisher

    from tests.support.daemon import Daemon

# The machines are noisy: how long an example takes, or to make one, says nothing.
settings.register_profile("resharder", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("resharder")

REACH, GUARD = Reach(), Guard()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect tests without the garbage collector, which would visit the 900,000 objects of their imports many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier; the costliest first, so that none of them is begun when all others are done."""
    wrong = []
    for item in items:
        given = [tier for tier in TIERS if item.get_closest_marker(tier)]
        kernels = ["process"] if item.get_closest_marker("gpu") else []  # Triton's compiler
        tier = max([tier_of(item), *given, *kernels], key=TIERS.index)
        if given and given[0] != tier:
            wrong.append(f"{item.nodeid} is marked {given[0]}, and it uses a rig of tier {tier}")
        item.add_marker(tier)
    if wrong:
        raise pytest.UsageError("\n".join(wrong))
    items.sort(key=lambda item: -max(TIERS.index(tier) for tier in TIERS if item.get_closest_marker(tier)))


def tier_of(item: pytest.Item) -> str:
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return REACH.tier([item.function, *(each.func for found in fixtures for each in found)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files go whole to a process, and those whose processes are forked from one, or that import vLLM, to the same one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _group(file) if self._spread[_group(file)] <= sum(self._spread.values()) / 2 else file

        @cached_property
        def _spread(self) -> Counter[str]:
            """Files of each group. One that is most of a run, such as that of engines alone, goes to all processes."""
            return Counter(map(_group, {nodeid.partition("::")[0] for nodeid in self.collection or ()}))

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def _group(file: str) -> str:
    if file.startswith(("tests/vllm/", "tests/engines/", "tests/e2e/")):
        return "engines"
    return "ranks" if "tests.support.ranks" in Path(file).read_text() else file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    GUARD.begin(pure=item.get_closest_marker("pure") is not None)
    try:
        return (yield)
    finally:
        GUARD.end()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module that imports vLLM or Megatron is skipped where there is none."""
    report = yield
    if report.failed and (missing := re.search(r"No module named '(vllm|megatron)", str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: needs {missing[1]}")
    return report


@pytest.fixture(scope="module")
def daemon() -> "Iterator[Daemon]":
    """A daemon with default options, for all tests of a module."""
    from tests.support.daemon import Daemon

    with Daemon() as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_is_started_by_a_pure_test() -> Iterator[None]:
    yield
    GUARD.check()


@pytest.fixture(autouse=True)
def _log_levels_as_before() -> Iterator[None]:
    """vLLM's routes import a package that lets the root logger and its handlers, pytest's too, pass errors alone."""
    root = logging.getLogger()
    levels = [(each, each.level) for each in (root, *root.handlers)]
    yield
    for each, level in levels:
        each.setLevel(level)


@pytest.fixture(autouse=True)
def _no_world_left_behind() -> Iterator[None]:
    """Each test begins and ends outside of any fake world of ranks (`tests.support.fakepg`)."""
    _leave()
    yield
    _leave()


@pytest.fixture(autouse=True)
def _no_publisher_left_behind() -> Iterator[None]:
    """Publishers of fixtures of a wider scope stay open."""
    before = len(_publishers())
    yield
    while len(_publishers()) > before:
        _publishers().pop().close()


def _publishers() -> "list[Publisher]":
    models = sys.modules.get("tests.client.models")
    return [] if models is None else models.OPEN


def _leave() -> None:
    if (fakepg := sys.modules.get("tests.support.fakepg")) is not None:
        fakepg.leave()
