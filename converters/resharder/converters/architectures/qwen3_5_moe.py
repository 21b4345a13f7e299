"""Qwen3.5-MoE, the text model: Qwen3.5 with Qwen3-Next's experts in every layer."""

from resharder.converters.architectures import qwen3_5
from resharder.converters.architectures.blocks import Sizes, integer, stacked
from resharder.converters.architectures.qwen3_next import gated_mixture, mixture_recipe
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table
from resharder.converters.architectures.wrapped import (
    NESTED,
    language_config,
    qwen3_tower,
    qwen3_tower_recipe,
    vision_config,
    wrapped_recipe,
    wrapped_table,
)


def table(config: HFConfig) -> Table:
    """Return Qwen3.5's layers with routed experts and a gated shared one in place of the MLP."""
    return qwen3_5.hybrid(config, gated_mixture(Sizes.of(config, gain=0.0), config))


def released_table(config: HFConfig) -> Table:
    """Return the table of the released form, with Qwen3-VL's tower.

    The experts of decoder layers are stacked, [experts, out, in]; the MTP layer has a tensor for each expert, as in Qwen3.5.
    """
    text = language_config(config)
    mixture = gated_mixture(Sizes.of(text, gain=0.0), text)
    language = qwen3_5.hybrid(text, stacked(mixture, transposed=False), mixture)
    return wrapped_table(language, NESTED, qwen3_tower(vision_config(config)))


def released_recipe(config: HFConfig) -> Recipe:
    """Return the recipe of the released form."""
    return wrapped_recipe(config, recipe(language_config(config)), qwen3_tower_recipe(vision_config(config)))


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen3-Next's recipe with experts in every layer, whose weights add up to one."""
    sparse = [True] * integer(config, "num_hidden_layers")
    return mixture_recipe(config, qwen3_5.predictions(config), sparse, normalised=True).unless(config, norm_topk_prob=True)
