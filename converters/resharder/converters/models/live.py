"""A process's own tensors by name, found in its model again for each version.

Trainers exchange parameters: `load_state_dict(assign=True)`, `fully_shard`, a layer that is replaced, `to()` with overwriting. An
object that was kept from `attach` on would have the values of that time for ever.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from resharder.converters.errors import LayoutError
from resharder.converters.models.tensor_io import LookedUp
from torch.distributed.tensor import DTensor

_SHOWN = 4
_END = object()

Find = Callable[[], Mapping[str, torch.Tensor]]
"""Returns all tensors of a model by name. It may call `state_dict`, whose hook of FSDP2 shards gathered parameters again."""


class LocalTensors(LookedUp):
    """This rank's part of each tensor: parameters as `find_again` found them, buffers as they are at each access.

    torch.nn.Module keeps its parameters, but creates new buffers when it casts or moves them. Float16Module casts the fp32
    `expert_bias` of megatron-core's routers, which restore fp32 in their next forward pass and in `state_dict`
    (transformer/moe/router.py, `_maintain_float32_expert_bias`). FSDP moves a DTensor to other memory at its first forward pass.
    """

    def __init__(self, find: Find, found: Mapping[str, torch.Tensor], names: Iterable[str], roots: Iterable[torch.nn.Module]):
        """Take the tensors of a layout.

        Args:
            find: Finds the model's tensors.
            found: What it has returned.
            names: Names of the layout's tensors. Another name in `found` of the same memory is one that must keep it.
            roots: Modules that have the tensors; none for a state dict.
        """
        super().__init__(names, self._look_up)
        self._find, self._roots = find, list(roots)
        self._forms = {name: _form(tensor) for name, tensor in found.items()}
        kept = {memory_of(found[name]): name for name in self}
        self._same = {
            name: kept[memory] for name, tensor in found.items() if (memory := memory_of(tensor)) in kept and name not in self
        }
        self._bind(found)

    def find_again(self) -> None:
        """Find the tensors in the model again. Fast if no parameter and no module of the model was exchanged.

        Raises:
            LayoutError: Tensors are gone, new, elsewhere or of another form; the message names them.
        """
        if self._is_as_bound():
            return
        found = self._find()
        wrong = [*self._differences(found)]
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise LayoutError(f"the model is not as it was attached: {'; '.join(wrong[:_SHOWN])}{more}")
        self._bind(found)

    def _differences(self, found: Mapping[str, torch.Tensor]) -> Iterable[str]:
        for name, form in self._forms.items():
            if name not in found:
                yield f"{name} is gone: attach again after you change the model"
            elif (now := _form(found[name])) != form:
                after = " after fully_shard or parallelize_module" if "mesh" in now.keys() - form.keys() else " again"
                yield f"{name} was {_text(form)}, and is {_text(now)}: attach{after}"
        for name in found.keys() - self._forms.keys():
            yield f"{name} is new: attach again after you change the model"
        for name, kept in self._same.items():
            if name in found and kept in found and memory_of(found[name]) != memory_of(found[kept]):
                yield f"{name} no longer shares the memory of {kept}: tie them again (`model.tie_weights()`), or attach again"

    def _bind(self, found: Mapping[str, torch.Tensor]) -> None:
        modules = [module for root in self._roots for module in root.modules()]
        self._modules, self._kept = modules, [*_contents(modules)]
        buffers = {id(value): (module, key) for module in modules for key, value in module._buffers.items() if value is not None}
        self._buffers = {name: buffers[id(found[name])] for name in self if id(found[name]) in buffers}
        placed = {id(value) for value in self._kept} | buffers.keys()
        self._unplaced = any(id(tensor) not in placed for tensor in found.values())  # of a state dict, or made by its hooks
        self._found = {name: found[name] for name in self}

    def _is_as_bound(self) -> bool:
        return not self._unplaced and all(map(is_, _contents(self._modules), self._kept))

    def _look_up(self, name: str) -> torch.Tensor:
        if name in self._buffers:
            module, key = self._buffers[name]
            return local_of(module.state_dict(keep_vars=True)[key])
        return local_of(self._found[name])


def _contents(modules: list[torch.nn.Module]) -> Iterator[object]:
    """Yield the name and object of each parameter and child, then `_END`.

    There may be many thousands: no line of Python for each, and one pass, as most of the time is that of memory out of the cache.
    """
    flat = chain.from_iterable
    return chain(flat(flat(map(dict.items, flat(map(attrgetter("_parameters", "_modules"), modules))))), (_END,))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself; the memory is shared."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # with gradients, each call returns another tensor
        return tensor.to_local()


def memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory."""
    local = local_of(tensor)
    if not local.numel():
        return (id(tensor),)
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(local.shape), local.stride()


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what decides which elements of which tensor are in a process's memory."""
    form: dict[str, Any] = {"dtype": tensor.dtype, "shape": tuple(tensor.shape)}
    if isinstance(tensor, DTensor):
        return form | {"mesh": tensor.device_mesh, "placements": tensor.placements}
    kind = type(tensor)
    return form | ({} if kind is torch.nn.Parameter or kind is torch.Tensor else {"kind": kind.__name__})


def _text(form: Mapping[str, Any]) -> str:
    over = f" with {list(form['placements'])} over a mesh of {tuple(form['mesh'].shape)}" if "mesh" in form else ""
    return f"{form.get('kind', '')} {form['dtype']} {list(form['shape'])}{over}".strip()
