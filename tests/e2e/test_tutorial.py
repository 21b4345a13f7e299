"""docs/tutorial.md as it stands: each of its commands is run, by real servers and a real daemon, and prints what the page says.

`vllm` is that of the CPU build, small enough for two cores: the page's options come after those of `SMALL`. Its own sleep does
nothing on the CPU, so that it is `dropping_sleep`'s here, which drops what a GPU would.
"""

import fcntl
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.console_docs import difference, steps
from tests.support.shell_session import Session
from tests.support.tiny_hf import save_checkpoint, tiny_config
from tests.support.vllm_server import CPU_ENVIRONMENT, SMALL

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
    """In a folder with what the page takes as given."""
    for number in (100, 200, 300):
        save_checkpoint(folder / "checkpoints" / f"step-{number}", tiny_config("qwen3_tied"), seed=number)
    commands = folder / "bin"
    commands.mkdir()
    for name in ("resharder", "resharderd"):
        (commands / name).symlink_to(Path(sys.executable).with_name(name))
    serve = [sys.executable, str(ROOT / "tests" / "support" / "vllm_serve.py")]
    small = [*SMALL, "--dtype", "float32", "--enforce-eager"]
    plugins = 'export VLLM_PLUGINS="$VLLM_PLUGINS,dropping_sleep,raw_mode"'
    script = f'#!/bin/sh\n{plugins}\nexec {shlex.join(serve)} "$@" {shlex.join(small)}\n'
    (commands / "vllm").write_text(script)
    (commands / "vllm").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RESHARDER")}
    environment |= {**CPU_ENVIRONMENT, "TORCH_COMPILE_DISABLE": "1", "PYTHONPATH": str(ROOT / "tests" / "support" / "raw_mode")}
    environment["PATH"] = f"{commands}:{environment['PATH']}"
    shutil.rmtree(STORE, ignore_errors=True)
    with Session(folder, environment, folder / "log") as session:
        yield session
    shutil.rmtree(STORE, ignore_errors=True)


@pytest.mark.timeout(1800)
def test_each_command_of_the_tutorial_prints_what_the_page_says(tmp_path: Path) -> None:
    found = []
    with alone(), open_session(tmp_path) as session:
        for step in steps(PAGE.read_text()):
            if wrong := difference(step.output, session.run(step)):
                found.append(f"docs/tutorial.md, line {step.line}: {step.command}\n{wrong}")
    assert not found, "\n\n".join(found)
