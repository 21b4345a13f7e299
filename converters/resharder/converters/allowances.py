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
REFUSALS: Mapping[str, str] = {
    "second-head": "an output layer with memory of its own under a config that ties it; it is not published",
}
"""Name of each refusal, and what is accepted when it is allowed. docs/configuration.md lists them."""

_log = logging.getLogger("resharder")
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def refuse(name: str, error: Exception) -> None:
    """Raise `error`, or log and record its text if the environment allows the refusal `name`, one of REFUSALS."""
    if name not in REFUSALS:
        raise KeyError(f"{name} is not in REFUSALS")
    if name not in _allowed():
        raise error
    text = f"allowed by {VARIABLE}={name}: {error}"
    _log.warning("%s", text)
    if (collected := _collected.get()) is not None:
        collected.append(text)


def unknown_names() -> str:
    """Return what is wrong with the names in RESHARDER_ALLOW; empty if REFUSALS has all of them."""
    unknown = [name for name in _allowed() if name not in REFUSALS]
    known = f"this release knows {', '.join(sorted(REFUSALS))}" if REFUSALS else "this release knows none"
    return f"{VARIABLE}: no refusal is called {', '.join(unknown)}; {known}" if unknown else ""


def _allowed() -> list[str]:
    return [name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())]


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Collect the texts of allowed refusals while the block runs, in this thread."""
    texts: list[str] = []
    token = _collected.set(texts)
    try:
        yield texts
    finally:
        _collected.reset(token)
