"""Installs of adapters by the hundreds leave nothing behind, in any process of a server and of the daemon."""

from pathlib import Path

import pytest

from tests.soak.adapters import Load
from tests.soak.report import verdict

pytestmark = pytest.mark.full


def test_a_thousand_versions_of_an_adapter_leave_nothing(tmp_path: Path) -> None:
    with Load(tmp_path, adapters=1, every=0) as load:
        result = load.run(versions=1000)
    assert result.problems == []
    assert result.refused == {}
    assert result.answered == 1000
    assert verdict(result.growths()) == []


def test_versions_of_several_adapters_at_a_time_are_told_apart(tmp_path: Path) -> None:
    with Load(tmp_path, adapters=8, every=1, spare=2) as load:
        result = load.run(seconds=80, period=1)
    assert result.problems == []
    assert result.refused == {}
    assert verdict(result.growths()) == []
