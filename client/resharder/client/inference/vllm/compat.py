"""Everything of vLLM's inside that the worker side touches, in one place; read against 0.26, 0.28 and 0.32.

Imported only where vLLM is running already.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from resharder.client.inference.control.fence import FENCED, Fence
from resharder.client.inference.engine import Loader
from resharder.client.inference.power import STAY_PAUSED
from resharder.client.inference.recording import inventory
from resharder.client.inference.vllm import cpu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload import layerwise as _layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

__all__ = [
    "BaseModelLoader",
    "DefaultModelLoader",
    "DummyModelLoader",
    "QuantizeMethodBase",
    "default_weight_loader",
    "register_model_loader",
]

_GRPC_SERVERS = ("vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server")


def is_drafter(vllm_config: Any, model_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return drafts_with_weights(speculative) and model_config is speculative.draft_model_config


def drafter_of(worker: Any) -> torch.nn.Module | None:
    """The drafter of its speculative decoding; only the last pipeline stage has one. GPUModelRunner calls its holder `drafter`
    (0.26 to 0.32), the second runner of 0.28 and later `speculator`. Raises LookupError where there should be one and is none."""
    from vllm.distributed import get_pp_group

    speculative = worker.vllm_config.speculative_config
    if not drafts_with_weights(speculative) or not get_pp_group().is_last_rank:
        return None
    runner = worker.model_runner
    model = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    if not isinstance(model, torch.nn.Module):
        raise LookupError(f"expected a drafter ({speculative.method}) in vLLM's {type(runner).__name__}, found {model!r}")
    return model


def watch_loading() -> None:
    """Has `reach` look at every model before and after its weights are loaded, whichever of vLLM's loaders does it."""
    for loader in (DefaultModelLoader, DummyModelLoader):
        loader.load_weights = _around(
            loader.load_weights, before=lambda _, model, *args, **kwargs: inventory.before_loading(model)
        )
    BaseModelLoader.load_model = _around(BaseModelLoader.load_model, after=inventory.after_loading)


def watch_workers(made: Callable[[Any], None]) -> None:
    """Has every worker that is made from now on handed to `made`."""
    from vllm.v1.worker.worker_base import WorkerBase

    plain = WorkerBase.__init__

    @functools.wraps(plain)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        made(self)

    WorkerBase.__init__ = watched


def let_stay_paused() -> None:
    """Has the engine core understand STAY_PAUSED among the tags to wake. vLLM's own `wake_up` lets the scheduler go on as soon
    as nothing sleeps any more (v1/engine/core.py; 0.26, 0.28 and 0.32), and a pause that comes after it may come a step too
    late. A core that was not told says "Tag … is not in sleeping tags" and wakes nothing."""
    from vllm.v1.engine.core import EngineCore

    plain = EngineCore.wake_up

    @functools.wraps(plain)
    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        if STAY_PAUSED not in (tags or ()):
            return plain(self, tags)
        self.model_executor.wake_up([tag for tag in tags or () if tag != STAY_PAUSED])
        return not self.model_executor.is_sleeping

    EngineCore.wake_up = wake_up


def fence_engine_core() -> None:
    """Have the engine core judge the calls that carry a token (fence.py), each together with what it asks for: the core takes one
    call after the other."""
    from vllm.v1.engine.core import EngineCore

    def resharder_fenced(self: Any, token: list[Any], method: str, args: list[Any]) -> Any:
        fence = self.__dict__.setdefault("_resharder_fence", Fence())
        refusal = fence.refuse(token)
        if method == "resume_scheduler":
            refusal = _agreed(self, refusal)
        return fence.refused(refusal) if refusal else getattr(self, method)(*args)

    setattr(EngineCore, FENCED, resharder_fenced)


def _agreed(core: Any, refusal: str) -> str:
    """The refusal, or that of another engine core. Cores of a data parallel MoE wait for each other in `resume_scheduler`
    (DPEngineCoreProc), so one that refused alone would block the others."""
    group = getattr(core, "dp_group", None)
    if group is None or core.engines_running:  # vLLM ignores a resumption of cores that run, or fails it
        return refusal
    from vllm.config import ParallelConfig

    anyone = ParallelConfig.has_unfinished_dp(group, bool(refusal))
    return refusal or ("another engine core refused it" if anyone else "")


def engines_are_here(vllm_config: Any) -> bool:
    """Whether every engine core runs on this host. Ray and --data-parallel-size-local put replicas on others."""
    parallel = vllm_config.parallel_config
    spread = parallel.data_parallel_backend == "ray" or parallel.data_parallel_size_local != parallel.data_parallel_size
    return parallel.data_parallel_size == 1 or not spread


def _around(method: Any, before: Callable[..., None] | None = None, after: Callable[[Any], None] | None = None) -> Any:
    if hasattr(method, "resharder"):
        return method

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = method(*args, **kwargs)
        if after is not None:
            after(result)
        return result

    watched.resharder = True  # type: ignore[attr-defined]
    return watched


def original_loader(tensor: torch.Tensor) -> Loader:
    """The tensor's own weight loader, without what the layerwise reload puts around it."""
    _name_loader(tensor)
    loader: Loader = _layerwise._get_original_loader(tensor)
    return loader


