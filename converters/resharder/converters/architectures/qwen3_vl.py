"""Qwen3-VL: Qwen3 with a tower, outputs of whose inner layers go into the first layers of the language model (deepstack)."""

from resharder.converters.architectures import qwen3
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
    """Return Qwen3's table and the tower's."""
    return wrapped_table(qwen3.table(language_config(config)), NESTED, qwen3_tower(vision_config(config)))


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen3's recipe and the tower's."""
    return wrapped_recipe(config, qwen3.recipe(language_config(config)), qwen3_tower_recipe(vision_config(config)))
