"""A vLLM plugin for tests: experts under `--enable-lora` on the CPU, with their adapters.

As shipped, experts that may have adapters run on Triton's kernel, which needs a GPU. Here PyTorch runs them; weights stay as they
were loaded.
"""


def register() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    class AdaptedExpertsFp8(LoRAExpertsMixin, cpu_moe.CPUExpertsFp8):
        pass

    if not issubclass(cpu_moe.CPUExpertsFp8, LoRAExpertsMixin):
        cpu_moe.CPUExpertsFp8 = AdaptedExpertsFp8
    TritonExperts.apply = cpu_moe.CPUExpertsFp8.apply = apply


def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *_, **__):  # type: ignore[no-untyped-def]
    import torch
    from torch.nn.functional import linear, silu

    output.zero_()
    adapters = self._lora_context
    slots = torch.full((len(hidden_states),), -1)
    if adapters is not None:
        given = adapters.punica_wrapper.token_lora_indices
        slots[: len(given)] = given[: len(slots)]
    for expert in topk_ids.unique().tolist():
        token, place = torch.where(topk_ids == expert)
        x, chosen = hidden_states[token], slots[token]
        gate_up = linear(x, matrix(w1[expert], self.w1_scale, expert))
        for half, part in enumerate(gate_up.chunk(2, -1) if adapters is not None else ()):
            add(part, x, chosen, expert, adapters.w13_lora_a_stacked[half], adapters.w13_lora_b_stacked[half])
        gate, up = gate_up.chunk(2, -1)
        inner = silu(gate) * up
        there = linear(inner, matrix(w2[expert], self.w2_scale, expert))
        if adapters is not None:
            add(there, inner, chosen, expert, adapters.w2_lora_a_stacked[0], adapters.w2_lora_b_stacked[0])
        output.index_add_(0, token, (there * topk_weights[token, place, None]).to(output.dtype))


def add(to, x, slots, expert, a, b):  # type: ignore[no-untyped-def]
    """Add what the adapters of the tokens' slots make of `x`, in place."""
    for slot in slots[slots >= 0].unique().tolist():
        rows = slots == slot
        to[rows] += x[rows] @ a[slot, expert].T @ b[slot, expert].T


def matrix(weight, scales, expert):  # type: ignore[no-untyped-def]
    if weight.element_size() > 1:
        return weight
    from resharder_reference_fp8 import dequantised

    return dequantised(weight, scales[expert])
