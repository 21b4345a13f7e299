"""docs/start.md as it stands: a shell types its commands, with a real daemon and a real vLLM, and each prints what the page says.

Ports and store are the test's own.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.ports import free_port
from tests.support.shell_session import Session
from tests.support.typed_page import save_files, type_page

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


@pytest.fixture
def memory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_the_quickstart_gets_the_answers_that_the_page_shows(tmp_path: Path, memory: Path) -> None:
    page, port, endpoint = PAGE.read_text(), str(free_port()), f"127.0.0.1:{free_port()}"
    for shown, own in (("8000", port), ("127.0.0.1:7677", endpoint), ("/dev/shm/quickstart", str(memory / "store"))):
        assert shown in page
        page = page.replace(shown, own)
    assert save_files(page, tmp_path) == [tmp_path / "train.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARDER", "VLLM"))}
    environment |= {"RESHARDERD_LISTEN": endpoint, "RESHARDERD_WEB_LISTEN": "", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with Session(tmp_path, environment, tmp_path / "log") as session:
        found = type_page(session, page, "docs/start.md")
    assert not found, "\n\n".join([*found, (tmp_path / "log").read_text()[-8000:]])
