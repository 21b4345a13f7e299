"""Names and shapes of a checkpoint on disk, as `save_pretrained` writes them, from config.json."""

from collections.abc import Mapping
from typing import Protocol

from resharder.converters.architectures import table_of
from resharder.converters.architectures.table import HFConfig as HFConfig
from resharder.converters.architectures.wrapped import is_wrapped, tower_weights


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


def tower_shapes(config: HFConfig | PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model's tower by name; empty for a language model alone.

    Raises UnsupportedModel for a family without a table.
    """
    table, shapes = table_of(config_dict(config))
    if not is_wrapped(table):
        return {}
    return {run.tensor: shapes[run.tensor] for weight in tower_weights(table) for run in weight.runs}
