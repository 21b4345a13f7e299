"""Layouts of trainers' models: megatron-core's modules, or modules of DTensors.

A model of megatron-core's modules implies that megatron-core is imported already, so a trainer without it never needs it.
"""

import sys
from collections.abc import Mapping, Sequence

import torch
from resharder.converters.architectures.checkpoint import HFConfig, PretrainedConfig
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models import dtensor
from resharder.converters.models.hf_names import Model, Rename


def local_layout(
    model: Model,
    hf_config: HFConfig | PretrainedConfig,
    *,
    rename: Rename | None = None,
    ranks: Sequence[int] | None = None,
) -> tuple[Layout, Mapping[str, torch.Tensor]]:
    """Return this rank's layout, and its local tensors by the names in its pieces, live rather than copied.

    `rename` and `ranks` are for models of DTensors, as in `dtensor.local_layout`. Raises ConversionError.
    """
    chunks = megatron_chunks(model)
    if not chunks:
        return dtensor.local_layout(model, hf_config, rename=rename, ranks=ranks)
    if rename is not None or ranks is not None:
        raise UnsupportedModel("expected neither rename nor ranks for a Megatron model, whose layout and table have both")
    from resharder.converters.models.megatron import layout

    return layout.local_layout(chunks, hf_config)


def megatron_chunks(model: Model) -> list[torch.nn.Module]:
    """Return the chunks of a Megatron model, wrapped or not; none for any other model."""
    core = sys.modules.get("megatron.core.transformer.module")
    if core is None or isinstance(model, Mapping):
        return []
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return chunks if any(isinstance(_innermost(chunk), core.MegatronModule) for chunk in chunks) else []


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside Float16Module and DDP."""
    inner = getattr(module, "module", None)
    return _innermost(inner) if isinstance(inner, torch.nn.Module) else module
