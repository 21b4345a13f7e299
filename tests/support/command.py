"""The command line: in this process, quick, with its exit code, output and errors apart; or as a process of its own."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from resharder.client import cli

_HEARING = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("resharder.client.cli", run_name="__main__", alter_sys=True)
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


def resharder(*arguments: object, encoding: str = "utf-8") -> Done:
    """Run the command in this process. `encoding`: of its output, where Python refuses what has no place in it, as it does."""
    written, code = (io.BytesIO(), io.BytesIO()), 0
    out, err = (io.TextIOWrapper(one, encoding, write_through=True) for one in written)
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, *(one.getvalue().decode(encoding) for one in written))


def answer(*arguments: object) -> dict[str, Any]:
    """Output of `--json`."""
    done = resharder(*arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


@contextmanager
def running(arguments: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """The command as a process that hears Ctrl-C, even where the tests themselves run in the background and do not; it ends with
    the block. It sees to that itself: a `preexec_fn` has gRPC's threads in the forked process, and gRPC aborts it."""
    with subprocess.Popen([sys.executable, "-c", _HEARING, *arguments], **options) as process:
        try:
            yield process
        finally:
            process.kill()
