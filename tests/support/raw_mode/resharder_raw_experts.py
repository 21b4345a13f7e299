"""A vLLM plugin for tests: the experts of unquantised MoE layers stay as they were loaded on the CPU, and PyTorch runs them.

As shipped, the CPU build packs them for a kernel of its own, and boxes cannot reach them.
"""


def register() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.process_weights_after_loading = lambda self, layer: None
    CPUUnquantizedExperts.apply = apply


def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, *_, **__):  # type: ignore[no-untyped-def]
    import torch
    from torch.nn.functional import linear, silu

    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, place = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, -1)
        weighted = linear(silu(gate) * up, w2[expert]) * topk_weights[token, place, None]
        output.index_add_(0, token, weighted.to(output.dtype))
