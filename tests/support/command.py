"""The command line, in this process: quick, and with its exit code, output and errors apart."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from resharder.client import cli


class Done(NamedTuple):
    code: int
    out: str
    err: str


def resharder(*arguments: object) -> Done:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def answer(*arguments: object) -> dict[str, Any]:
    """What `--json` prints."""
    done = resharder(*arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found
