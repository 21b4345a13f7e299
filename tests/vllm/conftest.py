"""Fixtures of the plugin's tests."""

from pathlib import Path

import pytest
from resharder.client.inference.version_page import VARIABLE, page


@pytest.fixture
def own_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version page of the test's own."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "page"))
    page.cache_clear()
