"""Modules with TransformerEngine's constructors, parameters and results."""

import math
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn import Parameter


def _mappings():
    """megatron-core's collectives that know their gradients; imported late, because megatron-core imports this package."""
    from megatron.core.tensor_parallel import mappings

    return mappings


def _weight(rows, columns, init_method, params_dtype, device):
    weight = Parameter(torch.empty(rows, columns, device=device, dtype=params_dtype))
    if init_method is not None and weight.device.type != "meta":
        init_method(weight)
    return weight


def _mark_parallel(parameter, dim):
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1


def _rms_norm(x, weight, eps, zero_centered):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + zero_centered)).to(x.dtype)


class TransformerEngineBaseModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8_meta = {"fp8_checkpoint": False, "recipe": None}
        self.fp8 = self.fp8_calibration = False

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass

    def set_tensor_parallel_group(self, group):
        self.tp_group = group


class Linear(TransformerEngineBaseModule):
    def __init__(self, in_features, out_features, sequence_parallel=False, tp_group=None, tp_size=1, init_method=None, bias=True,
                 return_bias=False, params_dtype=None, parallel_mode=None, device="cpu", **kwargs):  # fmt: skip
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
        self.parallel_mode, self.use_bias, self.return_bias = parallel_mode, bias, return_bias
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.save_original_input, self.ub_name = False, kwargs.get("ub_name")
        if parallel_mode == "column":
            out_features //= self.tp_size
        elif parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        self.register_norm(in_features, params_dtype, device)
        self.weight = _weight(out_features, in_features, init_method, params_dtype, device)
        _mark_parallel(self.weight, 1 if parallel_mode == "row" else 0)
        if bias:
            self.bias = Parameter(torch.zeros(out_features, device=device, dtype=params_dtype))
            if parallel_mode == "column":
                _mark_parallel(self.bias, 0)
            else:
                self.bias.sequence_parallel = self.sequence_parallel
        else:
            self.bias = torch.empty(0, dtype=params_dtype)

    def register_norm(self, size, dtype, device):
        pass

    def norm(self, x):
        return x

    def gather(self, x):
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return _mappings().gather_from_sequence_parallel_region(x, group=self.tp_group)
        return _mappings().copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def reduce(self, y):
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        if self.sequence_parallel:
            return _mappings().reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return _mappings().reduce_from_tensor_model_parallel_region(y, group=self.tp_group)

    def forward(self, x, is_first_microbatch=None, **kwargs):
        y = self.reduce(F.linear(self.gather(self.norm(x)), self.weight))
        if self.return_bias:
            return y, self.bias
        return y + self.bias if self.use_bias else y


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, eps=1e-5, normalization="LayerNorm", zero_centered_gamma=False,
                 return_layernorm_output=False, **kwargs):  # fmt: skip
        self.__dict__.update(eps=eps, normalization=normalization, zero_centered_gamma=zero_centered_gamma)
        super().__init__(in_features, out_features, **kwargs)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def register_norm(self, size, dtype, device):
        self.layer_norm_weight = Parameter(torch.full((size,), 1.0 - self.zero_centered_gamma, dtype=dtype, device=device))
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = Parameter(torch.zeros(size, dtype=dtype, device=device))

    def norm(self, x):
        if self.normalization == "RMSNorm":
            return _rms_norm(x, self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        return F.layer_norm(x, x.shape[-1:], self.layer_norm_weight + self.zero_centered_gamma, self.layer_norm_bias, self.eps)


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(self, num_gemms, in_features, out_features, sequence_parallel=False, tp_group=None, tp_size=1, init_method=None,
                 bias=True, return_bias=False, params_dtype=None, parallel_mode=None, device="cpu", **kwargs):  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        self.parallel_mode, self.save_original_input = parallel_mode, False
        self.tp_group = tp_group
        self.tp_size = dist.get_world_size(tp_group) if tp_group is not None else tp_size
        if parallel_mode == "column":
            out_features //= self.tp_size
        elif parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        for i in range(num_gemms):
            weight = _weight(out_features, in_features, init_method, params_dtype, device)
            _mark_parallel(weight, 1 if parallel_mode == "row" else 0)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", Parameter(torch.zeros(out_features, device=device, dtype=params_dtype)))
            else:
                setattr(self, f"bias{i}", torch.empty(0, dtype=params_dtype))

    def forward(self, x, m_splits, is_first_microbatch=None):
        parts = torch.split(x, list(m_splits), 0)
        biases = [getattr(self, f"bias{i}") for i in range(self.num_gemms)]
        results = [F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]
        if self.use_bias and not self.return_bias:
            results = [result + bias for result, bias in zip(results, biases, strict=True)]
        return (torch.cat(results, 0), biases) if self.return_bias else torch.cat(results, 0)


class _Norm(nn.Module):
    def __init__(self, normalized_shape=None, eps=1e-5, sequence_parallel=None, params_dtype=None, zero_centered_gamma=False,
                 hidden_size=None, device="cpu", **kwargs):  # fmt: skip
        super().__init__()
        size = normalized_shape or hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.weight = Parameter(torch.full((size,), 1.0 - zero_centered_gamma, dtype=params_dtype, device=device))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class RMSNorm(_Norm):
    def forward(self, x):
        return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


class LayerNorm(_Norm):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bias = Parameter(torch.zeros_like(self.weight))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight + self.zero_centered_gamma, self.bias, self.eps)


