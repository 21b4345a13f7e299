"""Comparison of a trainer's model with config.json, for values that no shape shows: what the model computes with its tensors.

A server computes as config.json says. A model that computes otherwise has right tensors and other log-probabilities. Everything
that a recipe sets is compared here, so a new family needs nothing of its own; what is not compared is in NOT_COMPARED.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from resharder.converters.architectures.agreement import FIELDS, SWITCHES
from resharder.converters.architectures.recipe import Recipe

Values = Mapping[str, Any]
"""Attributes of Megatron's config and model."""


class Aspect(NamedTuple):
    """One thing that a model computes.

    Attributes:
        name: Its name in config.json, or its description.
        attributes: Attributes of Megatron's config or model that determine it together. Compared if the model has one of them.
        value: Function from these attributes to the value that is compared.
    """

    name: str
    attributes: tuple[str, ...]
    value: Callable[[Values], Any]


POST_NORM_RESIDUAL = "apply_residual_connection_post_layernorm"

DEFAULTS: Values = {
    "softmax_scale": None,
    "query_pre_attn_scalar": None,
    "softmax_type": "vanilla",
    "activation_func_clamp_value": None,
    "glu_linear_offset": 0.0,
    "window_size": None,
    "window_attn_skip_freq": None,
    "no_rope_freq": None,
    "qk_l2_norm": False,
    POST_NORM_RESIDUAL: False,
    "experimental_attention_variant": None,
    "heterogeneous_block_specs": False,
    "moe_router_topk": 2,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_load_balancing_type": "none",
    "moe_router_force_load_balancing": False,
    "moe_apply_probs_on_input": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_mup": False,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
    "moe_router_force_biased": None,
    "mrope_section": None,
}
"""megatron-core's defaults of attributes that recipes need not set, and Megatron-Bridge's of its own."""


def _single(name: str) -> Callable[[Values], Any]:
    return lambda values: values[name] or None


def _if_mup(name: str) -> Callable[[Values], Any]:
    """Return a factor of the maximal update parametrisation, which megatron-core has since 0.17."""
    return lambda values: float(values[name]) if values["use_mup"] else 1.0


def _scale(values: Values) -> float:
    """Return the factor of attention scores. Bridge's Gemma 2 has its inverse square."""
    if values["query_pre_attn_scalar"]:
        return float(values["query_pre_attn_scalar"] ** -0.5)
    return float(values["softmax_scale"] or values["kv_channels"] ** -0.5)


def _width(values: Values) -> int | None:
    """Return the number of earlier tokens in a window, which Bridge's Gemma 3 has without a pair, or None."""
    window = values["window_size"]
    width = window[0] if isinstance(window, Sequence) else window
    return width if width is not None and width >= 0 else None


def _windows(values: Values) -> tuple[bool, ...]:
    """Return whether attention has a window in each layer."""
    layers, given = range(1, values["num_layers"] + 1), values["window_attn_skip_freq"]
    if _width(values) is None:
        return tuple(False for _ in layers)
    if isinstance(given, Sequence):
        return tuple(bool(layer) for layer in given)
    return tuple(given is None or layer % given != 0 for layer in layers)


def _without_rotation(values: Values) -> bool:
    """Return whether some layer does without rotary embeddings. Every family rotates in all layers."""
    given = values["no_rope_freq"]
    return any(given) if isinstance(given, Sequence) else bool(given)


def _groups(values: Values) -> tuple[int, int] | None:
    """Return the number of groups of experts and of groups that a token may use; None if it may use all."""
    groups, chosen = values["moe_router_num_groups"], values["moe_router_group_topk"]
    return (groups, chosen) if groups and chosen and chosen < groups else None


def _scores(values: Values) -> str:
    """Return the kind of scores of experts. Sigmoid scores are normalised whatever `moe_router_pre_softmax` is."""
    if values["moe_router_load_balancing_type"] in ("sinkhorn", "quantile_balancing"):
        return str(values["moe_router_load_balancing_type"])
    if values["moe_router_score_function"] == "softmax":
        return "softmax of all experts" if values["moe_router_pre_softmax"] else "softmax of the chosen experts"
    return str(values["moe_router_score_function"])


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


