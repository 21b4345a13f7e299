"""A vLLM plugin for tests: MXFP8 linear layers and gpt-oss' MXFP4 experts on any CPU; weights stay as they were loaded.

As shipped, the CPU build has no MXFP8, for which this takes vLLM's own emulation, and needs AMX for MXFP4, for which kernels here
dequantise and call `F.linear`.
"""

HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1


def register() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.platforms import PlatformEnum

    linear._POSSIBLE_MXFP8_KERNELS[PlatformEnum.CPU] = [linear.EmulationMxfp8LinearKernel]
    cpu_moe.prepare_mxfp4_moe_layer_for_cpu = lambda *tensors: tensors
    cpu_moe.CPUExpertsMxfp4._supports_current_device = staticmethod(lambda: True)
    cpu_moe.CPUExpertsMxfp4.apply = apply_experts


def dequantised(packed, scales):  # type: ignore[no-untyped-def]
    """`packed`: two elements in each byte, the lower half first. `scales`: E8M0 of 32 elements."""
    import torch

    values = torch.tensor(HALVES + tuple(-half for half in HALVES))
    whole = torch.stack([values[(packed & 15).long()], values[(packed >> 4).long()]], -1).flatten(-2)
    return whole * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def apply_experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *_, **__):  # type: ignore[no-untyped-def]
    """Gates and ups are interleaved. Scales and biases are those of the kernel's own configuration, as in vLLM's kernels."""
    import torch
    from torch.nn.functional import linear

    output.zero_()
    biases, limit, alpha = (self.quant_config.w1_bias, self.quant_config.w2_bias), 7.0, 1.702
    for expert in topk_ids.unique().tolist():
        token, place = torch.where(topk_ids == expert)
        both = linear(hidden_states[token].float(), dequantised(w1[expert], self.w1_scale[expert]), biases[0][expert])
        gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
        there = linear(
            gate * torch.sigmoid(alpha * gate) * (up + 1), dequantised(w2[expert], self.w2_scale[expert]), biases[1][expert]
        )
        output.index_add_(0, token, (there * topk_weights[token, place, None]).to(output.dtype))
