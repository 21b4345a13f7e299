"""A process's local tensors by name, as its modules have them now."""

from collections.abc import Iterable, Iterator, Mapping

import torch


class LocalTensors(Mapping[str, torch.Tensor]):
    """`tensors`, some of them buffers of `modules`: those are looked up anew each time, in the state of the module that has them.

    torch.nn.Module keeps its parameters but makes new buffers when it casts or moves them. And Float16Module casts the fp32
    `expert_bias` of megatron-core's routers, which make it fp32 again in their next forward pass and whenever they are asked for
    their state (transformer/moe/router.py, `_maintain_float32_expert_bias`).
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], modules: Iterable[torch.nn.Module]):
        homes = {
            id(buffer): (module, name)
            for root in modules
            for module in root.modules()
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._tensors = dict(tensors)
        self._homes = {name: homes[id(tensor)] for name, tensor in tensors.items() if id(tensor) in homes}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._homes:
            return self._tensors[name]
        module, buffer = self._homes[name]
        tensor: torch.Tensor = module.state_dict(keep_vars=True)[buffer]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
