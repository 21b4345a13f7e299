"""A store in shared memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.server.store.store import Store


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
