"""NIXL's bindings, and agents over UCX, for ranks, workers and nodes. Needs the extra `nixl`.

The bindings are called without NIXL's `nixl_agent`, whose thread for progress occupies half a core while nothing happens.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_BACKEND = "UCX"
_PROGRESS_MICROSECONDS = 1000  # an agent's thread sleeps until something happens, and looks this often besides
_RDMA = Path("/sys/class/infiniband")  # also of EFA


class UcxAgent(NamedTuple):
    """An agent, and its backend."""

    agent: Any
    backend: Any


@cache
def bindings() -> Any:
    """Return NIXL's bindings. Raises ImportError, OSError or RuntimeError if they cannot be loaded."""
    raises = logging.raiseExceptions
    try:
        from nixl import _bindings
    finally:
        logging.raiseExceptions = raises  # which NIXL changes for the whole process
    own = logging.getLogger("nixl")
    own.handlers.clear()  # it prints to stdout
    own.propagate = True
    own.setLevel(logging.WARNING)
    return _bindings


def started(name: str) -> UcxAgent:
    """Start an agent, which takes half a second. Raises the errors of `bindings`, and RuntimeError if UCX does not start."""
    nixl = bindings()
    config = nixl.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _PROGRESS_MICROSECONDS
    agent = nixl.nixlAgent(name, config)
    options, _ = agent.getPluginParams(_BACKEND)
    try:
        return UcxAgent(agent, agent.createBackend(_BACKEND, options))
    except nixl.nixlBackendError as error:
        raise RuntimeError("UCX does not start, its own lines before say why: look at UCX_TLS and UCX_NET_DEVICES") from error


def has_rdma() -> bool:
    """Return whether this host has a device that reads memory without its process.

    Over TCP UCX has the process answer, and ends it by SIGABRT (`Fatal: unexpected error`) if the reader is gone by then, as
    after the process was stopped for a while (UCX of NIXL 1.5.1).
    """
    return _RDMA.is_dir() and any(_RDMA.iterdir())
