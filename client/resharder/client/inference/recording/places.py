"""Places of tensors in a model: parameters, buffers, and every object that its modules reach.

Kernels have objects of their own (a quantisation method, its configuration with scales, a fused-experts
object), and a reload creates them anew, around tensors that no later install updates. `put_back` restores
the tensors from before the reload in these objects, with the new values: parameters and the objects that
read them share memory again, and addresses in captured CUDA graphs stay valid.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from resharder.client.inference.recording.wrappers import base_modules, join, wrappers

_DEPTH = 12
_NO_WEIGHTS = ("_parameters", "_buffers", "_modules", "kv_cache", "lora_manager")
_ADAPTERS = "vllm.model_executor.layers.fused_moe.experts.lora_context"
_SKIPPED = ("vllm.config", "vllm.distributed", "vllm.compilation", "vllm.platforms", "vllm.transformers_utils", _ADAPTERS)
# Libraries whose objects have no weights, or only workspaces that their kernels write.
_OPAQUE = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "flashinfer", "triton", "transformers", "tokenizers", "ray"}
Put = Callable[[Any], None]


class TensorPlace(NamedTuple):
    """A reference to a tensor. A tensor with several references has several places."""

    path: str
    """Path from the model, e.g. `layers.0.weight`; tensors outside of parameters have the keys and names on the way."""
    module: str
    """Path of the module from which it is reached."""
    tensor: torch.Tensor
    parameter: bool
    registered: bool
    """Whether it is a parameter or a buffer of a module of the model."""
    put: Put | None
    """Replaces the reference; `None` if the object that has it cannot be changed."""
    memory: torch.Tensor
    """View of the tensor's elements, which stay those of this moment if the tensor gets others (`.data = …`)."""


def places(model: torch.nn.Module) -> Iterator[TensorPlace]:
    """Yield the places of parameters and buffers first, then those in other attributes of modules.

    Each object is searched once, on the shortest way from the first module that reaches it; wrappers of adapters never.
    """
    modules = list(base_modules(model))
    for path, module, _ in modules:
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    setter = partial(kind.__setitem__, name)
                    yield TensorPlace(join(path, name), path, tensor, kind is module._parameters, True, setter, tensor.data)
    seen = {id(module) for module in model.modules()}
    for path, module, found in modules:
        attributes = [
            (join(path, name), value, partial(object.__setattr__, module, name))
            for name, value in found.items()
            if name not in _NO_WEIGHTS
        ]
        for where, value, put in _inside(attributes, seen):
            if isinstance(value, torch.Tensor):
                yield TensorPlace(where, path, value, False, False, put, value.data)


def sealed_modules(model: torch.nn.Module) -> frozenset[str]:
    """Return the paths of modules that reach an object of C++ (`torch.ScriptObject`), whose tensors cannot be found."""
    seen = {id(module) for module in model.modules()}
    sealed = set()
    for path, _, found in base_modules(model):
        attributes = [(name, value, None) for name, value in found.items() if name not in _NO_WEIGHTS]
        if any(isinstance(value, torch.ScriptObject) for _, value, _ in _inside(attributes, seen)):
            sealed.add(path)
    return frozenset(sealed)


