"""Parameters that a trainer keeps in FP8, in blocks of 128 by 128: TransformerEngine's `Float8BlockwiseQTensor`.

Facts about TransformerEngine 2.9 to 2.11, for which megatron-core 0.16.1 asks:

- pytorch/tensor/storage/float8_blockwise_tensor_storage.py: `_rowwise_data` has the elements as uint8 in the parameter's shape,
  `_rowwise_scale_inv` their factors in float32. A value is its element times the factor of its block (`dequantize`).
  `_is_2D_scaled` distinguishes blocks of 128 by 128 from rows of 128; `_fp8_dtype.name` is kFloat8E4M3 or kFloat8E5M2.
- pytorch/tensor/float8_blockwise_tensor.py, `get_scale_shape`: each block from the parameter's first element on has a factor, and
  columns of factors are padded to a multiple of 4.

megatron-core 0.16.1 keeps the master weight as `main_param` of the parameter: whole in optimizer/optimizer.py, in
optimizer/distrib_optimizer.py the flat part of this data-parallel rank (`megatron/masters.py`).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from resharder.converters.errors import UnsupportedModel
from resharder.converters.models.tensor_io import DTYPES, LookedUp

SIDE = 128
"""Rows and columns of a block."""
_PADDED = 4


class Blockwise(NamedTuple):
    """Shape of an FP8 parameter in blocks."""

    rows: int
    columns: int

    @property
    def factors(self) -> tuple[int, int]:
        """Shape of its factors in memory."""
        down, across = -(-self.rows // SIDE), -(-self.columns // SIDE)
        return down, -(-across // _PADDED) * _PADDED


class MasterPart(NamedTuple):
    """Elements `start … end` of a flat parameter, of which a rank has the master weights.

    Attributes:
        start: First element.
        end: Element after the last one; `start` if the rank has none.
        owned: Whether no other rank delivers these elements.
    """

    start: int
    end: int
    owned: bool


UNDIVIDED: Mapping[str, MasterPart] = {}
"""Parts by name, if every master weight is whole."""


def factors_of(name: str) -> str:
    """Return the name of an FP8 parameter's factors among the local tensors."""
    return f"{name}.scale_inv"


def master_of(name: str) -> str:
    """Return the name of an FP8 parameter's master weight among the local tensors."""
    return f"{name}.main_param"


def is_blockwise(tensor: object) -> bool:
    """Return whether a parameter is in FP8 blocks. TransformerEngine is not imported."""
    return any(kind.__name__ == "Float8BlockwiseQTensor" for kind in type(tensor).__mro__)


class BlockwiseTensors(LookedUp):
    """A process's tensors, with those of each FP8 parameter by three names: its elements by its own, factors, master weight.

    They are looked up at each access, because optimizers and Megatron's DDP replace them.
    """

    def __init__(self, tensors: LookedUp, parts: Mapping[str, MasterPart] = UNDIVIDED) -> None:
        """Take tensors by name, and the parts of those of which this rank has a part of the master weights, which are flat.

        Raises UnsupportedModel for an FP8 parameter in another form than blocks of 128 by 128 in E4M3.
        """
        self.parts = parts
        self.blockwise = {name: _blockwise(name, tensor) for name, tensor in tensors.items() if is_blockwise(tensor)}
        """The FP8 parameters by name."""
        looks = {name: partial(tensors.__getitem__, name) for name in tensors.keys() - self.blockwise.keys()}
        for name, shape in self.blockwise.items():
            looks[name] = partial(_elements, name, tensors, shape)
            looks[factors_of(name)] = partial(_factors, name, tensors, shape)
            looks[master_of(name)] = partial(_master, name, tensors, shape, parts.get(name))
        super().__init__(tensors, lambda name: looks[name]())
        self._tensors = tensors

    def find_again(self) -> None:
        """Find the parameters in the model again, as `LocalTensors` does."""
        self._tensors.find_again()


def _blockwise(name: str, tensor: Any) -> Blockwise:
    kind = getattr(tensor._fp8_dtype, "name", tensor._fp8_dtype)
    if not tensor._is_2D_scaled or kind != "kFloat8E4M3" or tensor.dim() != 2:
        scaled = "128 by 128" if tensor._is_2D_scaled else "rows of 128"
        raise UnsupportedModel(f"{name}: expected an FP8 matrix in kFloat8E4M3 and blocks of 128 by 128, found {kind}, {scaled}")
    return Blockwise(*tensor.shape)


def _elements(name: str, tensors: Mapping[str, Any], shape: Blockwise) -> torch.Tensor:
    data = tensors[name]._rowwise_data
    if data is None or tuple(data.shape) != shape or not data.is_contiguous():
        raise UnsupportedModel(f"{name}: expected rowwise FP8 data of {list(shape)}, found {_form(data)}")
    found: torch.Tensor = data.view(torch.float8_e4m3fn)
    return found


def _factors(name: str, tensors: Mapping[str, Any], shape: Blockwise) -> torch.Tensor:
    found: torch.Tensor | None = tensors[name]._rowwise_scale_inv
    if found is None or (found.dtype, tuple(found.shape)) != (torch.float32, shape.factors) or not found.is_contiguous():
        raise UnsupportedModel(f"{name}: expected rowwise factors in float32 of {list(shape.factors)}, found {_form(found)}")
    return found


def _master(name: str, tensors: Mapping[str, Any], shape: Blockwise, part: MasterPart | None) -> torch.Tensor:
    found: torch.Tensor | None = getattr(tensors[name], "main_param", None)
    size = shape.rows * shape.columns if part is None else part.end - part.start
    if found is None or found.numel() != size or found.dtype not in DTYPES or not found.is_contiguous():
        wanted = f"whole master weight (main_param) of {list(shape)}" if part is None else f"master weight of {size} elements"
        raise UnsupportedModel(
            f"{name}: expected a {wanted} to cast, because its FP8 blocks are not all blocks of the version, found "
            f"{_form(found)}: attach once the optimizer is made; if it is distributed over data-parallel ranks, attach the "
            "chunks in Megatron's DDP (several instances of it are not supported)"
        )
    return found.detach().view(shape) if part is None else found.detach().view(-1)


def _form(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
