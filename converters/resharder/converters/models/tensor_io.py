"""Reads and writes of a layout's pieces in place, in a process's own tensors."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from resharder.converters.geometry.layout import Piece, StridedView

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
"""safetensors' names of the dtypes that can be published."""

_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def tensor_of_bits(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """Return the memory of an array of unsigned integers as a tensor of a safetensors dtype. It is only to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable"
        return torch.from_numpy(np.asarray(array)).view(_TORCH[dtype])


def view_of(tensor: torch.Tensor, view: StridedView) -> torch.Tensor:
    """Return a view that shares the tensor's memory, outside of autograd. The view's offset counts
    from the tensor's first element.
    """
    plain = tensor.detach()
    return plain.as_strided(view.shape, view.strides, plain.storage_offset() + view.offset)


def read_piece(tensors: Mapping[str, torch.Tensor], piece: Piece) -> torch.Tensor:
    """Return the HF values of a piece, in the shape of its box.

    The result is a view of the local tensor, or a new tensor if HF's values differ from the local ones by a constant.
    """
    there = view_of(tensors[piece.local], piece.view(piece.box))
    return there + piece.plus if piece.plus else there


def write_piece(tensors: Mapping[str, torch.Tensor], piece: Piece, values: torch.Tensor) -> None:
    """Write HF values, in the shape of the piece's box, into the local tensor.

    A constant between HF's values and Megatron's is subtracted in float32, so that only the local tensor's dtype rounds.
    """
    there = view_of(tensors[piece.local], piece.view(piece.box))
    there.copy_(values.float() - piece.plus if piece.plus else values)
