"""docs/tutorial.md as it stands: a shell types its commands, with a real daemon and real servers.

Each prints what the page says. Ports and store are the test's own.

vLLM's own sleep does nothing on the CPU, so that it is `dropping_sleep`'s here, which drops what a GPU would.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.ports import free_port
from tests.support.shell_session import Session
from tests.support.typed_page import save_files, type_page
from tests.support.vllm_server import CPU_ENVIRONMENT

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial.md"


@pytest.fixture
def memory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.timeout(1800)
def test_each_command_of_the_tutorial_prints_what_the_page_says(tmp_path: Path, memory: Path) -> None:
    page, endpoint = PAGE.read_text(), f"127.0.0.1:{free_port()}"
    for shown, own in (
        ("VLLM_PLUGINS=resharder", "VLLM_PLUGINS=resharder,dropping_sleep,raw_mode"),
        ("127.0.0.1:7677", endpoint),
        ("8001", str(free_port())),
        ("8002", str(free_port())),
        ("/dev/shm/tutorial", str(memory / "store")),
    ):
        page, found = re.subn(rf"\b{shown}\b" if shown.isdigit() else re.escape(shown), own, page)
        assert found, shown
    assert save_files(page, tmp_path) == [tmp_path / "checkpoints.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESHARDER")}
    environment |= {"RESHARDERD_LISTEN": endpoint, "RESHARDERD_WEB_LISTEN": ""}
    environment |= {**CPU_ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(ROOT / "tests" / "support" / "raw_mode")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with Session(tmp_path, environment, tmp_path / "log") as session:
        wrong = type_page(session, page, "docs/tutorial.md")
    assert not wrong, "\n\n".join([*wrong, (tmp_path / "log").read_text()[-8000:]])
