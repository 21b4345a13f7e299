"""A shell that runs a page's commands."""

import contextlib
import os
import shlex
import signal
import subprocess
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Self

from tests.support.console_docs import Step

_END = "--- it ended"


class SessionEnded(RuntimeError):
    """The shell ended, or a command took longer than its limit."""


class Session:
    """Session of bash, which ends its background commands with it. `output`: file of their output."""

    def __init__(self, folder: Path, environment: dict[str, str], output: Path) -> None:
        self._output = output
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._kill()
        self._bash.communicate()

    def run(self, step: Step, limit: float = 600) -> str:
        """Run a command, and return its output. Raises SessionEnded, after `limit` seconds with all processes of the session."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        away = f">>{shlex.quote(str(self._output))} 2>&1 &"
        self._bash.stdin.write(f"{step.command[:-1] + away if step.stays else step.command}\necho; echo '{_END}'\n")
        self._bash.stdin.flush()
        lines: list[str] = []
        watchdog = Timer(limit, self._kill)
        watchdog.start()
        try:
            for line in self._bash.stdout:
                if line.rstrip("\n") == _END:
                    return "".join(lines).removesuffix("\n")
                lines.append(line)
        finally:
            watchdog.cancel()
        raise SessionEnded(f"line {step.line}: the session ended within {limit:g} s: {step.command}\n{''.join(lines)}")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)
