"""docs/security.md as it stands: a shell makes its certificates with openssl, starts its daemon, and calls it."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.ports import free_port
from tests.support.shell_session import Session
from tests.support.typed_page import save_files, type_page

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.fixture
def memory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.process
def test_what_the_security_page_says_works_in_the_order_in_which_it_is_typed(tmp_path: Path, memory: Path) -> None:
    page, port = PAGE.read_text(), str(free_port())
    for shown, own in (("0.0.0.0:7677", f"127.0.0.1:{port}"), ("7677", port)):
        assert shown in page
        page = page.replace(shown, own)
    assert save_files(page, tmp_path) == [tmp_path / "resharderd.yaml"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESHARDER")}
    environment |= {
        "RESHARDERD_STORE": str(memory / "store"),
        "RESHARDERD_WEB_LISTEN": "",
        "RESHARDERD_DATA_LISTEN": "127.0.0.1:0",
    }
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    with Session(tmp_path, environment, tmp_path / "log") as session:
        found = type_page(session, page, "docs/security.md")
    assert not found, "\n\n".join([*found, (tmp_path / "log").read_text()[-8000:]])
