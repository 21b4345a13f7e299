"""docs/start.md as it stands: a shell runs its commands, which print what the page says. Ports and store are the test's own."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.console_docs import difference, steps
from tests.support.ports import free_port
from tests.support.shell_session import Session

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


@pytest.fixture
def memory() -> Iterator[Path]:
    with TemporaryDirectory(prefix="resharder-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_the_first_five_minutes_are_as_the_page_says(tmp_path: Path, memory: Path) -> None:
    page = PAGE.read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    endpoint = f"127.0.0.1:{free_port()}"
    page = page.replace("127.0.0.1:7677", endpoint).replace("/dev/shm/five-minutes", str(memory / "store"))
    assert f"RESHARDER_ENDPOINT={endpoint}" in page
    assert str(memory) in page
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESHARDER")}
    environment |= {"RESHARDERD_LISTEN": endpoint, "RESHARDERD_WEB_LISTEN": "", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    found = []
    with Session(tmp_path, environment, tmp_path / "log") as session:
        for step in steps(page):
            if wrong := difference(step.output, session.run(step)):
                found.append(f"docs/start.md, line {step.line}: {step.command}\n{wrong}")
    assert not found, "\n\n".join([*found, (tmp_path / "log").read_text()])
