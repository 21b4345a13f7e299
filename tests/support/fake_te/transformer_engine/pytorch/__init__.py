from . import distributed, float8_tensor, fp8, module, ops, router, tensor  # noqa: F401
from .fp8 import fp8_autocast, fp8_model_init  # noqa: F401
from .layers import (  # noqa: F401
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    RMSNorm,
    TransformerLayer,
)

autocast = quantized_model_init = fp8_autocast
