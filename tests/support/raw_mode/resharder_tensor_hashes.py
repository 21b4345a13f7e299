"""A plugin of vLLM and SGLang for tests and benchmarks: a worker hashes, when asked, every tensor that its model reaches. It uses
nothing of Resharder.

TENSOR_HASHES is a path of Unix sockets: the worker of rank N answers each connection at PATH-N with hashes by name, or with one
entry `error`. A hash covers dtype, shape, strides, and each of the tensor's words by its place.
`tests.support.tensor_hashes` asks.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Listener
from typing import Any

import torch

_ENGINES = ("vllm.model_executor", "sglang.srt.layers.quantization")  # whose objects are read too
_NOT_WEIGHTS = ("kv_cache", "workspace", "_k_scale", "_v_scale", "_q_scale", "_prob_scale")
_CHUNK = 1 << 24  # words
_ODD, _SHIFT = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D


def register() -> None:
    """Have every worker listen. A no-op without TENSOR_HASHES."""
    path = os.environ.get("TENSOR_HASHES")
    if not path:
        return
    from vllm.v1.worker.worker_base import WorkerBase

    if getattr(WorkerBase, "_hashes_tensors", False):
        return
    WorkerBase._hashes_tensors, plain = True, WorkerBase.__init__

    def initialise(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        _listen(self.get_model, f"{path}-{self.rank}")

    WorkerBase.__init__ = initialise


def register_with_sglang() -> None:
    """Have every scheduler process listen. A no-op without TENSOR_HASHES."""
    path = os.environ.get("TENSOR_HASHES")
    if not path or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import get_parallel

    if getattr(Scheduler, "_hashes_tensors", False):
        return
    Scheduler._hashes_tensors, plain = True, Scheduler.__init__

    def initialise(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        _listen(lambda: self.tp_worker.model_runner.model, f"{path}-{get_parallel().tp_rank}")

    Scheduler.__init__ = initialise


def _listen(get_model: Callable[[], torch.nn.Module], path: str) -> None:
    threading.Thread(target=_answer, args=(get_model, path), daemon=True).start()


def _answer(get_model: Callable[[], torch.nn.Module], path: str) -> None:
    with suppress(FileNotFoundError):  # left by a server before
        os.unlink(path)
    with Listener(path, "AF_UNIX") as listener:
        while True:
            with listener.accept() as asking, suppress(OSError):
                asking.send(_hashes(get_model))


def _hashes(get_model: Callable[[], torch.nn.Module]) -> dict[str, str]:
    try:
        model = get_model()
        if (device := next(model.parameters()).device).type == "cuda":
            torch.cuda.set_device(device)
        return {name: hash_of(tensor) for name, tensor in _reached(model) if tensor.device.type != "meta"}
    except Exception as error:
        return {"error": repr(error)}


def hash_of(tensor: torch.Tensor) -> str:
    """Return dtype, shape, strides and 64 bits of the content, in which each word counts by its place."""
    plain = tensor.detach()
    raw = plain.contiguous().reshape(-1).view(torch.uint8)
    if rest := -raw.numel() % 8:
        raw = torch.cat([raw, raw.new_zeros(rest)])
    words, total = raw.view(torch.int64), 0
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK]
        place = torch.arange(begin, begin + part.numel(), dtype=torch.int64, device=part.device)
        total += int(((part ^ (place * _SHIFT)) * (place * _ODD | 1)).sum())
    return f"{plain.dtype} {list(plain.shape)} {list(plain.stride())} {total & (1 << 64) - 1:016x}"


def _reached(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers, and the tensors in attributes of the model's modules and of the engine's objects there."""
    found = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    known, seen = {tensor.data_ptr() for tensor in found.values()}, set[int]()

    def walk(path: str, value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if value.numel() and value.data_ptr() not in known:
                found.setdefault(path, value)
            return
        if not depth or id(value) in seen:
            return
        if isinstance(value, list | tuple):
            inner: Any = enumerate(value)
        elif isinstance(value, dict):
            inner = value.items()
        elif type(value).__module__.startswith(_ENGINES) and not isinstance(value, torch.nn.Module):
            inner = getattr(value, "__dict__", {}).items()
        else:
            return
        seen.add(id(value))
        for key, each in list(inner):
            walk(f"{path}.{key}", each, depth - 1)

    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key not in ("_parameters", "_buffers", "_modules"):
                walk(f"{name}.{key}", value, 3)
    yield from ((name, tensor) for name, tensor in found.items() if not any(part in name for part in _NOT_WEIGHTS))
