"""megatron-core's GPTModel of a Llama or Qwen2, on ranks with or without a GPU."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig


def build(hf: Any) -> Any:
    """Return this rank's part of the model of a transformers config, with random weights. All ranks are tensor-parallel."""
    on_cpus()
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,  # these three are kernels for GPUs
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
    )


def token_losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the negative log-probability of each token after the first, [batch, length - 1]."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    future = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    losses: torch.Tensor = model(inputs, torch.arange(length).expand(batch, length), future, labels=labels)
    return losses


def on_cpus() -> None:
    """Replace the two calls of CUDA that megatron-core makes for models on CPUs too. With GPUs this does nothing."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"
        CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