class DotProductAttention(TransformerEngineBaseModule):
    """Attention over [sequence, batch, heads, channels], to `window_size[0]` tokens back if given, with a sink per head
    where `softmax_type` is learnable."""

    def __init__(self, num_attention_heads, kv_channels, softmax_scale=None, softmax_type="vanilla", window_size=None, tp_size=1,
                 **kwargs):  # fmt: skip
        super().__init__()
        if softmax_type not in ("vanilla", "learnable"):
            raise NotImplementedError(f"softmax_type {softmax_type}")
        channels = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale, self.window_size = softmax_scale or 1.0 / math.sqrt(channels), window_size
        sinks = Parameter(torch.empty(num_attention_heads // tp_size)) if softmax_type == "learnable" else None
        self.register_parameter("softmax_offset", sinks)

    def set_context_parallel_group(self, *args):
        pass

    def forward(self, q, k, v, attention_mask=None, attn_mask_type="causal", **kwargs):
        if kwargs.get("qkv_format") == "thd":  # sequences one after the other, [tokens, heads, channels]
            ends = kwargs["cu_seqlens_q"].tolist()
            parts = [tuple(x[first:last, None] for x in (q, k, v)) for first, last in pairwise(ends)]
            return torch.cat([self._attend(*part, "causal" in attn_mask_type)[:, 0] for part in parts])
        return self._attend(q, k, v, causal=True)

    def _attend(self, q, k, v, causal):
        length, batch, heads, _ = q.shape
        q, k, v = (x.permute(1, 2, 0, 3).repeat_interleave(heads // x.shape[2], 1) for x in (q, k, v))
        scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        future = torch.ones(length, length, dtype=torch.bool).triu(1) & causal
        past = torch.ones_like(future).tril(-self.window_size[0] - 1) if self.window_size else torch.zeros_like(future)
        scores = scores.masked_fill(future | past, float("-inf"))
        if self.softmax_offset is not None:
            sinks = self.softmax_offset.float().view(1, heads, 1, 1).expand(batch, heads, length, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :length]
        return (weights.to(v.dtype) @ v).permute(2, 0, 1, 3).reshape(length, batch, -1)


class _Absent(TransformerEngineBaseModule):
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(type(self).__name__)


class Fp8Padding(_Absent):
    pass


class Fp8Unpadding(_Absent):
    pass


class TransformerLayer(_Absent):
    pass


class LayerNormMLP(_Absent):
    pass
