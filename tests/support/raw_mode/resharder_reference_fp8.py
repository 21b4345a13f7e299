"""A plugin of vLLM and SGLang for tests: FP8 blocks on any CPU, and in vLLM experts in FP8 by channel.

Kernels dequantise and call `F.linear`; weights stay as they were loaded. As shipped, both need AMX for FP8 blocks on a CPU, and
pack their weights, and vLLM has no kernel for experts by channel.
"""

import sys

BLOCK = 128


def register() -> None:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel as Linear
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    Linear.is_supported = classmethod(lambda cls, compute_capability=None: (True, None))
    Linear.process_weights_after_loading = lambda self, layer: None
    Linear.apply_weights = apply_linear
    cpu_moe.prepare_fp8_moe_layer_for_cpu = lambda w13, w2: (w13, w2)
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)
    cpu_moe.CPUExpertsFp8._supports_routing_method = staticmethod(lambda *_: True)
    cpu_moe.CPUExpertsFp8._supports_quant_scheme = staticmethod(supports)
    cpu_moe.CPUExpertsFp8.apply = apply_experts


def register_with_sglang() -> None:
    """SGLang then processes loaded weights as on a GPU without DeepGEMM's casts: on one H200, for example."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.quantization import fp8

    fp8._is_cpu = False
    fp8.dispatch_w8a8_block_fp8_linear = lambda **_: sglang_linear
    fp8.Fp8MoEMethod.create_moe_runner = lambda self, layer, moe_runner_config: None
    fp8.Fp8MoEMethod.apply = apply_sglang_experts


def supports(weight_key, activation_key):  # type: ignore[no-untyped-def]
    from vllm.model_executor.layers.quantization.utils import quant_utils

    blocks = quant_utils.kFp8Static128BlockSym, quant_utils.kFp8Dynamic128Sym
    channels = quant_utils.kFp8StaticChannelSym, quant_utils.kFp8DynamicTokenSym
    return (weight_key, activation_key) in (blocks, channels)


def dequantised(weight, scales):  # type: ignore[no-untyped-def]
    """`scales`: one for each block, or one column of one for each row."""
    import torch

    rows, columns = weight.shape
    if scales.shape == (rows, 1):
        return (weight.to(torch.float32) * scales).to(torch.bfloat16)
    whole = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.to(torch.float32) * whole).to(torch.bfloat16)


def apply_linear(self, layer, x, bias=None, **_):  # type: ignore[no-untyped-def]
    from torch.nn.functional import linear

    return linear(x, dequantised(layer.weight, layer.weight_scale_inv).to(x.dtype), bias)


def apply_experts(  # type: ignore[no-untyped-def]
    self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map=None, *_, **__
):
    """The scales are those of the kernel's own configuration, as in vLLM's kernels.

    `expert_map`: number of each expert in this worker; -1 for other workers' experts.
    """
    output.zero_()
    topk_ids = topk_ids if expert_map is None else expert_map[topk_ids]
    add_experts(
        output,
        hidden_states,
        lambda expert: dequantised(w1[expert], self.w1_scale[expert]),
        lambda expert: dequantised(w2[expert], self.w2_scale[expert]),
        topk_weights,
        topk_ids,
    )


def add_experts(output, hidden_states, first, second, topk_weights, topk_ids):  # type: ignore[no-untyped-def]
    """Add the answers of experts. `first`, `second`: functions that return an expert's gate with up, and its down."""
    import torch
    from torch.nn.functional import linear, silu

    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, place = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[token], first(expert)).chunk(2, -1)
        there = linear(silu(gate) * up, second(expert))
        output.index_add_(0, token, (there * topk_weights[token, place, None]).to(output.dtype))


def sglang_linear(input, weight, block_size, weight_scale, input_scale=None, bias=None):  # type: ignore[no-untyped-def]
    from torch.nn.functional import linear

    return linear(input, dequantised(weight, weight_scale).to(input.dtype), bias)


def apply_sglang_experts(self, layer, dispatch_output):  # type: ignore[no-untyped-def]
    import torch
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    topk_weights, topk_ids, _ = dispatch_output.topk_output
    output = torch.zeros_like(dispatch_output.hidden_states)
    add_experts(
        output,
        dispatch_output.hidden_states,
        lambda expert: dequantised(layer.w13_weight[expert], layer.w13_weight_scale_inv[expert]),
        lambda expert: dequantised(layer.w2_weight[expert], layer.w2_weight_scale_inv[expert]),
        topk_weights,
        topk_ids,
    )
    return StandardCombineInput(hidden_states=output)
