"""What a model's config.json says about its checkpoint: names and shapes on disk, as `save_pretrained` writes them."""

from collections.abc import Mapping
from typing import Protocol

from resharder.converters.architectures import table_of
from resharder.converters.architectures.table import HFConfig as HFConfig


class PretrainedConfig(Protocol):
    """What transformers calls by that name."""

    def to_dict(self) -> dict[str, object]: ...


def config_dict(config: HFConfig | PretrainedConfig) -> HFConfig:
    """The content of config.json, whichever of the two forms it comes in."""
    return config if isinstance(config, Mapping) else config.to_dict()


def expected_shapes(config: HFConfig | PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, by name; tied embeddings have no `lm_head.weight`, experts a tensor each.

    Raises UnsupportedModel where the family has no table.
    """
    _, shapes = table_of(config_dict(config))
    return dict(shapes)
