"""The base model under the wrappers of an engine that serves adapters.

vLLM with `--enable-lora` replaces modules of a loaded model by wrappers (`lora/layers`; 0.26 to 0.32). A wrapper has the module
as its child `base_layer`, and the adapters' tensors in attributes. The wrapper of experts also gives them a quantisation method
that keeps the former one as `old_quant_method`, and a prefix for the names of checkpoints.

Recordings, routes and inventories name modules as if there were no wrappers, so what is recorded before vLLM wraps a model holds
afterwards. `named_modules` reads a model, also while it runs. `without_wrappers` is for the engine's own code that looks up
modules, such as `load_weights`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_BASE, _REPLACED, _PREFIX = "base_layer", "old_quant_method", "lora_base_layer_prefix"


class BaseModule(NamedTuple):
    """A module of the base model."""

    path: str
    """Path from the model, without wrappers."""
    module: torch.nn.Module
    attributes: dict[str, Any]
    """The module's attributes, without parameters, buffers and modules."""


class _Wrapped(NamedTuple):
    """A wrapper in the place of a module, or of an object."""

    parent: torch.nn.Module
    name: str
    wrapper: torch.nn.Module
    base: Any


def join(path: str, name: str) -> str:
    """Return the path of `name` in `path`."""
    return f"{path}.{name}" if path else name


def base_modules(model: torch.nn.Module) -> Iterator[BaseModule]:
    """Yield each module of the base model once, in the order of `torch.nn.Module.named_modules`."""
    for path, module, wrapped in _walk("", model, False, set()):
        objects = {found.name: found.base for found in wrapped if not isinstance(found.base, torch.nn.Module)}
        yield BaseModule(path, module, vars(module) | objects)


def named_modules(model: torch.nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield path and module of each module of the base model, as `torch.nn.Module.named_modules` does."""
    for path, module, _ in _walk("", model, False, set() if remove_duplicate else None):
        yield path, module


def wrappers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the wrappers of adapters in a model, each once."""
    return list({id(w.wrapper): w.wrapper for w in _wrapped(model)}.values())


@contextmanager
def without_wrappers(model: torch.nn.Module) -> Iterator[None]:
    """Put the base model's modules in the place of their wrappers, and the wrappers back at exit. The model must not run."""
    wrapped = _wrapped(model)
    prefixes = [
        (attributes, attributes[_PREFIX]) for _, module in named_modules(model) if _PREFIX in (attributes := vars(module))
    ]
    for attributes, _ in prefixes:
        attributes[_PREFIX] = ""
    for parent, name, _, base in wrapped:
        if isinstance(base, torch.nn.Module):
            parent._modules[name] = base
        else:
            del parent._modules[name]
            vars(parent)[name] = base
    try:
        yield
    finally:
        for parent, name, wrapper, _ in wrapped:
            vars(parent).pop(name, None)
            parent._modules[name] = wrapper
        for attributes, prefix in prefixes:
            attributes[_PREFIX] = prefix


def _wrapped(model: torch.nn.Module) -> list[_Wrapped]:
    return [found for _, _, wrapped in _walk("", model, False, set()) for found in wrapped]


def _walk(
    path: str, module: torch.nn.Module, inside: bool, seen: set[int] | None
) -> Iterator[tuple[str, torch.nn.Module, list[_Wrapped]]]:
    """Yield path, module and wrapped children of each module of the base model; `inside` a wrapper, methods may be replaced."""
    if seen is not None:
        if id(module) in seen:
            return
        seen.add(id(module))
    wrapped, children = list[_Wrapped](), list[tuple[str, torch.nn.Module, bool]]()
    for name, child in module._modules.items():
        if child is None:
            continue
        base, below = _base(child, inside)
        if base is not child:
            wrapped.append(_Wrapped(module, name, child, base))
        if isinstance(base, torch.nn.Module):
            children.append((name, base, below))
    yield path, module, wrapped
    for name, base, below in children:
        yield from _walk(join(path, name), base, below, seen)


def _base(module: torch.nn.Module, inside: bool) -> tuple[Any, bool]:
    """Return what a wrapper replaces, else the module; and whether that is inside a wrapper."""
    found: Any = module
    while isinstance(found, torch.nn.Module):
        if (base := found._modules.get(_BASE)) is not None:
            inside = True
        elif not inside or (base := getattr(found, _REPLACED, None)) is None:
            break
        found = base
    return found, inside
