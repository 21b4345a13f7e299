"""Names and shapes of a quantised checkpoint on disk, from its config.json."""

from collections.abc import Iterable, Mapping

from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.quantization.blocks import scale_spec
from resharder.converters.quantization.scheme import NOT_CONVERTED, SCALE_SUFFIX, Scheme, scheme_of


def expected_tensors(config: HFConfig, found: Iterable[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint should have, by name.

    A checkpoint in FP8 blocks has the family's tensors, and scales for each matrix in F8_E4M3 among `found`.

    Raises:
        UnsupportedModel: A family without a table, or another quantised format.
    """
    if not config.get("quantization_config"):
        return expected_shapes(config)
    scheme = scheme_of(config["quantization_config"])
    shapes = expected_shapes(without_quantization(config))
    matrices = [spec for spec in found if spec.dtype == "F8_E4M3" and len(spec.shape) == 2 and spec.name in shapes]
    return shapes | {scales.name: scales.shape for scales in (scale_spec(spec, scheme) for spec in matrices)}


def block_specs(config: HFConfig, dtype: str) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint in FP8 blocks of any size.

    Args:
        config: Content of config.json.
        dtype: Dtype of tensors that are not quantised.

    Raises:
        UnsupportedModel: Another quantisation, or no table.
    """
    quantization = config["quantization_config"]
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not block or len(block) != 2:
        raise UnsupportedModel(
            "config: expected a quantization_config with quant_method fp8 and a weight_block_size of two numbers, "
            f"got {quantization.get('quant_method')} and {block}"
        )
    scheme = Scheme(frozenset(name for key in NOT_CONVERTED for name in quantization.get(key) or ()))
    specs: dict[str, TensorSpec] = {}
    for name, shape in expected_shapes(without_quantization(config)).items():
        if scheme.converts(name, shape):
            specs[name] = TensorSpec(name, "F8_E4M3", shape)
            scales = name + SCALE_SUFFIX
            specs[scales] = TensorSpec(scales, "F32", tuple(-(-n // size) for n, size in zip(shape, block, strict=True)))
        else:
            specs[name] = TensorSpec(name, dtype, shape)
    return specs


def without_quantization(config: HFConfig) -> Mapping[str, object]:
    """Return the config of the model before it was quantised."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
