"""GLM-4.7-Flash: DeepSeek-V3 with one group of experts. The dense layers come first."""

from resharder.converters.architectures import deepseek_v3
from resharder.converters.architectures.blocks import integer
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.errors import UnsupportedModel


def table(config: HFConfig) -> Table:
    """Return DeepSeek-V3's table; vLLM's model takes the sigmoid of experts' scores whatever the config says."""
    return deepseek_v3.balanced_decoder(completed(config))


def recipe(config: HFConfig) -> Recipe:
    """Return DeepSeek-V3's recipe."""
    return deepseek_v3.recipe(completed(config))


def completed(config: HFConfig) -> HFConfig:
    """Return the config with the number of dense layers, which transformers 5 writes as `mlp_layer_types`.

    Raises UnsupportedModel for a dense layer after one with experts, and for another number of layers.
    """
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return {"first_k_dense_replace": 1, **config}
    layers, dense = integer(config, "num_hidden_layers"), list(kinds).count("dense")
    if list(kinds) != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise UnsupportedModel(f"config: expected {layers} mlp_layer_types, the dense ones first, got {kinds}")
    return {**config, "first_k_dense_replace": dense}