_ATTENTION = (
    Aspect("query_pre_attn_scalar or head_dim, by which scores are scaled,", ("softmax_scale", "query_pre_attn_scalar"), _scale),
    Aspect("sliding_window", ("window_size",), _width),
    Aspect("layer_types, of windows,", ("window_attn_skip_freq",), _windows),
)
"""Aspects of attention that is not latent."""

_ALWAYS = (
    Aspect("rms_norm_eps", ("layernorm_epsilon",), _single("layernorm_epsilon")),
    Aspect("kind of norms", ("normalization",), _single("normalization")),
    Aspect("hidden_act", ("activation_func",), lambda values: values["activation_func"]),
    Aspect("swiglu_limit", ("activation_func_clamp_value",), _single("activation_func_clamp_value")),
    Aspect("offset of the MLP's linear half", ("glu_linear_offset",), _single("glu_linear_offset")),
    Aspect("kind of softmax", ("softmax_type",), _single("softmax_type")),
    Aspect("norm of queries and keys without gains", ("qk_l2_norm",), _single("qk_l2_norm")),
    Aspect("layers without rotary embeddings", ("no_rope_freq",), _without_rotation),
    Aspect("norms before residuals are taken", (POST_NORM_RESIDUAL,), _single(POST_NORM_RESIDUAL)),
    Aspect("kind of linear or sparse attention", ("experimental_attention_variant",), _single("experimental_attention_variant")),
    Aspect("blocks that differ from layer to layer", ("heterogeneous_block_specs",), _single("heterogeneous_block_specs")),
    Aspect("attn_logit_softcapping", ("attn_logit_softcapping",), _single("attn_logit_softcapping")),
    Aspect("final_logit_softcapping", ("final_logit_softcapping",), _single("final_logit_softcapping")),
    Aspect("factor of embeddings", ("use_mup", "mup_embedding_mult"), _if_mup("mup_embedding_mult")),
    Aspect("factor of logits", ("use_mup", "mup_output_mult"), _if_mup("mup_output_mult")),
)

_EXPERTS = (
    Aspect("num_experts_per_tok", ("moe_router_topk",), _single("moe_router_topk")),
    Aspect("(n_group, topk_group)", ("moe_router_num_groups", "moe_router_group_topk"), _groups),
    Aspect(
        "scores of experts (scoring_func, norm_topk_prob)",
        ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_load_balancing_type"),
        _scores,
    ),
    Aspect("routed_scaling_factor", ("moe_router_topk_scaling_factor",), lambda v: v["moe_router_topk_scaling_factor"] or 1.0),
    Aspect("random choice of experts", ("moe_router_force_load_balancing",), _single("moe_router_force_load_balancing")),
    Aspect("random scores of experts", ("moe_router_force_biased",), _single("moe_router_force_biased")),
    Aspect("experts' inputs weighted by their scores", ("moe_apply_probs_on_input",), _single("moe_apply_probs_on_input")),
)
"""Aspects of models with experts."""

_IMAGES = (Aspect("mrope_section", ("mrope_section",), lambda values: _listed(values["mrope_section"])),)
"""Aspects of models with a tower: how channels are divided over the positions of images. Those of text are the same in each."""


def aspects(recipe: Recipe) -> Iterator[Aspect]:
    """Yield what is compared for a recipe, rotary embeddings aside."""
    yield from _ALWAYS
    if not recipe.transformer.get("multi_latent_attention"):
        yield from _ATTENTION
    if recipe.transformer.get("num_moe_experts"):
        yield from _EXPERTS
    if recipe.tower is not None:
        yield from _IMAGES


def differences(recipe: Recipe, built: Values, same_function: Callable[[Any, Any], bool]) -> list[str]:
    """Return a sentence for each thing that a model computes otherwise than its config says.

    Args:
        recipe: Recipe of the config.
        built: Attributes of the trainer's model and of its config; absent ones are not compared.
        same_function: Whether an activation, by name or as a function, computes the same as another.
    """
    extras = asdict(recipe.extras)
    softcaps = {"attn_logit_softcapping": extras["attention_softcap"], "final_logit_softcapping": extras["logit_softcap"]}
    given = {**DEFAULTS, **softcaps, **recipe.transformer, **recipe.model}
    found = {**DEFAULTS, "num_layers": given["num_layers"], "kv_channels": given["kv_channels"], **_whole_windows(built, given)}
    sentences = []
    for aspect in aspects(recipe):
        present = [name for name in aspect.attributes if name in built]
        if not present:
            continue
        ours, theirs = aspect.value(given), aspect.value(found)
        same = same_function(ours, theirs) if aspect.attributes == ("activation_func",) else _same(aspect, ours, theirs)
        if not same:
            values = ", ".join(f"{name}={_shown(built[name])}" for name in present)
            sentences.append(f"{aspect.name} is {_shown(ours)} in the config, the model has {values}")
    return sentences


