"""The loader of a starting server's weights: from the daemon, unless `--load-format` names another source.

Read against 0.5.17 and 0.5.23. SGLang's model folder needs only config and tokenizer.
"""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from resharder.client.errors import UsageError
from resharder.client.inference.recording import inventory
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.sglang.host import SGLangHost, post_process
from resharder.client.inference.sglang.refusals import refuse_settings
from resharder.client.inference.worker import boot
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.boot import Booting
from resharder.client.inference.worker.model_part import MODEL
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_executor.model_runner_components import load_model_utils
from sglang.srt.model_loader import loader as own
from sglang.srt.model_loader.utils import set_default_torch_dtype

AGENTS: WeakKeyDictionary[torch.nn.Module, Agent] = WeakKeyDictionary()


class ResharderLoader(own.BaseModelLoader):  # type: ignore[misc]
    """Implementation of SGLang's loader interface. `ResharderError` and `InstallError` end the server's start."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: `load_model` fetches the weights."""

    def load_model(self, *, model_config: Any, device_config: Any) -> torch.nn.Module:
        """Load a model from the daemon, or with SGLang's own loader if the daemon has none and the settings permit it."""
        target = torch.device(device_config.device)
        settings, host = PluginSettings.from_environment(), SGLangHost.of(model_config, target)
        refuse_settings(settings)
        if problem := host.refusal():
            raise UsageError(f"{problem}: start SGLang without it, or leave resharder out of SGLANG_PLUGINS")
        agent = boot.begin(host, settings)
        if agent is None or agent.boot is None or agent.staging.sources is None:
            loader = own.DefaultModelLoader(self.load_config)
            return loader.load_model(model_config=model_config, device_config=device_config)  # type: ignore[no-any-return]
        booting = Booting(agent, agent.staging.sources, agent.boot, agent.parts.part(MODEL))
        with set_default_torch_dtype(model_config.dtype):
            with target:
                quantization = own._get_quantization_config(model_config, self.load_config)
                model: torch.nn.Module = own._initialize_model(model_config, self.load_config, quantization)
            booting.load(model)
            post_process(model, target)
        inventory.after_loading(model)
        booting.verify(model)
        AGENTS[model] = agent
        return model.eval()


def watch_loading() -> None:
    """Load weights from the daemon, and take the inventory of models that SGLang loads itself."""
    plain = load_model_utils.get_model_loader
    if hasattr(plain, "resharder"):
        return

    @functools.wraps(plain)
    def get_model_loader(load_config: Any, model_config: Any = None) -> Any:
        if load_config.load_format == LoadFormat.AUTO:
            return ResharderLoader(load_config)
        return plain(load_config, model_config)

    get_model_loader.resharder = True  # type: ignore[attr-defined]
    load_model_utils.get_model_loader = get_model_loader
    default = own.DefaultModelLoader
    if hasattr(default, "load_weights_only"):
        default.load_weights_only = staticmethod(
            _around(default.load_weights_only, inventory.before_loading, inventory.after_own_checkpoint)
        )
    else:  # 0.5.17 loads and post-processes in one function
        default.load_weights_and_postprocess = staticmethod(
            _around(default.load_weights_and_postprocess, _before_loading, lambda model: None)
        )
    own.initialize_dummy_weights = _around(own.initialize_dummy_weights, inventory.before_loading, lambda model: None)
    for loader in (default, own.DummyModelLoader):
        loader.load_model = _then(loader.load_model, inventory.after_loading)


def _before_loading(model: Any) -> None:
    """Take the first inventory, and the next one when the model has loaded its weights."""
    inventory.before_loading(model)
    plain = model.load_weights

    def load_weights(*args: Any, **kwargs: Any) -> Any:
        del model.load_weights  # the method again
        result = plain(*args, **kwargs)
        inventory.after_own_checkpoint(model)
        return result

    model.load_weights = load_weights


def _around(function: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> Any:
    """Call `before` and `after` with the function's first argument, a model."""

    @functools.wraps(function)
    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        before(model)
        result = function(model, *args, **kwargs)
        after(model)
        return result

    return watched


def _then(method: Any, after: Callable[[Any], None]) -> Any:
    """Call `after` with the method's result, a model."""

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        model = method(*args, **kwargs)
        after(model)
        return model

    return watched
