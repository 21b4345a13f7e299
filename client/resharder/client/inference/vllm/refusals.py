"""Configurations of vLLM that Resharder does not support; read against 0.26, 0.28, 0.32 and 0.33."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm.drafters import foreign_drafter
from resharder.client.inference.vllm.lora import unused_slots
from resharder.client.settings import ADAPTERS, VLLM_RUNTIME_LORA, VLLM_RUST_FRONTEND

_GRPC_SERVERS = ("vllm.entrypoints.launchers.grpc_server", "vllm.entrypoints.grpc_server")


def refuse_unsupported(vllm_config: Any) -> str:
    """Return why a configuration (vLLM's `VllmConfig`) is not supported; empty if it is."""
    parallel = vllm_config.parallel_config
    wrong = [
        what
        for what, on in (
            ("EPLB (--enable-eplb)", parallel.enable_eplb),
            ("elastic expert parallelism", getattr(parallel, "enable_elastic_ep", False)),
            *_of_newer_releases(vllm_config),
        )
        if on
    ]
    wrong += [drafter] if (drafter := foreign_drafter(vllm_config)) else []
    wrong += [front_end] if (front_end := ungated_front_end()) else []
    return f"Resharder does not support servers with {' and '.join(wrong)}" if wrong else ""


def refuse_adapters(vllm_config: Any, settings: PluginSettings) -> None:
    """Raise `UsageError` if a server cannot follow the adapters of RESHARDER_ADAPTERS."""
    if not settings.adapters:
        return
    for index in range(len(settings.adapters)):
        settings.of_adapter(index)
    lora = vllm_config.lora_config
    if lora is None:
        raise UsageError(f"{ADAPTERS.name} names adapters, and this server takes none: start vLLM with --enable-lora")
    unused = unused_slots(vllm_config.device_config.device_type)
    needed = len(settings.adapters) + 1 + unused
    if lora.max_loras < needed:
        more = ", and one that stays empty, as vLLM computes with it for requests without an adapter on CPUs" if unused else ""
        raise UsageError(
            f"{len(settings.adapters)} adapters need {needed} slots, one for the next version of any{more}: start vLLM with "
            f"--max-loras {needed} (got {lora.max_loras})"
        )
    if VLLM_RUNTIME_LORA.text().strip().lower() in ("1", "true"):
        raise UsageError(
            f"with {ADAPTERS.name}, all adapters come from the daemon, and their versions keep their slots: unset "
            f"{VLLM_RUNTIME_LORA.name}"
        )


def _of_newer_releases(vllm_config: Any) -> list[tuple[str, bool]]:
    """Return what vLLM has since 0.32 or 0.33, each with whether it is on. Installs do not renew what is derived for it."""
    copied = getattr(vllm_config.speculative_config, "draft_lm_head_quantization", None)
    requantised = getattr(vllm_config.quant_config, "online_quantization_config", None)
    return [
        (f"a drafter with its own copy of the output layer (draft_lm_head_quantization={copied})", copied is not None),
        ("online quantisation of a checkpoint that is quantised already (--quantization-config)", requantised is not None),
        ("constants in the place of experts (expert_substitution, approximate_experts)", _is_pruned(vllm_config.model_config)),
    ]


def _is_pruned(model_config: Any) -> bool:
    """Return whether a model's config replaces experts by constants, as MoNE does (`fused_moe/expert_substitution.py`; 0.33)."""
    configs = [getattr(model_config, name, None) for name in ("hf_config", "hf_text_config")]
    if any(getattr(config, "approximate_experts", None) for config in configs):
        return True
    compression = getattr(configs[0], "compression_config", None)
    transform = compression.get("transform_config") if isinstance(compression, Mapping) else None
    return isinstance(transform, Mapping) and bool(transform.get("expert_substitution"))


def ungated_front_end() -> str:
    """Describe the front end that replaces vLLM's Python API server; empty for the API server itself.

    Only the API server loads endpoint plugins and therefore has the gate. `VllmConfig` does not contain the
    choice (0.26 to 0.32). A variable selects the Rust front end. The gRPC server is an option of the command
    or a program of its own; spawned processes inherit the option in `sys.argv`, forked ones the module.
    """
    if VLLM_RUST_FRONTEND.text().strip() not in ("", "0"):
        return "the Rust front end (VLLM_USE_RUST_FRONTEND), which has no gate"
    program, *arguments = sys.argv or [""]
    main = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "")
    serves_grpc = any(name in sys.modules or name == main for name in _GRPC_SERVERS)
    if serves_grpc or ("vllm" in Path(program).parts and "--grpc" in _with_config_file(arguments)):
        return "the gRPC server (--grpc), which has no gate"
    return ""


def _with_config_file(arguments: list[str]) -> list[str]:
    """Add the options of `--config`'s YAML file, read by vLLM's own parser (`utils/argparse_utils.py`)."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if "--config" not in arguments[:-1]:
        return arguments
    file = arguments[arguments.index("--config") + 1]
    try:
        return [*arguments, *FlexibleArgumentParser(add_help=False).load_config_file(file)]
    except Exception:  # vLLM itself rejects a missing or invalid file
        return arguments
