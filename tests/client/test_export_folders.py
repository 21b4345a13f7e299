"""Folders of exports: what killed processes leave beside them, and what a daemon may write into them."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from resharder.client.errors import CorruptData, Refused
from resharder.client.operator import Operator
from resharder.client.operator.export import appearing, write_version
from resharder.client.versions.manifest import VersionManifest
from resharder.v1 import server_pb2

from tests.client.port_reading import SMALL, publish
from tests.support.daemon import Daemon


def left(parent: Path, name: str) -> Path:
    """A folder as an export of an hour ago has left it."""
    folder = parent / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half of it")
    os.utime(folder, (0, 0))
    return folder


def test_the_next_export_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    killed, running = left(tmp_path, ".out.abcdefg1"), left(tmp_path, ".out.abcdefg2")
    others = [left(tmp_path, name) for name in (".out.x", ".other.abcdefg1", "out.abcdefg1")]
    descriptor = os.open(running, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with appearing(tmp_path / "out") as beside:
        (beside / "file").write_bytes(b"whole")
        os.utime(beside, (0, 0))
        with appearing(tmp_path / "out"):  # another one at the same time
            assert beside.exists()
        (tmp_path / "out").rmdir()
    os.close(descriptor)
    assert not killed.exists()
    assert all(folder.exists() for folder in (running, *others))
    assert (tmp_path / "out" / "file").read_bytes() == b"whole"


@pytest.mark.parametrize("name", ["../outside", ".hidden", "a/b", ""])
def test_a_file_that_a_daemon_names_outside_of_the_folder_is_not_written(tmp_path: Path, name: str) -> None:
    manifest = VersionManifest("models/m/versions/1", 1, "f", "", {}, {}, ())
    (tmp_path / "out").mkdir()
    with pytest.raises(CorruptData, match="expected a plain file name from the daemon"):
        write_version(tmp_path / "out", {name: b"x"}, manifest, None, lambda done: None)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_an_export_from_a_daemon_that_does_not_name_the_versions_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon() as daemon, Operator(daemon.endpoint) as operator:
        publish(daemon, 1, SMALL)
        call = operator._call

        def as_before(method: Any, request: Any, *rest: Any) -> Any:
            if isinstance(request, server_pb2.GetModelRequest):
                request.version = 0  # which release 0.1.0 does not know
            return call(method, request, *rest)

        monkeypatch.setattr(operator, "_call", as_before)
        with pytest.raises(Refused, match="is of an older release: export with that release, or upgrade the daemon"):
            operator.export(1, tmp_path / "out", model="policy")
    assert list(tmp_path.iterdir()) == []
