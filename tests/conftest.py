"""Settings that hold for every test."""

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The machines are noisy: how long one example takes says nothing.
settings.register_profile("resharder", deadline=None)
settings.load_profile("resharder")


@pytest.fixture(autouse=True)
def _no_world_left_behind() -> Iterator[None]:
    """Each test begins and ends outside of any fake world of ranks (`tests.support.fakepg`)."""
    _leave()
    yield
    _leave()


def _leave() -> None:
    if (fakepg := sys.modules.get("tests.support.fakepg")) is not None:
        fakepg.leave()
