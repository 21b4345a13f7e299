"""vLLM's layerwise reload of a running model (`model_loader/reload`; 0.26, 0.28 and 0.32).

A recording needs it for all modules, an install for some. Contains workarounds for two bugs of vLLM's CPU build.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from resharder.client.inference.engine import Loader
from resharder.client.inference.recording.wrappers import without_wrappers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload import layerwise as _layerwise


def original_loader(tensor: torch.Tensor) -> Loader:
    """Return the tensor's own weight loader, without the wrapper of the layerwise reload."""
    _name_loader(tensor)
    loader: Loader = _layerwise._get_original_loader(tensor)
    return loader


def defaults(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the module's parameters that vLLM sets itself if a checkpoint lacks them.

    These are the scales of KV caches, and what follows from the config, as in `DefaultModelLoader.track_weights_loading`.
    """
    if isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
        return frozenset(module._parameters)
    return frozenset(["input_scale_ub"]).intersection(module._parameters)


def _name_loader(tensor: torch.Tensor) -> None:
    """Give a `functools.partial` the `__name__` that the layerwise reload reads (`model_loader/reload/layerwise.py`).

    The loaders of MiniMax-M2's norms are such partials.
    """
    loader = getattr(tensor, "weight_loader", None)
    if isinstance(loader, functools.partial) and not hasattr(loader, "__name__"):
        loader.__name__ = "partial"  # type: ignore[attr-defined]


def _begin_reload(model: torch.nn.Module) -> None:
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                _name_loader(tensor)
    initialize_layerwise_reload(model)


@contextmanager
def format_of_load(model: torch.nn.Module) -> Iterator[None]:
    """Replace a running model's parameters by meta tensors of their shapes before loading; restore them at exit.

    A parameter of several modules stays one: the layerwise reload gives each module a tensor of its own, and a loader would leave
    a tied `lm_head` without values.
    """
    with without_wrappers(model):
        tied = _tied_parameters(model)
        _begin_reload(model)
        try:
            for (module, name), *others in tied:
                for other, its_name in others:
                    if name in module._parameters and its_name in other._parameters:
                        other._parameters[its_name] = module._parameters[name]
            yield
        finally:
            for module in model.modules():
                _put_back(module)
            _end_torchao(model)


def _tied_parameters(model: torch.nn.Module) -> list[list[tuple[torch.nn.Module, str]]]:
    """Return module and name of each parameter that several modules have, the parameter's together."""
    owners: dict[int, list[tuple[torch.nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append((module, name))
    return [places for places in owners.values() if len({id(module) for module, _ in places}) > 1]


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any, modules: frozenset[str]) -> Iterator[None]:
    """Reload some modules: the block calls `model.load_weights`, and the modules are post-processed at exit.

    At exit, also after an exception, no parameter is on the meta device; incompletely loaded ones get their old values back.

    Args:
        model: The running model.
        model_config: vLLM's configuration of the model.
        modules: Paths of the modules to reload.
    """
    with without_wrappers(model):
        selected = {module for name, module in model.named_modules(remove_duplicate=False) if name in modules}
        _before_reload_on_cpu(selected)
        _begin_reload(model)
        try:
            for module in model.modules():
                if module not in selected:
                    _put_back(module)
            with _DirectWrites(model):
                yield
            finalize_layerwise_reload(model, model_config)
        finally:
            for module in model.modules():
                _put_back(module)
            _end_torchao(model)
        _after_reload_on_cpu(model)


class _DirectWrites(TorchFunctionMode):
    """Route a model's own copies into parameters (GPT-OSS: experts, sinks) through a weight loader.

    The layerwise reload only tracks weight loaders, and would silently keep the old values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._places = {
            parameter.untyped_storage()._cdata: (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Under vLLM's own counter (reload/meta.py), a weight loader is already running.
        if function is torch.Tensor.copy_ and args[0].is_meta and _get_current_dispatch_mode() is None:
            place = self._places.get(args[0].untyped_storage()._cdata)
            if place is not None:
                self._load(*place, *args)
                return args[0]
        return function(*args, **(kwargs or {}))

    def _load(self, module: torch.nn.Module, name: str, target: torch.Tensor, source: torch.Tensor) -> None:
        parameter: Any = getattr(module, name)
        if original_loader(parameter) is not _copy_into:
            parameter.weight_loader = _copy_into
            parameter.weight_loader = _layerwise.make_online_process_loader(module, name)
        parameter.weight_loader(parameter, source, tuple(target.shape), target.stride(), target.storage_offset())


def _copy_into(
    param: torch.Tensor, loaded_weight: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> None:
    param.data.as_strided(shape, strides, offset).copy_(loaded_weight)


def _put_back(module: torch.nn.Module) -> None:
    info = _layerwise.LAYERWISE_INFO.get(module)
    if info is None or not info.can_load():
        return
    if info.kernel_tensors is not None:
        _layerwise._place_kernel_tensors(module, info)
    info.reset()


def _end_torchao(model: torch.nn.Module) -> None:
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def _before_reload_on_cpu(modules: Iterable[torch.nn.Module]) -> None:
    """Reset the kernel of unquantised MoE methods, so that a reload packs the experts again.

    The method packs experts only while it has no kernel. A reload would leave them unpacked, for a kernel
    that reads them as packed: wrong logits without an error in 0.26, 0.28 and 0.32.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in modules:
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _after_reload_on_cpu(model: torch.nn.Module) -> None:
    """Pack the weights of tied `lm_head` modules again.

    A tied `lm_head` shares the embedding's parameter but has its own packed copy, which a reload of the
    embedding does not update: wrong logits without an error in 0.26, 0.28 and 0.32.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    owners: dict[int, list[torch.nn.Module]] = defaultdict(list)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners[id(weight)].append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
