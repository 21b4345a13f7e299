"""The command on a terminal of 80 columns: what an operator sees, colours included."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from tests.support.forked import ForkedProcess, start

COLUMNS = 80
_COMMAND = "resharder.client.cli"


class Screen(NamedTuple):
    code: int
    text: str
    """Output, standard error included, with its escape sequences."""

    @property
    def lines(self) -> list[str]:
        """Lines without escape sequences."""
        return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text).replace("\r\n", "\n").splitlines()]


def on_terminal(*arguments: object, environment: Mapping[str, str] | None = None, typed: str = "") -> Screen:
    """Run `resharder` with a terminal for its output and errors, and for its input where something is typed."""
    ours, theirs = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CI")}
    settings = {**clean, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": "40", **(environment or {})}
    given = [str(argument) for argument in arguments]
    process: subprocess.Popen[bytes] | ForkedProcess
    with os.fdopen(theirs, "wb") as terminal:
        if typed:
            command = [sys.executable, "-m", _COMMAND, *given]
            process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=settings)
        else:
            process = start(_COMMAND, settings, terminal, arguments=given)
    try:
        os.write(ours, typed.encode())
        seen = bytearray()
        while True:
            try:
                seen += os.read(ours, 1 << 16)
            except OSError:  # no process has the terminal open any more
                break
        return Screen(process.wait(60), seen.decode())
    finally:
        process.kill()
        os.close(ours)