def _whole_windows(built: Values, given: Values) -> Values:
    """Return a model's attributes, with windows as they take effect in it.

    Bridge's Gemma models do without `window_attn_skip_freq`: Gemma 3 has a pattern, and Gemma 2's is part of its attention. A
    window that is as long as every sequence has no effect.
    """
    layers = range(1, given["num_layers"] + 1)
    changed: dict[str, Any] = {}
    if "interleaved_attn_pattern" in built:
        changed["window_attn_skip_freq"] = [layer % sum(built["interleaved_attn_pattern"]) != 0 for layer in layers]
    elif "attn_logit_softcapping" in built:
        changed["window_attn_skip_freq"] = given["window_attn_skip_freq"]
    window, longest = _width(given), built.get("max_sequence_length")
    if window is not None and longest and longest <= window + 1 and built.get("window_size", 0) is None:
        changed |= {name: given[name] for name in ("window_size", "window_attn_skip_freq")}
    return {**built, **changed}


def _same(aspect: Aspect, ours: Any, theirs: Any) -> bool:
    if aspect.attributes == ("window_size",) and ours is not None:
        return theirs in (ours, ours + 1)  # Megatron-Bridge counts the token itself twice
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return math.isclose(ours, theirs, rel_tol=1e-5)  # float32 rounds to 6e-8
    return bool(ours == theirs)


def _shown(value: Any) -> str:
    """Return a value as a message shows it."""
    return str(getattr(value, "__name__", None) or repr(value))


ROTARY = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
"""Arguments that are compared together: by the frequencies of the model's rotary embeddings and the scale of its scores."""

