"""A store in shared memory, and Azure's blob service."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.server.store.store import Store

from tests.support import azurite


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="resharder-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    made = Store(root / "store", keep_count=2)
    yield made
    made.close()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL in an empty container of Azure. Skips the test where there is none."""
    with azurite.opened(monkeypatch) as url:
        yield url
