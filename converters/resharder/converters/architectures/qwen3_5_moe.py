"""Qwen3.5-MoE, the text model: Qwen3.5 with Qwen3-Next's experts in every layer."""

from resharder.converters.architectures import qwen3_5
from resharder.converters.architectures.blocks import Sizes, integer
from resharder.converters.architectures.qwen3_next import gated_mixture, mixture_recipe
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return Qwen3.5's layers with routed experts and a gated shared one in place of the MLP."""
    return qwen3_5.hybrid(config, gated_mixture(Sizes.of(config, gain=0.0), config))


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen3-Next's recipe with experts in every layer, whose weights add up to one."""
    sparse = [True] * integer(config, "num_hidden_layers")
    return mixture_recipe(config, qwen3_5.predictions(config), sparse, normalised=True).unless(config, norm_topk_prob=True)