NOT_COMPARED: Mapping[str, tuple[str, ...]] = {
    "names and shapes of tensors show it": (
        "ffn_hidden_size",
        "vocab_size",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "linear_attention_freq",
        "moe_layer_freq",
        "moe_shared_expert_gate",
        "moe_router_enable_expert_bias",
        "moe_latent_size",
        "dsa_indexer_n_heads",
        "dsa_indexer_head_dim",
        "is_hybrid_model",
        "mamba_state_dim",
        "mamba_head_dim",
        "mamba_num_groups",
        "mamba_num_heads",
        "mtp_use_repeated_layer",
        "mtp_hybrid_override_pattern",
    ),
    "the layout accounts for it": ("layernorm_zero_centered_gamma",),
    "the same mathematics in other kernels or another order": (
        "apply_query_key_layer_scaling",
        "attention_backend",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "memory_efficient_layer_norm",
        "bias_dropout_fusion",
        "apply_rope_fusion",
        "use_fused_weighted_squared_relu",
        "fused_single_qkv_rope",
        "use_kitchen",
        "use_kitchen_attention",
        "kitchen_attention_backend",
        "moe_shared_expert_overlap",
        "moe_grouped_gemm",
        "moe_use_legacy_grouped_gemm",
        "moe_token_dispatcher_type",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8",
        "moe_deepep_num_sms",
        "moe_hybridep_num_sms",
        "batch_invariant_mode",
        "use_te_activation_func",
        "use_mamba_mem_eff_path",
        "mlp_chunks_for_prefill",
        "transformer_impl",
        "symmetric_ar_type",
        "cache_mla_latents",
        "cp_comm_type",
        "parallel_output",
        "scatter_embedding_sequence_parallel",
        "clone_scatter_output_in_embedding",
        "use_inference_optimized_layers",
        "inference_fuse_tp_communication",
        "flash_decode",
        "pre_process",
        "post_process",
        "pg_collection",
        "vp_stage",
        "transformer_layer_spec",
        "mtp_block_spec",
        "fused_residual_rmsnorm",
        "moe_pad_experts_for_cuda_graph_inference",
        "nccl_all_reduce_for_prefill",
        "inference_disable_triton_nvls_kernels",
        "inference_grouped_gemm_backend",
        "inference_moe_disable_fused_quant_kernels",
        "inference_moe_token_dispatcher_type",
        "use_transformer_engine_op_fuser",
        "high_priority_a2a_comm_stream",
        "moe_permute_fusion_into_hybridep",
        "moe_hybridep_num_blocks_permute",
        "moe_hybridep_num_blocks_unpermute",
        "moe_hybridep_num_sms_preprocessing",
        "moe_hybridep_pad_uneven_dispatch_inputs",
        "moe_flex_dispatcher_num_sms",
        "moe_ncclep_static_shape",
        "moe_ncclep_zero_copy",
        "mlp_chunks_for_training",
        "flash_attention_version",
        "dsa_kernel_backend",
    ),
    "the precision of a computation": (
        "fp32_residual_connection",
        "attention_softmax_in_fp32",
        "disable_bf16_reduced_precision_matmul",
        "moe_router_dtype",
        "activation_func_fp8_input_store",
        "fp8",
        "fp8_recipe",
        "fp8_param",
        "fp8_quantizer_factory",
        "fp8_margin",
        "fp8_interval",
        "fp8_amax_history_len",
        "fp8_amax_compute_algo",
        "fp8_wgrad",
        "fp8_dot_product_attention",
        "fp8_multi_head_attention",
        "tp_only_amax_red",
        "first_last_layers_bf16",
        "num_layers_at_start_in_bf16",
        "num_layers_at_end_in_bf16",
        "fp4",
        "fp4_recipe",
        "fp4_param",
        "fp4_quantizer_factory",
        "quant_recipe",
        "disable_parameter_transpose_cache",
        "fp8_output_proj",
        "mamba_training_ssm_states_dtype",
    ),
    "no effect outside of training steps": (
        "hidden_dropout",
        "attention_dropout",
        "mtp_loss_scaling_factor",
        "fp16_lm_cross_entropy",
        "calculate_per_token_loss",
        "qk_clip",
        "qk_clip_alpha",
        "qk_clip_threshold",
        "dsa_indexer_loss_coeff",
        "dsa_indexer_use_sparse_loss",
        "init_method",
        "output_layer_init_method",
        "init_method_std",
        "embedding_init_method",
        "embedding_init_method_std",
        "moe_router_bias_update_rate",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_input_jitter_eps",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "moe_layer_recompute",
        "mtp_detach_heads",
        "experimental_attention_variant_loss_scale_func",
        "moe_router_quantile_balancing_ema",
    ),
    "placement, memory, logs and CUDA graphs": (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "init_model_with_meta_device",
        "distribute_saved_activations",
        "log_max_attention_logit",
        "test_mode",
        "moe_per_layer_logging",
        "config_logger_dir",
        "enable_cuda_graph",
        "cuda_graph_use_single_mempool",
        "cuda_graph_retain_backward_graph",
        "cuda_graph_warmup_steps",
        "external_cuda_graph",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "inference_rng_tracker",
        "inference_sampling_seed",
        "hetereogenous_dist_checkpoint",
        "fine_grained_activation_offloading",
        "offload_modules",
        "min_offloaded_tensor_size",
        "max_sequence_length",
        "cuda_graph_modules",
        "inference_cuda_graph_scope",
        "moe_paged_stash",
        "moe_paged_stash_page_size",
        "moe_paged_stash_buffer_size_factor_cuda",
        "moe_paged_stash_buffer_size_factor_cpu",
        "fine_grained_offloading_max_inflight_offloads",
        "delay_offload_until_cuda_graph",
        "delta_offload_bytes_across_pp_ranks",
        "activation_offload_fraction",
    ),
    "tokens over an expert's capacity are dropped in training; a server drops none": (
        "moe_expert_capacity_factor",
        "moe_pad_expert_input_to_capacity",
        "moe_token_dropping",
        "moe_token_drop_policy",
        "moe_expert_rank_capacity_factor",
    ),
    "routing is replayed from recorded choices": ("moe_enable_routing_replay",),
    "megatron-core sets the two group options from it": ("moe_router_topk_limited_devices",),
    "no family has sparse attention, and its kind is compared": (
        "dsa_indexer_topk",
        "dsa_indexer_topk_freq",
        "dsa_indexer_skip_topk_offset",
        "dsa_indexer_rope_interleaved",
        "dsa_indexer_rotate_activation",
        "dsa_indexer_scoring_relu",
        "dsa_indexer_k_norm_epsilon",
        "dsa_indexer_k_norm_fp32",
    ),
    "it determines `mup_embedding_mult`, `mup_output_mult` or `softmax_scale`, which are compared": (
        "mup_width_mult",
        "mup_base_hidden_size",
        "mup_base_head_dim",
        "mup_attn_scale_power",
    ),
}
"""Arguments of TransformerConfig, MLATransformerConfig and GPTModel that `attach` does not compare, by the reason.

They are those of megatron-core 0.16 to 0.19, each of which lacks some. Those of ModelParallelConfig, from which they inherit, are
in PARALLELISM.
"""

