"""Configurations of SGLang that Resharder does not support; read against 0.5.17 and 0.5.23."""

from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings
from resharder.client.settings import ADAPTERS, ON_CONFIG_CHANGE, SGLANG_RUST_SERVER
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import scheme_of

_SIZES = {
    "pp_size": "pipeline parallelism (--pp-size)",
    "nnodes": "several hosts (--nnodes)",
    "moe_dp_size": "data parallel experts (--moe-dp-size)",
    "tokenizer_worker_num": "several tokenizer workers (--tokenizer-worker-num)",
}
"""Options that may be 1."""
_SIZES_BEFORE = {
    "dp_size": "data parallelism before 0.5.23 (--dp-size)",
    "ep_size": "expert parallelism before 0.5.23 (--ep-size)",
}
"""Options that may be 1 in releases that cannot tell their replica, of which no test has shown more."""
_SWITCHES = {
    "enable_dp_attention": "data parallel attention (--enable-dp-attention)",
    "enable_eplb": "EPLB (--enable-eplb)",
    "ep_num_redundant_experts": "redundant experts (--ep-num-redundant-experts)",
    "elastic_ep_backend": "elastic expert parallelism (--elastic-ep-backend)",
    "speculative_algorithm": "speculative decoding (--speculative-algorithm)",
    "enable_lora": "adapters (--enable-lora)",
    "lora_paths": "adapters (--lora-paths)",
    "torchao_config": "torchao (--torchao-config)",
    "cpu_offload_gb": "weights that are offloaded to the host (--cpu-offload-gb)",
    "enable_hierarchical_cache": "a KV cache that keeps entries of older weights (--enable-hierarchical-cache)",
    "enable_lmcache": "LMCache, which keeps entries of older weights (--enable-lmcache)",
    "enable_flexkv": "FlexKV, which keeps entries of older weights (--enable-flexkv)",
    "enable_streaming_session": "streaming sessions, which keep entries of older weights (--enable-streaming-session)",
    "quantize_and_serve": "quantisation at the start (--quantize-and-serve)",
    "encoder_only": "an encoder of its own (--encoder-only)",
    "smg_grpc_mode": "the gRPC server, which has no gate (--smg-grpc-mode)",
    "grpc_mode": "the gRPC server, which has no gate (--grpc-mode)",
    "grpc_port": "the gRPC server, which has no gate (--grpc-port)",
    "enable_http2": "the HTTP/2 server (--enable-http2)",
    "use_ray": "Ray (--use-ray)",
}
"""Options that may be unset or off."""
_ADDED = frozenset(("hf_config", "packed_modules_mapping", "requantization_method"))
"""Keys that SGLang's `_get_quantization_config` adds to the `quantization_config` of config.json. Versions do not have them."""
_CHOICES = {
    "disaggregation_mode": ("null", "disaggregated prefill and decoding (--disaggregation-mode)"),
    "moe_a2a_backend": ("none", "experts' own exchange between GPUs (--moe-a2a-backend)"),
    "weight_cache_mode": ("off", "a weight cache (--weight-cache-mode)"),
    "startup_weight_load_mode": ("serial", "weights that load while graphs are captured (--startup-weight-load-mode)"),
}
"""Options that may have one value."""


def refuse_unsupported(config: Any, model_config: Any, *, replicas: bool) -> str:
    """Return why a configuration is not supported; empty if it is.

    Args:
        config: SGLang's `ServerArgs`, resolved.
        model_config: SGLang's `ModelConfig`.
        replicas: Whether data and expert parallelism are supported with this release of SGLang.
    """
    sizes = _SIZES if replicas else _SIZES_BEFORE | _SIZES
    wrong = [what for name, what in sizes.items() if (getattr(config, name, 1) or 1) > 1]
    wrong += [what for name, what in _SWITCHES.items() if getattr(config, name, None)]
    wrong += [what for name, (only, what) in _CHOICES.items() if getattr(config, name, only) not in (only, None)]
    if SGLANG_RUST_SERVER.text().lower() in ("1", "true", "yes"):
        wrong.append(f"the Rust server, which has no gate ({SGLANG_RUST_SERVER.name})")
    if model_config.quantization and not _is_fp8_blocks(model_config):
        wrong.append(f"quantised weights other than checkpoints in FP8 blocks of 128 by 128 ({model_config.quantization})")
    if getattr(model_config, "is_multimodal", False):
        wrong.append("models that read images, video or sound")
    if getattr(getattr(model_config, "hf_config", None), "model_type", "") == "gemma":
        wrong.append("Gemma, for which SGLang computes the exact GELU, not its approximation by tanh, as training does")
    return f"Resharder does not support SGLang servers with {' and '.join(wrong)}" if wrong else ""


def _is_fp8_blocks(model_config: Any) -> bool:
    """Return whether a model's config.json describes FP8 blocks, as versions that ranks cast have them."""
    config = getattr(model_config.hf_config, "quantization_config", None) or {}
    try:
        stated = scheme_of({name: value for name, value in config.items() if name not in _ADDED})
    except UnsupportedModel:
        return False
    return bool(model_config.quantization == "fp8") and not stated.channels


def refuse_settings(settings: PluginSettings) -> None:
    """Raise `UsageError` for settings that servers of SGLang do not have."""
    if settings.adapters:
        raise UsageError(f"{ADAPTERS.name} is for vLLM servers: adapters are not supported with SGLang")
    if settings.restarts:
        raise UsageError(f"{ON_CONFIG_CHANGE.name}=exit is for vLLM servers, and not supported with SGLang")


def cannot_sleep(config: Any) -> str:
    """Return why this engine cannot sleep; empty if it can.

    Args:
        config: SGLang's `ServerArgs`, resolved. On a CPU its sleep releases nothing but is permitted, with the same states.
    """
    if config.device == "cpu" or config.enable_memory_saver:
        return ""
    return "the engine has no sleep mode: start SGLang with --enable-memory-saver"
