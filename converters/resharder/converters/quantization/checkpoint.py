"""Names and shapes of a quantised checkpoint on disk, from its config.json."""

from collections.abc import Iterable

from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.quantization.blocks import scale_spec
from resharder.converters.quantization.scheme import scheme_of


def expected_tensors(config: HFConfig, found: Iterable[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint should have, by name.

    A checkpoint in FP8 blocks has the family's tensors, and scales for each matrix in F8_E4M3 among `found`.

    Raises:
        UnsupportedModel: A family without a table, or another quantised format.
    """
    if not config.get("quantization_config"):
        return expected_shapes(config)
    scheme = scheme_of(config["quantization_config"])
    shapes = expected_shapes({key: value for key, value in config.items() if key != "quantization_config"})
    matrices = [spec for spec in found if spec.dtype == "F8_E4M3" and len(spec.shape) == 2 and spec.name in shapes]
    return shapes | {scales.name: scales.shape for scales in (scale_spec(spec, scheme) for spec in matrices)}