PARALLELISM = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_comm_backend",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "max_seqlen_per_dp_cp_rank",
    "hybrid_context_parallel",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "moe_extended_tp",
    "perform_initialization",
    "use_cpu_initialization",
    "fp16",
    "bf16",
    "params_dtype",
    "timers",
    "finalize_model_grads_func",
    "grad_scale_func",
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "deterministic_mode",
    "enable_autocast",
    "autocast_dtype",
    "num_microbatches_with_partial_activation_checkpoints",
    "gradient_accumulation_fusion",
    "async_tensor_model_parallel_allreduce",
    "use_te_rng_tracker",
    "tp_comm_overlap",
    "tp_comm_bulk_wgrad",
    "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag",
    "tp_comm_overlap_rs",
    "tp_comm_overlap_rs_dgrad",
    "tp_comm_split_ag",
    "tp_comm_atomic_ag",
    "tp_comm_split_rs",
    "tp_comm_atomic_rs",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "tp_comm_overlap_disable_qkv",
    "tp_comm_overlap_disable_fc1",
    "tp_comm_bootstrap_backend",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "ep_overlap_early_attn_memory_release",
    "pipeline_dtype",
    "variable_seq_lengths",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "batch_p2p_sync",
    "use_ring_exchange_p2p",
    "deallocate_pipeline_outputs",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    "overlap_p2p_comm_warmup_flush",
    "microbatch_group_size_per_vp_stage",
    "mtp_standalone",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "_cpu_offloading_context",
    "cpu_offloading_activations",
    "cpu_offloading_weights",
    "cpu_offloading_double_buffering",
    "barrier_with_L1_time",
    "cpu_offloading_retain_pinned_cpu_buffers",
    "overlap_dispatch_backward_with_experts_wgrad",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_num_weight_shards",
)
"""Arguments of ModelParallelConfig. They concern placement, precision and communication; UNSUPPORTED has the others."""

_HALVES = "rows of gate and up alternate in blocks, tables have gate before up"
_SHARDS = "each rank has a part of a tensor-parallel shard alone"
UNSUPPORTED: Mapping[str, str] = {
    "moe_mlp_glu_interleave_size": _HALVES,
    "moe_shared_expert_glu_interleave_size": _HALVES,
    "use_grouped_gemm_for_dense_mlp": "its kernel may read rows of gate and up in alternating blocks",
    "use_grouped_gemm_for_shared_expert": "its kernel may read rows of gate and up in alternating blocks",
    "mla_down_proj_fusion": "one tensor holds two of a checkpoint, and is replicated",
    "moe_single_grouped_weight": "one tensor holds the weights of all experts of a rank",
    "moe_single_grouped_bias": "one tensor holds the biases of all experts of a rank",
    "gtp_weight_remat_size": _SHARDS,
    "expert_gtp_weight_remat_size": _SHARDS,
}
"""Arguments that arrange tensors in ways that no table has, with the way.

A model with another value than the default is refused.
"""


def known_arguments() -> frozenset[str]:
    """Return the arguments of megatron-core that are compared, refused or known not to matter."""
    aspects = {name for aspect in (*_ALWAYS, *_ATTENTION, *_EXPERTS, *_IMAGES) for name in aspect.attributes}
    listed = {name for names in NOT_COMPARED.values() for name in names}
    return frozenset({*aspects, *FIELDS, *SWITCHES, *ROTARY, *listed, *PARALLELISM, *UNSUPPORTED})


