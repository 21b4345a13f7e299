"""Qwen3-VL-MoE: Qwen3-MoE with Qwen3-VL's tower. The released checkpoints stack experts, transposed: [experts, in, out]."""

from resharder.converters.architectures import qwen3_moe
from resharder.converters.architectures.blocks import stacked
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
    """Return Qwen3-MoE's table, with stacked experts, and the tower's."""
    text = language_config(config)
    language = qwen3_moe.with_experts(text, stacked(qwen3_moe.mixture(text), transposed=True))
    return wrapped_table(language, NESTED, qwen3_tower(vision_config(config)))


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen3-MoE's recipe and the tower's."""
    return wrapped_recipe(config, qwen3_moe.recipe(language_config(config)), qwen3_tower_recipe(vision_config(config)))
