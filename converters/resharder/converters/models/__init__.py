"""Layouts of trainers' models: megatron-core's modules, or modules with DTensors.

megatron-core is imported only for models of its modules, in whose processes it is imported already. Other trainers do not need
it.
"""

import sys
from collections.abc import Mapping, Sequence

import torch
from resharder.converters.architectures.checkpoint import HFConfig, PretrainedConfig, config_dict
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models import dtensor
from resharder.converters.models.hf_config import refuse_other_config
from resharder.converters.models.hf_names import Model, Rename
from resharder.converters.models.tensor_io import LookedUp


def local_layout(
    model: Model,
    hf_config: HFConfig | PretrainedConfig,
    *,
    rename: Rename | None = None,
    ranks: Sequence[int] | None = None,
    fp8: bool = False,
    tower: bool | None = None,
) -> tuple[Layout, LookedUp]:
    """Return this rank's layout, and its local tensors by the names in the layout's pieces, live rather than copied.

    Args:
        model: Megatron's chunks, or a module, its parts or a state dict, as in `hf_names.Model`.
        hf_config: Content of config.json, or transformers' config.
        rename: For models with DTensors only, as in `dtensor.local_layout`.
        ranks: For models with DTensors only, as in `dtensor.local_layout`.
        fp8: For Megatron models only, as in `megatron.layout.local_layout`.
        tower: Whether the model has to have the config's tower, or must not have it; None for either.

    Raises ConversionError; see `megatron.layout.local_layout` and `dtensor.local_layout` for its subclasses.
    """
    chunks = megatron_chunks(model)
    if not chunks:
        refuse_other_config(model, config_dict(hf_config))
        return dtensor.local_layout(model, hf_config, rename=rename, ranks=ranks, tower=tower)
    if rename is not None or ranks is not None:
        raise UnsupportedModel("rename and ranks are not for Megatron models: their table and process groups have both")
    from resharder.converters.models.megatron.release import refuse_untested_release

    refuse_untested_release()
    from resharder.converters.models.megatron import layout

    return layout.local_layout(chunks, hf_config, fp8=fp8, tower=tower)


def megatron_chunks(model: Model) -> list[torch.nn.Module]:
    """Return the chunks of a Megatron model, wrapped or not; an empty list for any other model."""
    core = sys.modules.get("megatron.core.transformer.module")
    if core is None or isinstance(model, Mapping):
        return []
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    return chunks if any(isinstance(_innermost(chunk), core.MegatronModule) for chunk in chunks) else []


def vocabulary_rows(model: Model) -> int:
    """Return the number of rows of a Megatron model's embeddings over all ranks, padding included; 0 for any other model."""
    found = (_innermost(chunk) for chunk in megatron_chunks(model))
    return max((getattr(getattr(module, "language_model", module), "vocab_size", 0) for module in found), default=0)


def _innermost(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside wrappers such as Float16Module and DDP."""
    inner = getattr(module, "module", None)
    return _innermost(inner) if isinstance(inner, torch.nn.Module) else module
