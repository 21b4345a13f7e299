"""Megatron-Bridge's own Qwen3-VL over the megatron-core that is installed, with its tower, as `bridge_lora` has its adapters."""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from tests.support import bridge_lora, megatron_shim  # noqa: F401

# isort: split
import megatron.core  # noqa: F401
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from transformers import AutoConfig

_MODELS = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"
_PACKAGES = (
    "megatron.bridge",
    "megatron.bridge.utils",
    "megatron.bridge.models",
    "megatron.bridge.models.qwen_vl",
    _MODELS,
    "megatron.bridge.training",
    "megatron.bridge.training.utils",
)
_OLDER = ("enable_cuda_graph", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph")
_OLDER += ("cuda_graph_warmup_steps", "external_cuda_graph")


def qwen3_vl(name: str) -> Any:
    """A module of Bridge's Qwen3-VL."""
    assert bridge_lora.FOLDER is not None
    for package in _PACKAGES:
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [str(bridge_lora.FOLDER / package.replace(".", "/"))]
            sys.modules[package] = module
    vocabulary: Any = ModuleType("megatron.bridge.utils.vocab_utils")  # of which it takes one function, Megatron-LM's
    vocabulary.calculate_padded_vocab_size = lambda size, unit, tp: -(-size // (unit * tp)) * unit * tp
    sys.modules[vocabulary.__name__] = vocabulary
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None  # type: ignore[assignment]
    return import_module(f"{_MODELS}.{name}")


def build(config: dict[str, Any], tp: int) -> torch.nn.Module:
    """This rank's model, as Bridge's provider builds it from a config.json."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, create_gloo_process_groups=False)
    hf = AutoConfig.for_model(**config)
    text = hf.text_config
    transformer = qwen3_vl("transformer_config").Qwen3VLTransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.intermediate_size,
        layernorm_epsilon=text.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=text.vocab_size,
        should_pad_vocab=True,
        rotary_base=text.rope_parameters["rope_theta"],
        mrope_section=text.rope_parameters["mrope_section"],
        image_token_id=hf.image_token_id,
        video_token_id=hf.video_token_id,
        vision_start_token_id=hf.vision_start_token_id,
        hf_text_config=text,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        perform_initialization=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    for name in _OLDER:
        if not hasattr(transformer, name):
            setattr(transformer, name, False)
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    model: torch.nn.Module = qwen3_vl("model").Qwen3VLModel(transformer, spec, hf.vision_config)
    language: Any = model.language_model
    known = inspect.signature(GPTModel._postprocess).parameters  # newer releases have more, which are None here
    language._postprocess = lambda **given: GPTModel._postprocess(
        language, **{name: value for name, value in given.items() if name in known}
    )
    return model.eval()
