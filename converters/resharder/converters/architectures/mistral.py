"""Mistral: Llama, with attention over a window of the last tokens in some versions."""

from resharder.converters.architectures import llama
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, window
from resharder.converters.architectures.table import HFConfig

table = llama.table


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with a window if the config has `sliding_window`."""
    return decoder_recipe(config, **window(config))
