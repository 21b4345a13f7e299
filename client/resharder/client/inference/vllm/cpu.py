"""Two silent bugs of vLLM's CPU build, worked around (seen in 0.26, 0.28 and 0.32: wrong logits after a reload, no error).

1. The unquantised MoE method packs its experts only while it has no kernel, so that a reload leaves them unpacked for a kernel
   that reads them as packed.
2. A tied lm_head shares the embedding's parameter but owns a packed copy of it, which a reload of the embedding does not renew.
"""

from collections import defaultdict
from typing import Any

import torch


def before_reload(model: torch.nn.Module) -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def after_reload(model: torch.nn.Module) -> None:
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
