"""An SGLang plugin for tests: expert parallelism on a CPU, whose own kernel fails for experts of other ranks, numbered -1."""

import functools
import sys


def register() -> None:
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    import torch
    from resharder_reference_fp8 import add_experts
    from sglang.srt.layers.moe import fused_moe_native

    plain = fused_moe_native.moe_forward_native

    @functools.wraps(plain)
    def moe_forward_native(layer, x, topk_output, config):  # type: ignore[no-untyped-def]
        weights, ids, _ = topk_output
        if bool((ids >= 0).all()):
            return plain(layer, x, topk_output, config)
        output = torch.zeros_like(x)
        add_experts(output, x, lambda expert: layer.w13_weight[expert], lambda expert: layer.w2_weight[expert], weights, ids)
        return output

    fused_moe_native.moe_forward_native = moe_forward_native