UNCOMPARED_FIELDS: Mapping[str, tuple[str, ...]] = {
    "tokens, labels, outputs and caches": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "id2label",
        "label2id",
        "problem_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "architectures",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "image_start_token_id",
        "image_end_token_id",
        "video_start_token_id",
        "video_end_token_id",
        "image_token_index",
        "boi_token_index",
        "eoi_token_index",
        "mm_tokens_per_image",
    ),
    "training only": ("attention_dropout", "initializer_range", "router_aux_loss_coef", "router_jitter_noise"),
    "the longest sequence, which a server bounds by `--max-model-len`": ("max_position_embeddings",),
    "no program computes with it": (
        "pretraining_tp",
        "_sliding_window_pattern",
        "nemotron.rms_norm_eps",
        "gpt_oss.hidden_act",
        "qwen3_5_moe_text.decoder_sparse_step",
        "qwen3_5_moe.decoder_sparse_step",
    ),
    "another field decides": (
        "partial_rotary_factor",
        "minimax_m2.rotary_dim",
        "deepseek_v2.head_dim",
        "deepseek_v2.qk_head_dim",
        "deepseek_v3.head_dim",
        "deepseek_v3.qk_head_dim",
        "kimi_k2.head_dim",
        "kimi_k25.head_dim",
        "glm4_moe_lite.head_dim",
        "kimi_k2.qk_head_dim",
        "kimi_k25.qk_head_dim",
        "glm4_moe_lite.qk_head_dim",
        "deepseek_v2.num_key_value_heads",
        "deepseek_v3.num_key_value_heads",
        "kimi_k2.num_key_value_heads",
        "kimi_k25.num_key_value_heads",
        "glm4_moe_lite.num_key_value_heads",
    ),
    "no dense MLP is in the model": (
        "qwen2_moe.intermediate_size",
        "qwen3_moe.intermediate_size",
        "qwen3_next.intermediate_size",
        "qwen3_5_moe_text.intermediate_size",
        "qwen3_5_moe.intermediate_size",
        "qwen3_vl_moe.intermediate_size",
    ),
    "there is no window": (
        "qwen2.use_sliding_window",
        "qwen2.sliding_window",
        "qwen2.max_window_layers",
        "qwen2_moe.use_sliding_window",
        "qwen2_moe.sliding_window",
        "qwen2_moe.max_window_layers",
        "qwen3.use_sliding_window",
        "qwen3.sliding_window",
        "qwen3.max_window_layers",
        "qwen3_moe.use_sliding_window",
        "qwen3_moe.sliding_window",
        "mimo.use_sliding_window",
        "mimo.sliding_window",
        "mimo.max_window_layers",
        "qwen2_5_vl.use_sliding_window",
        "qwen2_5_vl.sliding_window",
        "qwen2_5_vl.max_window_layers",
        "qwen3_vl_moe.sliding_window",
    ),
    "the precision of a sum, of which each program has its own": ("hy_v3.enable_moe_fp32_combine",),
    "there is one group, or no limit to groups": (
        "deepseek_v2.n_group",
        "deepseek_v2.topk_group",
        "glm4_moe.n_group",
        "glm4_moe.topk_group",
        "glm4v_moe.n_group",
        "glm4v_moe.topk_group",
        "kimi_k2.n_group",
        "kimi_k25.n_group",
        "glm4_moe_lite.n_group",
        "kimi_k2.topk_group",
        "kimi_k25.topk_group",
        "glm4_moe_lite.topk_group",
    ),
    "megatron-core has no argument for it; compared in models of Megatron-Bridge": (
        "gemma2.attn_logit_softcapping",
        "gemma2.final_logit_softcapping",
        "gemma3_text.rope_theta",
        "gemma3.rope_theta",
        "mrope_interleaved",
    ),
    "megatron-core has no argument for it, nor has Megatron-Bridge": ("gemma3_text.rope_type", "gemma3.rope_type"),
}
"""Fields of config.json of which another value is taken, by the reason; after a model type, for it alone."""
