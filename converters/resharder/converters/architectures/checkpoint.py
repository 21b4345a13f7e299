"""Names and shapes of a checkpoint on disk, as `save_pretrained` writes them, from config.json."""

from collections.abc import Mapping
from typing import Protocol

from resharder.converters.architectures import table_of
from resharder.converters.architectures.table import HFConfig as HFConfig


class PretrainedConfig(Protocol):
    """Interface of transformers' class of that name."""

    def to_dict(self) -> dict[str, object]:
        """Return the content of config.json."""


def config_dict(config: HFConfig | PretrainedConfig) -> HFConfig:
    """Return the content of config.json as a mapping, from either form."""
    return config if isinstance(config, Mapping) else config.to_dict()


def expected_shapes(config: HFConfig | PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the checkpoint by name.

    Tied embeddings have no `lm_head.weight`; each expert has tensors of its own, unless the family stacks them on disk. Raises
    UnsupportedModel for a family without a table.
    """
    _, shapes = table_of(config_dict(config))
    return dict(shapes)