def adapter_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors of the wrappers of adapters, which no version of the base model has."""
    if not (found := wrappers(model)):
        return []
    base = {memory_of(place.tensor) for place in places(model)}
    seen = {id(module) for module in model.modules()}
    attributes = [(name, value, None) for wrapper in found for name, value in vars(wrapper).items() if name != "_modules"]
    return [v for _, v, _ in _inside(attributes, seen) if isinstance(v, torch.Tensor) and memory_of(v) not in base]


def _inside(found: Iterable[tuple[str, Any, Put | None]], seen: set[int]) -> Iterator[tuple[str, Any, Put | None]]:
    """Yield the tensors in these objects, and objects of C++."""
    queue = deque((path, value, put, _DEPTH) for path, value, put in found)
    while queue:
        path, value, put, depth = queue.popleft()
        if isinstance(value, torch.Tensor | torch.ScriptObject):
            yield path, value, put
        elif depth and id(value) not in seen and not isinstance(value, str | bytes | int | float | type | None):
            seen.add(id(value))
            queue.extend((path + name, inner, place, depth - 1) for name, inner, place in _parts(value, put))


def _parts(value: Any, put: Put | None) -> Iterator[tuple[str, Any, Put | None]]:
    """Yield the name, the value and the setter of each part of an object."""
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield f"[{key!r}]", inner, partial(value.__setitem__, key)
    elif isinstance(value, list | deque):
        for i, inner in enumerate(list(value)):
            yield f"[{i}]", inner, partial(value.__setitem__, i)
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            yield f"[{i}]", inner, partial(_put_in_tuple, value, i, put) if put is not None else None
    elif isinstance(value, set | frozenset):
        yield from ((f"[{i}]", inner, None) for i, inner in enumerate(list(value)))
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, MethodType):
        yield "<self>", value.__self__, None
    elif isinstance(value, partial):
        yield "<function>", value.func, None
        yield from ((f"<{i}>", inner, None) for i, inner in enumerate(value.args))
        yield from ((f"<{name}>", inner, partial(value.keywords.__setitem__, name)) for name, inner in value.keywords.items())
    elif _is_searched(value):
        for name in _names(value):
            inner = getattr(value, name, None) if name not in getattr(value, "__dict__", {}) else value.__dict__[name]
            yield f".{name}", inner, partial(object.__setattr__, value, name)  # frozen dataclasses too


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any, Put | None]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"<{name}>", cell.cell_contents, partial(_put_in_cell, cell)
        except ValueError:  # an empty cell
            continue
    yield from ((f"<default {i}>", inner, None) for i, inner in enumerate(function.__defaults__ or ()))
    defaults = function.__kwdefaults__ or {}
    yield from ((f"<{name}>", inner, partial(defaults.__setitem__, name)) for name, inner in defaults.items())


def _put_in_cell(cell: CellType, tensor: Any) -> None:
    cell.cell_contents = tensor


def _put_in_tuple(whole: tuple[Any, ...], index: int, put: Put, tensor: Any) -> None:
    """Replace the tuple by one with another item. Only the last replacement of several in one tuple remains."""
    items = [*whole[:index], tensor, *whole[index + 1 :]]
    put(type(whole)(*items) if hasattr(whole, "_fields") else type(whole)(items))


def _names(value: Any) -> dict[str, None]:
    """Return the attributes of an object: of its `__dict__`, and the slots of its classes."""
    names = dict.fromkeys(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names |= dict.fromkeys(name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))
    return names


def _is_searched(value: Any) -> bool:
    """Return whether to search an object. Modules that no module of the model owns are objects like others."""
    if isinstance(value, torch.nn.Module | SimpleNamespace):
        return True
    name = type(value).__module__
    return name.partition(".")[0] not in _OPAQUE and not name.startswith(_SKIPPED)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a key of the tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def put_back(model: torch.nn.Module, before: Iterable[TensorPlace]) -> dict[str, str]:
    """Put the tensors from before a reload back where the reload left others, with the new values.

    Memory of parameters and buffers is put back, and on a GPU that of all tensors, because captured graphs read it.

    Args:
        model: The model.
        before: The model's places before the reload.

    Returns:
        The module of each tensor that the reload created and that is still there, by path.

    Raises:
        ValueError: A tensor has another shape or dtype than before.
    """
    before = list(before)
    owned = {memory_of(place.memory) for place in before if place.registered and place.memory.numel()}
    _rebind(before, owned, list(places(model)))
    tensors = {place.path: place.tensor for place in before}
    now = list(places(model))
    changed = [
        (place, old)
        for place in now
        if place.put is not None
        and (old := tensors.get(place.path)) is not None
        and _geometry(old) != _geometry(place.tensor)
        and (memory_of(old) in owned or old.device.type != "cpu")
    ]
    read = {memory_of(place.tensor) for place in now}
    moved = {id(place.tensor): old for place, old in changed if _renewed(place, old, memory_of(old) in owned | read)}
    left = len(now) + 1
    while len(pending := [place for place in places(model) if id(place.tensor) in moved]) < left:  # a tuple takes one at a time
        left = len(pending)
        for place in pending:
            if place.put is not None:
                place.put(moved[id(place.tensor)])
    known = {memory_of(tensor) for tensor in tensors.values()}
    return {place.path: place.module for place in places(model) if memory_of(place.tensor) not in known}


def _rebind(before: Iterable[TensorPlace], owned: set[int], now: Sequence[TensorPlace]) -> None:
    """Give tensors to which a reload gave other memory (`.data = …`) their own from before, with the new values.

    vLLM's `replace_parameter` does that to parameters since 0.33 (`model_executor/utils.py`).
    """
    read = {memory_of(place.tensor) for place in now}
    reached = {id(place.tensor) for place in now}
    for place in before:
        old = place.memory
        if _geometry(old) == _geometry(place.tensor) or (memory_of(old) not in owned and old.device.type == "cpu"):
            continue
        if id(place.tensor) not in reached or _renewed(place, old, memory_of(old) in read):
            place.tensor.data = old


def _renewed(place: TensorPlace, old: torch.Tensor, in_use: bool) -> bool:
    """Give a tensor from before a reload the new values, and return whether it has them.

    Memory that is in use, such as that of a parameter, is not written: the reload has, if it belongs to it.
    """
    new = place.tensor
    if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
        raise ValueError(
            f"{place.path} was {old.dtype} {tuple(old.shape)} on {old.device}, and a reload made it {new.dtype} "
            f"{tuple(new.shape)} on {new.device}"
        )
    if not in_use:
        old.data.copy_(new)
    return not in_use or torch.equal(_integers(old), _integers(new))


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as signed integers, which compare bit for bit on every device."""
    return tensor.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
