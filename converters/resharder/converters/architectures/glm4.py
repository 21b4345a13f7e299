"""GLM-4-0414: GLM-4-9B with norms of the outputs of attention and MLP."""

from dataclasses import replace

from resharder.converters.architectures import glm
from resharder.converters.architectures.blocks import Sizes, decoder, post_norms
from resharder.converters.architectures.recipe import Extras, Recipe
from resharder.converters.architectures.table import HFConfig, Table


def table(config: HFConfig) -> Table:
    """Return GLM-4-9B's layers with norms after attention and MLP."""
    size = Sizes.of(config)
    layer = glm.fused_layer(config, size) | post_norms(size, "post_self_attn_layernorm", "post_mlp_layernorm")
    return decoder(size, lambda n: layer)


def recipe(config: HFConfig) -> Recipe:
    """Return GLM-4-9B's recipe with norms after attention and MLP, which `extras.py` adds."""
    return replace(glm.recipe(config), extras=Extras(post_norms=True))
