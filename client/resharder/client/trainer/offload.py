"""Offload and restore a trainer's state for a generation, bit for bit: memory, train modes and random number generators.

A model's memory moves to the host and back under the same tensors. Storages are emptied and filled again; the tensors remain.
Every view is valid again when its storage is: Megatron's DDP has parameters and gradients in flat buffers, of which buckets and
optimizers have views. Addresses change. Modes and generators are saved by functions that return a function that restores them.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from resharder.client.errors import UsageError
from resharder.converters.models.hf_names import Model, roots_of
from resharder.converters.models.live import local_of
from torch.distributed.fsdp import FSDPModule

_DEVICE = "cuda"
_BLOCK = 1 << 28  # bytes; torch rounds pinned memory up to a power of two, and keeps freed memory in a cache


class OffloadedMemory:
    """Emptied storages, with their content in pinned host memory. If the host lacks memory, nothing is changed."""

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        self._devices = {storage.device for storage in storages if storage.device.type == "cuda"}
        self.size_bytes = sum(size for _, size in self._sizes)
        self._synchronize()  # gradients and gathered parameters may be in use on other streams
        self._blocks = _host_blocks(self.size_bytes, pinned=bool(self._devices))
        for there, here in self._spans():
            here.copy_(there, non_blocking=True)
        self._synchronize()
        self._empty()

    def bring_back(self) -> None:
        """Restore the memory. May be repeated after torch.OutOfMemoryError, which leaves all storages empty."""
        try:
            for storage, size in self._sizes:
                storage.resize_(size)
        except BaseException:
            self._empty()
            raise
        for there, here in self._spans():
            there.copy_(here, non_blocking=True)
        self._synchronize()
        self._blocks = []

    def _empty(self) -> None:
        for storage, _ in self._sizes:
            storage.resize_(0)
        if self._devices:
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def _spans(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (part of a storage, part of a host block) of the same bytes."""
        blocks = iter(self._blocks)
        here = torch.empty(0, dtype=torch.uint8)
        for storage, _ in self._sizes:
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            while there.numel():
                here = here if here.numel() else next(blocks)
                size = min(there.numel(), here.numel())
                yield there[:size], here[:size]
                there, here = there[size:], here[size:]


def offload_memory(model: Model) -> OffloadedMemory:
    """Move parameters, gradients (Megatron's `main_grad` included) and buffers from GPUs to the host.

    Raises UsageError if their memory cannot be moved.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for module in (module for root in roots_of(model) for module in root.modules()):
        _refuse_fixed(module)
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, tensor in _tensors(model):
        storage = local_of(tensor).untyped_storage()
        if storage.device.type != _DEVICE or not storage.nbytes():
            continue
        if not storage.resizable():
            raise UsageError(f"{name}: torch cannot free its memory, because something else uses it too")
        storages[storage.data_ptr()] = storage
    return OffloadedMemory(list(storages.values()))


def _tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    named = list(model.items()) if isinstance(model, Mapping) else []
    for root in roots_of(model):
        named += [*root.named_parameters(), *root.named_buffers()]
    for name, tensor in named:
        for held in (tensor, tensor.grad, getattr(tensor, "main_grad", None)):
            if isinstance(held, torch.Tensor):
                yield name, held


def _refuse_fixed(module: torch.nn.Module) -> None:
    """Raise UsageError for memory that is used by its address: captured in a CUDA graph, or registered with NCCL."""
    config, ddp = getattr(module, "config", None), getattr(module, "ddp_config", None)
    graphs = getattr(config, "cuda_graph_impl", None) not in (None, "none")
    if graphs or getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False):
        raise UsageError("CUDA graphs fix the addresses of parameters, so these cannot be offloaded: use offload=False")
    if getattr(ddp, "nccl_ub", False):
        raise UsageError("nccl_ub registers the addresses of parameters, so these cannot be offloaded: use offload=False")


def _host_blocks(size: int, *, pinned: bool) -> list[torch.Tensor]:
    return [torch.empty(min(_BLOCK, size - start), dtype=torch.uint8, pin_memory=pinned) for start in range(0, size, _BLOCK)]


def keeping(model: Model | None) -> tuple[Callable[[], Callable[[], None]], ...]:
    """Return the functions that save the state of a trainer with this model."""
    return keep_rng, partial(eval_mode, roots_of(model) if model is not None else [])


def eval_mode(roots: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Set eval mode, and return a function that restores `training` of each module.

    A trainer may have frozen parts in eval mode.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    for root in roots:
        root.eval()
    return restore


def keep_rng() -> Callable[[], None]:
    """Save the generators of Python, numpy and torch, of the host and all GPUs, and Megatron's tracker, if there is one."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    restore_tracker = _keep_tracker()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        for number, state in enumerate(gpus):
            torch.cuda.set_rng_state(state, number)
        restore_tracker()

    return restore


def _keep_tracker() -> Callable[[], None]:
    """Save the tracker's states: tensors that it replaces or, with CUDA graphs, generators that it advances."""
    module: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker: Any = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)  # Megatron's function would create a tracker
    if tracker is None or not tracker.is_initialized():
        return lambda: None
    states = tracker.get_states()
    positions = {name: s.get_state() if isinstance(s, torch.Generator) else s.clone() for name, s in states.items()}

    def restore() -> None:
        for name, state in states.items():
            if isinstance(state, torch.Generator):
                state.set_state(positions[name])
        tracker.set_states({name: s if isinstance(s, torch.Generator) else positions[name] for name, s in states.items()})

    return restore
