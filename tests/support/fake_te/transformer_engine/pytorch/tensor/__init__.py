import enum

import torch


class QuantizedTensor(torch.Tensor):
    """Class of FP8 primary parameters."""


class DType(enum.Enum):
    """transformer_engine_torch's enumeration, with the two FP8 types."""

    kFloat8E4M3 = torch.float8_e4m3fn
    kFloat8E5M2 = torch.float8_e5m2


class Float8BlockwiseQTensor(QuantizedTensor):
    """TransformerEngine's matrix in FP8 blocks of 128 by 128, with the attributes and layouts of 2.11 and without kernels.

    Any operation on it but those that keep its form sees its values, dequantised, as in TransformerEngine.
    """

    @staticmethod
    def __new__(cls, values, *, fp8_dtype=DType.kFloat8E4M3, is_2D_scaled=True):
        rows, columns = values.shape
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16, device=values.device)
        made._rowwise_data = torch.empty(rows, columns, dtype=torch.uint8)
        made._rowwise_scale_inv = torch.full((-(-rows // 128), -(-columns // 512) * 4), 7.0)
        made._columnwise_data = made._columnwise_scale_inv = None
        made._fp8_dtype, made._is_2D_scaled = fp8_dtype, is_2D_scaled
        made.quantize_(values)
        return made

    def quantize_(self, values):
        """Powers of two as scales, by the formula of common/recipe/recipe_common.cuh, into the same memory."""
        data, factors = quantized(values)
        self._rowwise_data.copy_(data.view(torch.uint8))
        self._rowwise_scale_inv[:, : factors.shape[1]] = factors
        return self

    def dequantize(self, dtype=torch.float32):
        rows, columns = self.shape
        whole = self._rowwise_scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return (self._rowwise_data.view(torch.float8_e4m3fn).float() * whole).to(dtype)

    def untyped_storage(self):
        data = self._columnwise_data if self._rowwise_data is None else self._rowwise_data
        return data.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            made = torch.Tensor._make_wrapper_subclass(cls, args[0].shape, dtype=args[0].dtype, device=args[0].device)
            made.__dict__.update(args[0].__dict__)
            return made
        plain = [arg.dequantize(arg.dtype) if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def block_maxima(values):
    """The largest absolute value of each block."""
    rows, columns = values.shape
    blocks = torch.nn.functional.pad(values.float(), (0, -columns % 128, 0, -rows % 128))
    return blocks.abs().view(-(-rows // 128), 128, -1, 128).amax((1, 3))


def quantized(values, maxima=None):
    """The elements in float8_e4m3fn, and the factor of each block in float32; `maxima` are those of its blocks."""
    rows, columns = values.shape
    amax = block_maxima(values) if maxima is None else maxima
    bits = torch.where(amax == 0, 1.0, 448 / amax).view(torch.int32) & -0x00800000
    scale = bits.view(torch.float32)
    whole = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (values.float() * whole).to(torch.float8_e4m3fn), 1 / scale
