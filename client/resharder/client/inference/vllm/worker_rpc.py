"""Methods that the plugin adds to vLLM's workers, for `collective_rpc`.

The methods return plain dicts and do not raise: an exception in one of several workers shifts all later
replies of the engine (vLLM issue 49972).
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import cut_page, page
from resharder.client.inference.vllm.drafters import drafter_of
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.vllm.lora import LoraSlots
from resharder.client.inference.worker.adapter_agent import AdapterAgent
from resharder.client.inference.worker.adapter_writer import AdapterWriter
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.model_part import DRAFTER, MODEL, Models
from resharder.client.inference.worker.profile import profiled
from resharder.client.inference.worker.reporter import PROCESS

AGENTS: WeakKeyDictionary[torch.nn.Module, Agent] = WeakKeyDictionary()
ADAPTERS: WeakKeyDictionary[torch.nn.Module, dict[str, AdapterAgent]] = WeakKeyDictionary()


def agent_of(worker: Any) -> tuple[Agent, Models]:
    """Return the agent of one of vLLM's workers, created on the first call, and the worker's models."""
    model, drafter = worker.get_model(), drafter_of(worker)
    if model not in AGENTS:
        AGENTS[model] = Agent(VLLMHost.of_worker(worker), PluginSettings.from_environment())
    return AGENTS[model], {MODEL: model} | ({DRAFTER: drafter} if drafter is not None else {})


def _answer(worker: Any, act: Callable[[Agent, Models], dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"ok": True, "rank": getattr(worker, "rank", -1), "nonce": PROCESS, "error": ""}
    try:
        agent, models = agent_of(worker)
        answer["rank"] = agent.host.rank
        answer |= act(agent, models)
    except Exception as error:
        answer |= {"ok": False, "error": f"{type(error).__name__}: {error}"}
    return answer


def resharder_describe(self: Any) -> dict[str, Any]:
    """Return the worker's version, power state and routes, and start its verifier."""

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        agent.verifier.start(models, agent.settings.verify_seconds)
        return agent.describe()

    return _answer(self, act)


def resharder_stage(self: Any, install_id: str, version: str, fallback: str = "") -> dict[str, Any]:
    """Start to stage a version. The worker reports to the daemon when it is staged.

    Args:
        install_id: Id of the install.
        version: Full name of the version.
        fallback: Full name of the READY version to fall back on, if `version` is not READY.
    """

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        return agent.stage(models, install_id, version, fallback)

    return _answer(self, act)


def resharder_unstage(self: Any, install_id: str) -> dict[str, Any]:
    """Drop an install that is staged or being staged."""
    return _answer(self, lambda agent, models: agent.unstage(install_id))


def resharder_apply(self: Any, install_id: str, profile: bool = False) -> dict[str, Any]:
    """Install a staged version and verify it. The engine must be paused.

    Args:
        install_id: Id of the install.
        profile: Whether to run under torch.profiler and send the profile to the daemon.
    """

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        try:
            with (
                profiled(agent.channel, agent.settings.server, agent.host.rank, install_id, agent.host.device)
                if profile
                else nullcontext()
            ):
                return agent.apply(models, install_id)
        except Exception as error:
            agent.failed(install_id, f"{type(error).__name__}: {error}")
            raise

    return _answer(self, act)


def resharder_fingerprint(self: Any) -> dict[str, Any]:
    """Return a fingerprint of each tensor that the models read: parameters, buffers, and tensors that loading derived."""

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        agent.require_weights("read them")
        tensors: dict[str, int] = {}
        for name, model in models.items():
            notes = inventory.NOTES.get(model)
            known = set(notes.constant) | set(notes.made) if notes else set()
            found = [f for f in inventory.reachable(model) if f.parameter or f.path in known]
            tensors |= {f.path if name == MODEL else f"{name}: {f.path}": inventory.fingerprint(f.tensor) for f in found}
        return {"version": agent.version, "tensors": tensors}

    return _answer(self, act)


def resharder_adapter(self: Any, adapter: str, method: str, *args: Any) -> dict[str, Any]:
    """Call a method of the worker's agent of an adapter.

    Args:
        adapter: Model of the adapter, one of RESHARDER_ADAPTERS.
        method: `describe`, `stage`, `unstage`, `apply`, `renew` or `release`.
        args: Its arguments.
    """

    loaded: list[int] = []

    def act(agent: Agent, models: Models) -> dict[str, Any]:
        own = adapter_agents(self)[adapter]
        try:
            found: dict[str, Any] = getattr(own, method)(*args)
        except Exception as error:
            if method == "apply":
                own.failed(args[0], f"{type(error).__name__}: {error}")
            raise
        finally:
            loaded.extend(own.loaded)
        return found

    return _answer(self, act) | {"loaded": loaded}


def adapter_agents(worker: Any) -> dict[str, AdapterAgent]:
    """Return the agents of one of vLLM's workers for adapters, by model, created on the first call.

    Raises:
        InstallError: vLLM was started without `--enable-lora`.
    """
    agent, models = agent_of(worker)
    model = models[MODEL]
    if model not in ADAPTERS:
        settings, slots = agent.settings, LoraSlots.of_worker(worker)
        writer = AdapterWriter(slots, agent.host.device)
        ADAPTERS[model] = {
            name: AdapterAgent(
                index,
                agent.host.rank,
                slots,
                settings.of_adapter(index),
                page(name),
                cut_page(name),
                agent.sleep_state,
                writer,
            )
            for index, (name, _) in enumerate(settings.adapters)
        }
    return ADAPTERS[model]


METHODS = (resharder_adapter, resharder_describe, resharder_stage, resharder_unstage, resharder_apply, resharder_fingerprint)


def watch_workers(made: Callable[[Any], None]) -> None:
    """Call `made` with each worker that is created from now on."""
    from vllm.v1.worker.worker_base import WorkerBase

    plain = WorkerBase.__init__

    @functools.wraps(plain)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self.resharder_engine_config = EngineConfig(self.vllm_config)  # now: the folder may have another one later
        made(self)

    WorkerBase.__init__ = watched
