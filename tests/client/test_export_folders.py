"""Folders of exports by themselves: what killed processes leave beside them."""

import fcntl
import os
from pathlib import Path

from resharder.client.operator.export import appearing


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
