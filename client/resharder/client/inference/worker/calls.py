"""Calls of a control side to every worker, by name.

The calls return plain dicts and do not raise: an exception in one of several workers would leave the others' answers without
one of its own (in vLLM it shifts all later replies of the engine, issue 49972).
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from resharder.client.inference.recording import inventory
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.model_part import MODEL, Models
from resharder.client.inference.worker.profile import profiled
from resharder.client.inference.worker.reporter import PROCESS

Found = tuple[Agent, Models]
"""A worker's agent, and its models."""


def answered(rank: int, find: Callable[[], Found], act: Callable[[Agent, Models], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of a call, or its error.

    Args:
        rank: The worker's rank where `find` fails.
        find: Returns the worker's agent and models.
        act: The call.
    """
    answer: dict[str, Any] = {"ok": True, "rank": rank, "nonce": PROCESS, "error": ""}
    try:
        agent, models = find()
        answer["rank"] = agent.host.rank
        answer |= act(agent, models)
    except Exception as error:
        answer |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return answer


def describe(agent: Agent, models: Models) -> dict[str, Any]:
    """Return the worker's version, power state and routes, and start its verifier."""
    agent.verifier.start(models, agent.settings.verify_seconds)
    return agent.describe()


def stage(agent: Agent, models: Models, install_id: str, version: str, fallback: str = "") -> dict[str, Any]:
    """Start to stage a version. The worker reports to the daemon when it is staged.

    Args:
        agent: The worker's agent.
        models: The worker's models.
        install_id: Id of the install.
        version: Full name of the version.
        fallback: Full name of the READY version to fall back on, if `version` is not READY.
    """
    return agent.stage(models, install_id, version, fallback)


def unstage(agent: Agent, models: Models, install_id: str) -> dict[str, Any]:
    """Drop an install that is staged or being staged."""
    return agent.unstage(install_id)


def apply(agent: Agent, models: Models, install_id: str, profile: bool = False) -> dict[str, Any]:
    """Install a staged version and verify it. The engine must be paused.

    Args:
        agent: The worker's agent.
        models: The worker's models.
        install_id: Id of the install.
        profile: Whether to run under torch.profiler and send the profile to the daemon.
    """
    host = agent.host
    try:
        with profiled(agent.channel, agent.settings.server, host.rank, install_id, host.device) if profile else nullcontext():
            return agent.apply(models, install_id)
    except Exception as error:
        agent.failed(install_id, f"{type(error).__name__}: {error}")
        raise


def fingerprint(agent: Agent, models: Models) -> dict[str, Any]:
    """Return a fingerprint of each tensor that the models read: parameters, buffers, and tensors that loading derived."""
    agent.require_weights("read them")
    tensors: dict[str, int] = {}
    for name, model in models.items():
        notes = inventory.NOTES.get(model)
        known = set(notes.constant) | set(notes.made) if notes else set()
        found = [f for f in inventory.reachable(model) if f.parameter or f.path in known]
        tensors |= {f.path if name == MODEL else f"{name}: {f.path}": inventory.fingerprint(f.tensor) for f in found}
    return {"version": agent.version, "tensors": tensors}


CALLS: Mapping[str, Callable[..., dict[str, Any]]] = {
    f"resharder_{call.__name__}": call for call in (describe, stage, unstage, apply, fingerprint)
}
"""The calls by name; each takes the worker's agent and models, and the call's arguments."""
