"""A stand-in for TransformerEngine on a CPU: its modules and parameter names, plain torch maths.

Mirrors what megatron-core uses of transformer_engine 2.11: `weight`, `bias`, `layer_norm_weight`, `layer_norm_bias`,
`weight{i}`, `bias{i}` and an `_extra_state` per module. What is missing here (optimizers, fused attention) makes megatron-core
fall back on its own. Forward and backward work, tensor and sequence parallelism included.
"""

__version__ = "2.11.0"

from . import common, pytorch  # noqa: F401
