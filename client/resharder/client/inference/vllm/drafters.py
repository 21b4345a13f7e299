"""The drafter of vLLM's speculative decoding, a second model in the worker; read against 0.26, 0.28 and 0.32."""

from typing import Any

import torch


def drafts_with_weights(speculative: Any) -> bool:
    """Return whether vLLM loads a second model for this `SpeculativeConfig` or `None`."""
    return speculative is not None and str(speculative.method) not in ("ngram", "[ngram]", "suffix", "ngram_gpu")


def is_drafter(vllm_config: Any, model_config: Any) -> bool:
    """Return whether `model_config` belongs to the drafter."""
    speculative = vllm_config.speculative_config
    return drafts_with_weights(speculative) and model_config is speculative.draft_model_config


def drafter_of(worker: Any) -> torch.nn.Module | None:
    """Return a worker's drafter; `None` without one. Only the last pipeline stage has a drafter.

    `GPUModelRunner` has it in its attribute `drafter` (0.26 to 0.32); the second runner of 0.28 and later has it in `speculator`.

    Raises:
        LookupError: The configuration requires a drafter, but the runner has none.
    """
    from vllm.distributed import get_pp_group

    speculative = worker.vllm_config.speculative_config
    if not drafts_with_weights(speculative) or not get_pp_group().is_last_rank:
        return None
    runner = worker.model_runner
    model = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    if not isinstance(model, torch.nn.Module):
        raise LookupError(
            f"this release cannot find the drafter ({speculative.method}) in vLLM's {type(runner).__name__}: it has {model!r}"
        )
    return model


def foreign_drafter(vllm_config: Any) -> str:
    """Describe a drafter whose weights are not the model's own MTP layers, so that no version has them; empty for all others."""
    speculative = vllm_config.speculative_config
    if not drafts_with_weights(speculative):
        return ""
    if str(speculative.method) != "mtp":
        return f"a drafter with its own weights ({speculative.method}, {speculative.model})"
    if speculative.draft_model_config.model != vllm_config.model_config.model:
        return f"a drafter with its own checkpoint ({speculative.draft_model_config.model})"
    return ""
