"""Features of families for which megatron-core 0.16.1 has no argument, built from its own modules, with Megatron-Bridge's names.

Features with parameters change the specs before a model is built; other features are hooks on the built model.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TENorm, TERowParallelLinear
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import RowParallelLinear, reduce_from_tensor_model_parallel_region
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from resharder.converters.architectures.recipe import Extras


class PostNormed(RowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """Row-parallel linear with a norm of its output."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = WrappedTorchNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the norm of the linear's output, and the bias that the linear left to its caller, if any."""
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class TEPostNormed(TERowParallelLinear):  # type: ignore[misc]  # megatron-core has no types
    """`PostNormed` of TransformerEngine's modules."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = TENorm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the norm of the linear's output, and the bias that the linear left to its caller, if any."""
        output, bias = super().forward(x)
        return self.post_layernorm(output), bias


class WholeNorm(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """RMSNorm over all heads of [sequence, batch, heads, channels] at once. A rank has the gains of its own heads."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        super().__init__(config)
        self.channels, self.eps = heads * hidden_size, eps
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.weight = torch.nn.Parameter(torch.ones(divide(self.channels, self.tp_group.size()), dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` normed, in its own dtype. Computes in float32.

        A collective of the tensor-parallel ranks, which add up their sums of squares.
        """
        wide = x.float()
        squares = reduce_from_tensor_model_parallel_region(wide.pow(2).sum((-2, -1), keepdim=True), self.tp_group)
        scaled = wide * torch.rsqrt(squares / self.channels + self.eps) * self.weight.float().view(x.shape[-2:])
        return scaled.to(x.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the gains as sharded along dimension 0 by tensor parallelism. `metadata` must have `dp_cp_group`."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets, **groups)


def change_specs(layers: Iterable[ModuleSpec], extras: Extras, config: TransformerConfig, te: bool) -> None:
    """Insert modules that add parameters, and megatron-core's own attention if its scores are capped."""
    for layer in layers:
        attention, mlp = _parts(layer.submodules.self_attention), _parts(layer.submodules.mlp)
        if extras.post_norms:
            attention.linear_proj = mlp.linear_fc2 = TEPostNormed if te else PostNormed
        if extras.whole_norms:
            attention.q_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_attention_heads})
            attention.k_layernorm = ModuleSpec(WholeNorm, params={"heads": config.num_query_groups})
        if extras.attention_softcap:
            attention.core_attention = DotProductAttention


def _parts(spec: Any) -> Any:
    """Return the submodules of a spec. Since megatron-core 0.17 that of an MLP may be a function with them as an argument."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def change_model(chunk: GPTModel, extras: Extras) -> None:
    """Add hooks to a built chunk for features without parameters."""
    config = chunk.config
    if extras.embedding_scale and chunk.pre_process:
        chunk.embedding.register_forward_hook(lambda module, inputs, output: output * extras.embedding_scale)
    if extras.logit_softcap and chunk.post_process:
        logits = partial(_capped, extras.logit_softcap)
        chunk.output_layer.register_forward_hook(lambda module, inputs, output: logits(module, output))
    local = None
    if extras.local_rotary_base:
        cpu = config.use_cpu_initialization
        local = RotaryEmbedding(config.kv_channels, 1.0, rotary_base=extras.local_rotary_base, use_cpu_initialization=cpu)
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        if extras.attention_softcap:
            softmax = attention.core_attention.scale_mask_softmax
            softmax.register_forward_pre_hook(partial(_capped, extras.attention_softcap))
        if local and is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number):
            attention.register_forward_pre_hook(partial(_other_rotation, local), with_kwargs=True)


def _capped(cap: float, module: torch.nn.Module, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs or outputs with the first one bounded to (-cap, cap)."""
    return cap * torch.tanh(values[0] / cap), *values[1:]


def _other_rotation(
    rotary: RotaryEmbedding, module: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length = named["rotary_pos_emb"].shape[0] * module.config.context_parallel_size
    return inputs, named | {"rotary_pos_emb": rotary(length)}
