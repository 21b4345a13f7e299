"""The LoRA adapter in a trainer's model: its config, and the layout of its tensors under the names of a PEFT folder.

PEFT's modules are known by their attributes, so that PEFT is imported by nobody who has not imported it: `peft_config` of the
model, and parameters `….lora_A.<adapter>.weight` (peft/tuners/lora/layer.py, read against PEFT 0.21).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from resharder.converters.adapter import PREFIX, check_tensors
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models import dtensor, megatron_chunks
from resharder.converters.models.hf_names import Model, Rename, named_tensors, roots_of
from resharder.converters.models.tensor_io import LookedUp

_UNTIED: Mapping[str, Any] = {"tie_word_embeddings": False}
"""In place of a config.json: no table has an adapter's names, and none of its tensors is another's second name."""


class SavedConfig(Protocol):
    """Interface of PEFT's configs."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write adapter_config.json into a folder."""


AdapterConfig: TypeAlias = Mapping[str, Any] | SavedConfig
"""Content of adapter_config.json, or PEFT's config."""


class Adapter(Protocol):
    """An adapter in a process's memory."""

    @property
    def config(self) -> AdapterConfig:
        """Its config."""

    def layout(
        self, config: Mapping[str, Any], *, rename: Rename | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Layout, LookedUp]:
        """Return this rank's layout of the adapter, and its local tensors. `config` is the content of adapter_config.json."""


@dataclass(frozen=True)
class ModuleAdapter:
    """An adapter whose names in memory say what its tensors are: in a module, its parts or a state dict."""

    model: Model
    config: AdapterConfig
    rename: Rename
    """Returns the name in a PEFT folder of a name in memory; None for what is not of the adapter."""

    def layout(
        self, config: Mapping[str, Any], *, rename: Rename | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Layout, LookedUp]:
        """Return this rank's layout of the adapter, and its local tensors by their names in the layout's pieces.

        Args:
            config: Content of the adapter's adapter_config.json.
            rename: Function from names in a PEFT folder to other names there, for a model whose modules have names of their own.
            ranks: As in `dtensor.local_layout`.

        Raises ConversionError as `check_tensors` and `dtensor.local_layout` do.
        """

        def named(key: str) -> str | None:
            name = self.rename(key)
            return name if name is None or rename is None else rename(name)

        check_tensors(config, {name: tuple(tensor.shape) for name, tensor in named_tensors(self.model, named).items()})
        return dtensor.local_layout(self.model, _UNTIED, rename=named, ranks=ranks)


def find_adapter(model: Model, config: Any, adapter: str | None = None) -> Adapter:
    """Return the adapter of a model.

    Args:
        model: Megatron's chunks with Megatron-Bridge's LoRA modules; a model with PEFT's, wrapped or not; or a state dict with
            the names of a PEFT folder.
        config: For Megatron's chunks, the config of the base; for a state dict, the content of adapter_config.json or PEFT's
            config; a model of PEFT has its own.
        adapter: Name of the adapter, for a model that has several.

    Raises UnsupportedModel for a model without an adapter, and for one with several of which none is named.
    """
    if chunks := megatron_chunks(model):
        if adapter is not None:
            raise UnsupportedModel(f"adapter={adapter!r} is for models of PEFT: those of Megatron-Bridge have one adapter")
        from resharder.converters.models.megatron.release import refuse_untested_release

        refuse_untested_release()
        from resharder.converters.models.megatron import adapters

        return adapters.find_adapter(chunks, config)
    if isinstance(model, Mapping):
        return ModuleAdapter(model, config, lambda key: key)
    found = (getattr(each, "peft_config", None) for each in _inner(model))
    configs: Mapping[str, AdapterConfig] = next((each for each in found if isinstance(each, Mapping)), {})
    if not configs:
        raise UnsupportedModel(
            "the model has no adapter: attach the model that PEFT's get_peft_model returns, or a state dict with PEFT's names"
        )
    if adapter is None and len(configs) > 1:
        raise UnsupportedModel(f"the model has the adapters {', '.join(map(repr, configs))}: name one, attach(…, adapter=…)")
    name = next(iter(configs)) if adapter is None else adapter
    if name not in configs:
        raise UnsupportedModel(f"the model has no adapter {name!r}, but {', '.join(map(repr, configs))}")
    return ModuleAdapter(model, configs[name], _renaming(name))


def _inner(model: Model) -> list[torch.nn.Module]:
    """Return the modules of a model, each followed by those that it wraps: DistributedDataParallel, torch.compile."""
    found = []
    for root in roots_of(model):
        inner: object = root
        while isinstance(inner, torch.nn.Module):
            found.append(inner)
            inner = getattr(inner, "module", getattr(inner, "_orig_mod", None))
    return found


def _renaming(adapter: str) -> Rename:
    """Return the function from the names of a model in memory to those that PEFT writes for one of its adapters."""
    form = re.compile(rf"(.+\.lora_[AB])\.{re.escape(adapter)}(\.weight)|(.+\.lora_embedding_[AB])\.{re.escape(adapter)}")

    def rename(key: str) -> str | None:
        found = form.fullmatch(key)
        if found is None:
            return None
        name = found[3] or f"{found[1]}{found[2]}"
        return name if name.startswith(PREFIX) else PREFIX + name  # transformers' add_adapter puts no PeftModel around a model

    return rename
