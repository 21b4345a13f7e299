"""Folders of the store that cannot be listed: the daemon does not start as if they were empty."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.infra.filesystem import MediumRefused, matching
from resharder.server.state.errors import Unavailable
from resharder.server.store.store import Store

from tests.support.store_versions import claim, numbers, publish


@contextmanager
def unlisted(folder: str) -> Iterator[None]:
    """Refuse to list folders of this name, with the error that `Path.glob` ignores in every release of Python."""

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *arguments: Any) -> Any:
            if not isinstance(path, int) and Path(path).name == folder:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "scandir"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        yield


@pytest.mark.parametrize("folder", ["versions", "files"])
def test_a_store_does_not_start_without_the_versions_or_files_that_it_cannot_list(folder: str, tmp_path: Path) -> None:
    store = Store(tmp_path / "store", limit_bytes=1 << 24)
    publish(store, claim(store), 1)
    store.close()
    with unlisted(folder), pytest.raises(Unavailable, match=f"listing .*/{folder}: EACCES"):
        Store(tmp_path / "store", limit_bytes=1 << 24)
    store = Store(tmp_path / "store", limit_bytes=1 << 24)
    assert numbers(store) == [1]
    store.close()


def test_fleets_that_cannot_be_listed_are_not_taken_for_none(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path / "fleets")
    with unlisted("fleets"), pytest.raises(MediumRefused):
        files.load(0.0)
    assert files.load(0.0) == {}


def test_a_folder_that_is_missing_has_no_matching_paths(tmp_path: Path) -> None:
    (tmp_path / "2").touch()
    (tmp_path / "1").touch()
    (tmp_path / "x").touch()
    assert [path.name for path in matching(tmp_path, "[0-9]*")] == ["1", "2"]
    assert matching(tmp_path / "missing", "*") == []
