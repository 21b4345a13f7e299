"""Wrappers of language models with towers, placed as Megatron-Bridge has them. They compute text alone."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.vision.vit_layer_specs import (
    get_vit_layer_with_local_spec,
    get_vit_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from resharder.converters.architectures.recipe import Tower
from resharder.converters.architectures.table import Table
from resharder.converters.architectures.wrapped import LANGUAGE
from resharder.converters.models.megatron.computation import activation

_LAYERS = "decoder.layers."
_PARALLEL = ("linear_fc1", "linear_fc2")
"""Linears of mergers, which Megatron divides as those of an MLP."""
_SHARED = (
    "tensor_model_parallel_size",
    "use_cpu_initialization",
    "init_model_with_meta_device",
    "perform_initialization",
    "params_dtype",
    "bf16",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "gradient_accumulation_fusion",
)
"""Arguments that a tower shares with its language model. It is on one pipeline stage, without context parallelism."""
_GATHERED = "multi_modal_projector.proj"
"""A linear that gathers its output, so that the next layer has all of it."""


class Wrapped(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """A language model and, on the first pipeline stage, the tower beside it. The forward pass is that of the language model."""

    def __init__(self, language_model: Any, tower: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(config=language_model.config)
        for name, module in tower.items():
            setattr(self, name, module)
        self.language_model = language_model
        self.share_embeddings_and_output_weights = language_model.share_embeddings_and_output_weights

    def set_input_tensor(self, tensor: Any) -> None:
        """Take the hidden states of the stage before."""
        self.language_model.set_input_tensor(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the language model computes of text."""
        return self.language_model(*args, **kwargs)


class Branch(MegatronModule):  # type: ignore[misc]
    """A module with tensors of its own, which are replicas on all tensor-parallel ranks, and modules of any names."""


def build_tower(tower: Tower, table: Table, language: TransformerConfig, settings: dict[str, Any], te: bool) -> Branch:
    """Return a module that has the tower's modules as its children.

    Args:
        tower: How the tower is built.
        table: Table of the whole model.
        language: Config of the language model.
        settings: Arguments of TransformerConfig that concern precision and parallelism.
        te: Whether its layers are TransformerEngine's.
    """
    root = Branch(language)
    layers = f"{tower.module}.{_LAYERS}" if tower.module else ""
    config = _tower_config(tower, settings) if tower.module else language
    if layers:
        spec = get_vit_layer_with_transformer_engine_spec() if te else get_vit_layer_with_local_spec()
        own = _branch(root, tower.module)
        own.config, own.decoder = config, TransformerBlock(config, spec, post_layer_norm=False)
    for key, (weight, *_) in table.items():
        if key.startswith(LANGUAGE) or (layers and key.startswith(layers)):
            continue
        path, _, leaf = key.rpartition(".")
        linear = _GATHERED if path == _GATHERED else path.rpartition(".")[2]
        if path == _GATHERED or (layers and linear in _PARALLEL):
            _add_linear(root, path, linear, leaf, weight.shape, config)
        else:
            parameter = torch.nn.Parameter(torch.empty(weight.shape, dtype=language.params_dtype))
            _branch(root, path).register_parameter(leaf, parameter)
    return root


def _tower_config(tower: Tower, settings: dict[str, Any]) -> TransformerConfig:
    """Return the config of Megatron's own layers of a tower, which is on one pipeline stage."""
    arguments = tower.transformer | {name: settings[name] for name in _SHARED if name in settings}
    return TransformerConfig(**arguments | {"activation_func": activation(arguments["activation_func"])})


def _add_linear(root: Branch, path: str, kind: str, leaf: str, shape: tuple[int, ...], config: TransformerConfig) -> None:
    """Add a linear for its weight; the table has its bias after that."""
    parent, _, name = path.rpartition(".")
    if leaf != "weight":
        return
    rows, columns = shape
    common = {"config": config, "init_method": config.init_method, "bias": kind in _PARALLEL, "skip_bias_add": False}
    if kind == "linear_fc2":
        module = RowParallelLinear(columns, rows, input_is_parallel=True, **common)
    else:
        module = ColumnParallelLinear(columns, rows, gather_output=kind == _GATHERED, **common)
    _branch(root, parent).add_module(name, module)


def _branch(root: Branch, path: str) -> Any:
    """Return the module at a path, with the branches to it."""
    found: Any = root
    for name in filter(None, path.split(".")):
        if name not in found._modules:
            found.add_module(name, Branch(root.config))
        found = found._modules[name]
    return found
