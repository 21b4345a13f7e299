"""The config of a transformers model in memory, compared with the one that it is attached with.

Servers compute as the attached config says. Compared are the fields that change what a model computes without changing a shape.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from resharder.converters.allowances import VARIABLE, refuse
from resharder.converters.architectures.checkpoint import HFConfig
from resharder.converters.architectures.wrapped import language_config
from resharder.converters.errors import LayoutError
from resharder.converters.models.hf_names import Model

COMPUTED_WITH = frozenset(
    {
        "activation_function", "alibi", "attention_multiplier", "attention_out_multiplier", "attn_logit_softcapping", "clip_qkv",
        "embedding_multiplier", "emb_scale", "experts_per_token", "final_logit_softcapping", "full_attention_interval",
        "hidden_act",
        "hidden_activation", "key_multiplier", "layer_norm_eps", "layer_norm_epsilon", "layer_types", "lm_head_multiplier",
        "logit_scale", "logits_scaling", "max_window_layers", "mlp_only_layers", "moe_layer_freq", "n_group", "no_rope_layers",
        "norm_eps", "norm_epsilon", "norm_topk_prob", "num_experts_per_tok", "parallel_residual", "partial_rotary_factor",
        "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_interleave", "rope_local_base_freq",
        "rope_parameters", "rope_scaling", "rope_theta", "rotary_dim", "rotary_emb_base", "rotary_pct", "routed_scaling_factor",
        "scale_attn_weights", "scoring_func", "sliding_window", "sliding_window_pattern", "swiglu_limit", "tie_word_embeddings",
        "topk_group", "topk_method", "use_bidirectional_attention", "use_parallel_residual", "use_qk_norm", "use_sliding_window",
        "vocab_size",
        "deepstack_visual_indexes", "fullatt_block_indexes", "mm_tokens_per_image", "num_heads", "spatial_merge_size",
        "tokens_per_second", "window_size",
    }
)  # fmt: skip
"""Fields of config.json that change what a model computes. Others are of tokens, training, generation and files."""


def refuse_other_config(model: Model, config: HFConfig) -> None:
    """Raise LayoutError if a transformers model's own config says otherwise than `config`, unless the environment allows it.

    Models without such a config are not compared, nor is one of another model type: names and shapes tell those apart.
    """
    own = _own_config(model)
    if own is None:
        return
    text, kind = config.get("text_config"), own.to_dict().get("model_type")
    if isinstance(text, Mapping) and kind == text.get("model_type"):
        config = language_config(config)
    if kind != config.get("model_type"):
        return
    if differing := list(_differences(_completed(own, config), own.to_dict())):
        error = LayoutError(
            f"{'; '.join(differing)}: servers compute as the config says, so their log-probabilities would differ from the "
            f"trainer's. Attach with the model's own config, or set {VARIABLE}=config-mismatch"
        )
        refuse("config-mismatch", error)


def _differences(ours: HFConfig, theirs: HFConfig) -> Iterator[str]:
    for name in sorted(COMPUTED_WITH & theirs.keys() & ours.keys()):
        if not _same(ours[name], theirs[name]):
            yield f"{name} is {ours[name]!r} in the config, the model has {theirs[name]!r}"
    for part in ("text_config", "vision_config"):
        our_part, their_part = ours.get(part), theirs.get(part)
        if isinstance(our_part, Mapping) and isinstance(their_part, Mapping):
            yield from _differences(our_part, their_part)


def _own_config(model: Model) -> Any:
    """Return the transformers config of a model or of what it wraps; None if there is none."""
    if isinstance(model, Mapping):
        return None
    for module in _modules(model):
        config = vars(module).get("config")
        if callable(getattr(config, "to_dict", None)) and callable(getattr(type(config), "from_dict", None)):
            return config
    return None


def _modules(model: Model) -> Iterator[torch.nn.Module]:
    for part in [model] if isinstance(model, torch.nn.Module) else model:
        if isinstance(part, torch.nn.Module):
            yield from part.modules()


def _completed(own: Any, config: HFConfig) -> dict[str, Any]:
    """Return a config with the defaults and in the form of the model's class, or as it is if the class does not take it."""
    try:
        completed: dict[str, Any] = type(own).from_dict(dict(config)).to_dict()
    except Exception:  # transformers validates in many ways, and refuses what an older or a newer release has written
        return {name: value for name, value in config.items() if isinstance(value, int | float | str)}
    return completed


def _same(ours: Any, theirs: Any) -> bool:
    """Return whether two values are equal; in mappings, a field that only one has is not compared."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_same(ours[name], theirs[name]) for name in ours.keys() & theirs.keys())
    if isinstance(ours, float | int) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return list(ours) == list(theirs)
    return bool(ours == theirs)
