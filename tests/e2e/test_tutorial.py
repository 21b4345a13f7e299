"""docs/tutorial.md as it stands: a shell types its commands, with a real daemon and real servers.

Each prints what the page says.

vLLM's own sleep does nothing on the CPU, so that it is `dropping_sleep`'s here, which drops what a GPU would.
"""

import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.shell_session import Session
from tests.support.typed_page import save_programs, type_page
from tests.support.vllm_server import CPU_ENVIRONMENT

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
STORE = Path("/dev/shm/tutorial")


@contextmanager
def alone() -> Iterator[None]:
    """The page names ports and the store, so one session a machine."""
    with (Path(tempfile.gettempdir()) / "resharder-tutorial.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def open_session(folder: Path) -> Iterator[Session]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESHARDER")}
    environment |= {**CPU_ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(ROOT / "tests" / "support" / "raw_mode")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    shutil.rmtree(STORE, ignore_errors=True)
    with Session(folder, environment, folder / "log") as session:
        yield session
    shutil.rmtree(STORE, ignore_errors=True)


@pytest.mark.timeout(1800)
def test_each_command_of_the_tutorial_prints_what_the_page_says(tmp_path: Path) -> None:
    page = PAGE.read_text().replace("VLLM_PLUGINS=resharder", "VLLM_PLUGINS=resharder,dropping_sleep,raw_mode")
    assert save_programs(page, tmp_path) == [tmp_path / "checkpoints.py"]
    with alone(), open_session(tmp_path) as session:
        found = type_page(session, page, "docs/tutorial.md")
    assert not found, "\n\n".join([*found, (tmp_path / "log").read_text()[-8000:]])