def _name_loader(tensor: torch.Tensor) -> None:
    """The layerwise reload asks each loader for its name (model_loader/reload/layerwise.py), which the partials of MiniMax-M2's
    norms do not have."""
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
    """Inside, a running model's parameters have the shapes they had before loading, on the meta device; then all is as before."""
    _begin_reload(model)
    try:
        yield
    finally:
        for module in model.modules():
            _put_back(module)
        _end_torchao(model)


@contextmanager
def reloading(model: torch.nn.Module, model_config: Any, modules: frozenset[str]) -> Iterator[None]:
    """vLLM's layerwise reload for `modules` alone: inside, feed `model.load_weights`; at the end they are processed.

    However it ends, no parameter stays on the meta device: what was not complete has its old values.
    """
    cpu.before_reload(model)
    _begin_reload(model)
    try:
        wanted = {id(module) for name, module in model.named_modules(remove_duplicate=False) if name in modules}
        for module in model.modules():
            if id(module) not in wanted:
                _put_back(module)
        with _DirectWrites(model):
            yield
        finalize_layerwise_reload(model, model_config)
    finally:
        for module in model.modules():
            _put_back(module)
        _end_torchao(model)
    cpu.after_reload(model)


class _DirectWrites(TorchFunctionMode):
    """Inside, what a model's loader copies into a parameter by itself (GPT-OSS: experts, sinks) goes through a weight loader: the
    layerwise reload knows of nothing else, and would keep the old values without a word."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._places = {
            parameter.untyped_storage()._cdata: (module, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.is_meta
        }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Under vLLM's own counter (reload/meta.py) a weight loader is running already.
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


def refuse_unsupported(vllm_config: Any) -> str:
    """Why this server cannot be followed; empty if it can."""
    parallel = vllm_config.parallel_config
    wrong = [
        what
        for what, on in (
            ("EPLB (--enable-eplb)", parallel.enable_eplb),
            ("elastic expert parallelism", getattr(parallel, "enable_elastic_ep", False)),
            ("LoRA (--enable-lora)", vllm_config.lora_config is not None),
        )
        if on
    ]
    wrong += [drafter] if (drafter := _foreign_drafter(vllm_config)) else []
    wrong += [front_end] if (front_end := ungated_front_end()) else []
    return f"Resharder does not install into servers with {' and '.join(wrong)}" if wrong else ""


def passes_kv(vllm_config: Any) -> bool:
    """Whether the engine gives KV cache to other engines, or takes theirs: made by one version, read by another, it is a mix."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_role in ("kv_producer", "kv_consumer", "kv_both")


def cannot_sleep(vllm_config: Any) -> str:
    """Why this engine would only pretend to sleep; empty if it can. The CPU worker always pretends (v1/worker/cpu_worker.py),
    and may: states and orders are then as they are elsewhere."""
    if vllm_config.device_config.device_type == "cpu" or vllm_config.model_config.enable_sleep_mode:
        return ""
    return "expected an engine with sleep mode: start vLLM with --enable-sleep-mode"


def ungated_front_end() -> str:
    """What answers requests in place of vLLM's Python API server, which alone loads endpoint plugins and so has the gate.

    VllmConfig does not say it (0.26 to 0.32): the Rust front end is chosen by environment, the gRPC server by an option of the
    command, which spawned processes inherit in `sys.argv` and forked ones as a module, or by being the program.
    """
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        return "the Rust front end (VLLM_USE_RUST_FRONTEND), which has no gate"
    program, *arguments = sys.argv or [""]
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    serves_grpc = any(name in sys.modules or name == main for name in _GRPC_SERVERS)
    if serves_grpc or ("vllm" in Path(program).parts and "--grpc" in _with_config_file(arguments)):
        return "the gRPC server (--grpc), which has no gate"
    return ""


def _with_config_file(arguments: list[str]) -> list[str]:
    """With the options of the YAML file that `--config` names, as vLLM's own parser reads it (utils/argparse_utils.py)."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if "--config" not in arguments[:-1]:
        return arguments
    file = arguments[arguments.index("--config") + 1]
    try:
        return [*arguments, *FlexibleArgumentParser(add_help=False).load_config_file(file)]
    except Exception:  # no file, no YAML: vLLM says so and does not start
        return arguments


def drafts_with_weights(speculative: Any) -> bool:
    """Whether this SpeculativeConfig, or None, makes vLLM load a second model."""
    return speculative is not None and str(speculative.method) not in ("ngram", "[ngram]", "suffix", "ngram_gpu")


def _foreign_drafter(vllm_config: Any) -> str:
    """A drafter whose weights are not the model's own MTP layers, so that no version has them."""
    speculative = vllm_config.speculative_config
    if not drafts_with_weights(speculative):
        return ""
    if str(speculative.method) != "mtp":
        return f"a drafter with weights of its own ({speculative.method}, {speculative.model})"
    if speculative.draft_model_config.model != vllm_config.model_config.model:
        return f"a drafter with a checkpoint of its own ({speculative.draft_model_config.model})"
    return ""
