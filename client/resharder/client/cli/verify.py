"""Verification of the memory of a server's workers against their version."""

from collections.abc import Sequence
from typing import Annotated

import typer
from resharder.client.cli import completion
from resharder.client.cli.app import AsJson, Endpoint, Section, command
from resharder.client.cli.output import plain, print_json, size
from resharder.client.cli.terminal import say
from resharder.client.operator import Operator
from resharder.client.operator.answers import WorkerVerification

_DIFFERS, _SKIPPED = 1, 4


@command(Section.CHECK)
def verify(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="Its id.", autocompletion=completion.servers)],
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, max=3600, help="For all workers.")] = 600,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Compare a server's memory with its version, while it serves.

    Exit 1: a worker's memory differs; the server leaves service and its version is installed again. Exit 4: a worker cannot be
    verified now (it sleeps, or has no version).
    """
    with Operator(endpoint) as operator:
        found = operator.verify(server, timeout=timeout)
    if as_json:
        print_json({"verifications": [*map(plain, found)]})
    else:
        for one in found:
            say(_line(one))
    if code := _code(found):
        raise typer.Exit(code)


def _code(found: Sequence[WorkerVerification]) -> int:
    if any(one.different_tensors for one in found):
        return _DIFFERS
    return _SKIPPED if any(one.skipped or _nothing(one) for one in found) else 0


def _nothing(one: WorkerVerification) -> bool:
    return one.total_bytes > 0 and not one.covered_bytes


def _line(one: WorkerVerification) -> str:
    if one.skipped:
        return f"worker {one.rank}: not verified: {one.skipped}"
    covered = f"{size(one.covered_bytes)} of {size(one.total_bytes)} compared, {one.tensors} tensors, {one.seconds:.2f} s"
    if one.different_tensors:
        names = ", ".join(one.different) + (", …" if one.different_tensors > len(one.different) else "")
        result = f"{one.different_tensors} tensors differ from version {one.version}: {names}"
    elif _nothing(one):
        result = f"not verified: nothing of version {one.version} could be compared"
    elif one.covered_bytes < one.total_bytes:
        result = f"a part of version {one.version} was compared, and is as it should be"
    else:
        result = f"holds version {one.version}"
    return "\n".join([f"worker {one.rank}: {result} ({covered})", *_rest(one)])


def _rest(one: WorkerVerification) -> list[str]:
    """Return what was compared with the memory that the install left, and what was not compared, with the reasons."""
    weaker = one.covered_bytes - one.digested_bytes
    lines = [f"  {size(weaker)} only with what the install left in memory: the engine has changed their form"] if weaker else []
    for left in one.uncompared:
        names = ", ".join(left.names[:3]) + (", …" if left.tensors > 3 else "")
        lines.append(f"  {size(left.bytes)} not compared ({left.tensors} tensors: {names}): {left.reason}")
    return lines
