"""Local tensors of a process by name, looked up in its modules."""

from collections.abc import Iterable, Iterator, Mapping

import torch


class LocalTensors(Mapping[str, torch.Tensor]):
    """Mapping of names to tensors. Tensors that are buffers of `modules` are looked up at each access.

    torch.nn.Module keeps its parameters, but creates new buffers when it casts or moves them. Float16Module casts the fp32
    `expert_bias` of megatron-core's routers, which restore fp32 in their next forward pass and in `state_dict`
    (transformer/moe/router.py, `_maintain_float32_expert_bias`).
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
