"""Tensors of checkpoints in FP8 blocks, from a config.json with `quantization_config`."""

from collections.abc import Mapping

from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import TensorSpec

_UNCONVERTED = frozenset({"embed_tokens", "lm_head", "head", "gate", "router", "shared_expert_gate", "eh_proj", "in_proj_ba"})
"""Last names of modules that released FP8 checkpoints leave in BF16."""


def block_specs(config: HFConfig, dtype: str) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint in FP8 blocks.

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
    kept = {*(quantization.get("modules_to_not_convert") or ()), *(quantization.get("ignored_layers") or ())}
    specs: dict[str, TensorSpec] = {}
    for name, shape in expected_shapes(without_quantization(config)).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and len(shape) == 2 and module not in kept and module.rpartition(".")[2] not in _UNCONVERTED:
            specs[name] = TensorSpec(name, "F8_E4M3", shape)
            scales = f"{name}_scale_inv"
            specs[scales] = TensorSpec(scales, "F32", tuple(-(-n // size) for n, size in zip(shape, block, strict=True)))
        else:
            specs[name] = TensorSpec(name, dtype, shape)
    return specs


def without_quantization(config: HFConfig) -> Mapping[str, object]:
    """Return the config of the model before it was quantised."""
    return {key: value for key, value in config.items() if key != "quantization_config"}
