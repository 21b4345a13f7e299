"""The model loader for `--load-format resharder`: a starting server loads its weights from the daemon.

vLLM's model folder needs only config and tokenizer. All processes of a server share its id, and the first
claim of the id fixes the version that all ranks boot.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from resharder.client.errors import UsageError
from resharder.client.inference.recording import inventory
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm.drafters import is_drafter
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.vllm.refusals import refuse_unsupported
from resharder.client.inference.vllm.worker_rpc import AGENTS
from resharder.client.inference.worker import boot
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.boot import Booting
from resharder.client.inference.worker.model_part import DRAFTER, MODEL
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


class ResharderLoader(BaseModelLoader):  # type: ignore[misc]
    """Implementation of vLLM's loader interface.

    vLLM creates one loader for the model and one for its drafter. The drafter boots the model's version, or
    uses vLLM's own loader if the model did. `ResharderError` and `InstallError` end the server's start with
    their message.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self._booting: Booting | None = None

    def download_model(self, model_config: Any) -> None:
        """Do nothing: `load_weights` fetches the weights."""

    def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Load a model from the daemon, or with vLLM's own loader if the daemon has none and the settings permit it."""
        if problem := refuse_unsupported(vllm_config):
            raise UsageError(problem)
        drafter = is_drafter(vllm_config, model_config)
        agent = _agent_of_model(vllm_config) if drafter else _begin(vllm_config)
        if agent is None or agent.boot is None or agent.staging.sources is None:
            loader = DefaultModelLoader(replace(self.load_config, load_format="auto"))
            return cast(torch.nn.Module, loader.load_model(vllm_config, model_config, *args, **kwargs))
        self._booting = booting = Booting(
            agent, agent.staging.sources, agent.boot, agent.parts.part(DRAFTER if drafter else MODEL)
        )
        model = cast(torch.nn.Module, super().load_model(vllm_config, model_config, *args, **kwargs))
        booting.verify(model)
        if not drafter:
            AGENTS[model] = agent
        return model

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Load the boot version into a model, on vLLM's call within `load_model`."""
        if self._booting is None:
            raise UsageError("load_weights was called before load_model: the resharder loader cannot reload a model")
        self._booting.load(model)


def _begin(vllm_config: Any) -> Agent | None:
    return boot.begin(VLLMHost.of_loader(vllm_config), PluginSettings.from_environment())


def _agent_of_model(vllm_config: Any) -> Agent | None:
    """Return the agent of the drafter's model. vLLM gives the two different copies of its configuration."""
    speculative = vllm_config.speculative_config
    for agent in AGENTS.values():
        if isinstance(agent.host, VLLMHost) and agent.host.vllm_config.speculative_config is speculative:
            return agent
    return None


def watch_loading() -> None:
    """Take the inventory of every model before and after its load, also with vLLM's own loaders."""
    for loader in (DefaultModelLoader, DummyModelLoader):
        loader.load_weights = _around(loader.load_weights, before=_before_loading, after=_after_own_loader)
    BaseModelLoader.load_model = _around(BaseModelLoader.load_model, after=_after_loading)


def _after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    inventory.after_loading(model)


def _before_loading(loader: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    inventory.before_loading(model)


def _after_own_loader(result: None, loader: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    if not isinstance(loader, DummyModelLoader):  # random values are no checkpoint's
        inventory.after_own_checkpoint(model)


def _around(method: Any, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Any:
    """Call `before` with the method's arguments, and `after` with its result and arguments."""
    if hasattr(method, "resharder"):
        return method

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if after is not None:
            after(result, *args, **kwargs)
        return result

    watched.resharder = True  # type: ignore[attr-defined]
    return watched
