"""Refusals that an operator can turn into warnings: RESHARDER_ALLOW=name[,name…] in the environment of the process that refuses.

Each is a check whose failure means wrong weights or wrong answers. Where one is allowed, its text goes to the log and into the
record of the version, where it is seen later.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

VARIABLE = "RESHARDER_ALLOW"
UNWRITTEN = "unwritten-parameters"
REFUSALS: Mapping[str, str] = {
    UNWRITTEN: "A vLLM server installs a version that does not write all of its parameters; the rest keep what is in memory.",
}
"""Name of each refusal, and what is accepted when it is allowed. docs/configuration.md lists them."""

_log = logging.getLogger("resharder")
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def unknown(environment: Mapping[str, str] = os.environ) -> str:
    """Return what is wrong with RESHARDER_ALLOW; empty if it has only names of REFUSALS."""
    names = [name for name in environment.get(VARIABLE, "").split(",") if name]
    wrong = ", ".join(repr(name) for name in names if name not in REFUSALS)
    return (
        f"{VARIABLE} has {wrong}, which is no refusal's name; expected one or more of {', '.join(sorted(REFUSALS))}"
        if wrong
        else ""
    )


def refuse(name: str, error: Exception) -> None:
    """Raise `error`, or log and record its text if the environment allows the refusal `name`, one of REFUSALS."""
    if name not in REFUSALS:
        raise KeyError(f"{name} is not in REFUSALS")
    if name not in os.environ.get(VARIABLE, "").split(","):
        raise error
    text = f"allowed by {VARIABLE}={name}: {error}"
    _log.warning("%s", text)
    if (collected := _collected.get()) is not None:
        collected.append(text)


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Collect the texts of allowed refusals while the block runs, in this thread."""
    texts: list[str] = []
    token = _collected.set(texts)
    try:
        yield texts
    finally:
        _collected.reset(token)
