"""Methods that the plugin adds to vLLM's workers, for `collective_rpc`.

The methods return plain dicts and do not raise: an exception in one of several workers shifts all later
replies of the engine (vLLM issue 49972).
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import cut_page, page
from resharder.client.inference.vllm.drafters import drafter_of
from resharder.client.inference.vllm.hf_config import EngineConfig
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.vllm.lora import LoraSlots
from resharder.client.inference.worker.adapter_agent import AdapterAgent
from resharder.client.inference.worker.adapter_writer import AdapterWriter
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.calls import CALLS, answered
from resharder.client.inference.worker.model_part import DRAFTER, MODEL, Models

AGENTS: WeakKeyDictionary[torch.nn.Module, Agent] = WeakKeyDictionary()
ADAPTERS: WeakKeyDictionary[torch.nn.Module, dict[str, AdapterAgent]] = WeakKeyDictionary()


def agent_of(worker: Any) -> tuple[Agent, Models]:
    """Return the agent of one of vLLM's workers, created on the first call, and the worker's models."""
    model, drafter = worker.get_model(), drafter_of(worker)
    if model not in AGENTS:
        AGENTS[model] = Agent(VLLMHost.of_worker(worker), PluginSettings.from_environment())
    return AGENTS[model], {MODEL: model} | ({DRAFTER: drafter} if drafter is not None else {})


def _answer(worker: Any, act: Callable[[Agent, Models], dict[str, Any]]) -> dict[str, Any]:
    return answered(getattr(worker, "rank", -1), lambda: agent_of(worker), act)


def _method(name: str) -> Callable[..., dict[str, Any]]:
    """Return the method of vLLM's workers for a call."""
    call = CALLS[name]

    def method(self: Any, *args: Any) -> dict[str, Any]:
        return _answer(self, lambda agent, models: call(agent, models, *args))

    method.__name__, method.__doc__ = name, call.__doc__
    return method


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


METHODS = (resharder_adapter, *map(_method, CALLS))


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
