"""Refusals that an operator can turn into warnings: RESHARDER_ALLOW=name[,name…] in the environment of the process that refuses.

Each is a check whose failure means wrong weights or wrong answers. Where one is allowed, its text goes to the log and into the
record of the version, where it is seen later.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from resharder.converters.environment import ALLOW

VARIABLE = ALLOW.name
UNWRITTEN = "unwritten-parameters"
REFUSALS: Mapping[str, str] = {
    "config-mismatch": "a model that computes otherwise than its `config.json` says ([What attach compares](agreement.md))",
    "megatron-option": "an option of megatron-core that Resharder does not know, with another value than its default",
    "megatron-release": "a release of megatron-core that Resharder was not tested with",
    "no-gate": "an API server with `--load-format resharder` [without the gate](vllm.md), whose program attaches the engine",
    "second-head": "an output layer with memory of its own under a config that ties it to the embeddings. It is not published",
    "server-config": "a version whose `config.json` [differs](vllm.md#the-versions-config) from the one that the server has",
    "tokenizer-ids": "a tokenizer with ids that the model has no rows for",
    UNWRITTEN: "a version that does not write all parameters of a vLLM server; the rest keep what is in memory",
}
"""Name of each refusal, and what is accepted when it is allowed. docs/configuration.md has a table made from it."""

_log = logging.getLogger("resharder")
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def refuse(name: str, error: Exception) -> None:
    """Raise `error`, or log and record its text if the environment allows the refusal `name`, one of REFUSALS."""
    if name not in REFUSALS:
        raise KeyError(f"{name} is not in REFUSALS")
    if name not in ALLOW.read():
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


def unknown_names(environment: Mapping[str, str] | None = None) -> str:
    """Return what is wrong with RESHARDER_ALLOW; empty if all of its names are in REFUSALS."""
    unknown = [name for name in ALLOW.read(environment) if name not in REFUSALS]
    known = ", ".join(sorted(REFUSALS))
    return f"{VARIABLE}: no refusal is called {', '.join(unknown)}; this release has {known}" if unknown else ""
