"""Settings and fixtures of every test."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from resharder.client.trainer.publisher import Publisher

    from tests.support.daemon import Daemon

# The machines are noisy: how long an example takes, or to make one, says nothing.
settings.register_profile("resharder", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("resharder")

FIRST = (
    "tests/vllm/test_control_server.py",
    "tests/vllm/test_install.py",
    "tests/client/test_publisher.py",
    "tests/vllm/test_other_hands.py",
    "tests/server/test_daemon.py",
    "tests/vllm/test_native_updates_server.py",
    "tests/converters/test_megatron_ranks.py",
    "tests/vllm/test_fp8.py",
    "tests/client/test_megatron.py",
    "tests/vllm/test_mx.py",
    "tests/client/test_importing.py",
    "tests/converters/test_real_sizes.py",
    "tests/client/test_fill.py",
    "tests/converters/test_layout_matrix.py",
)
"""The files that take longest: where several run at a time, none of these is begun when the others are done."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The order of all others stays."""
    places = {file: place for place, file in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(FIRST)))


@pytest.fixture(scope="module")
def daemon() -> "Iterator[Daemon]":
    """A daemon with default options, for all tests of a module."""
    from tests.support.daemon import Daemon

    with Daemon() as running:
        yield running


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
