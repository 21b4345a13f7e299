"""Reads and writes of a layout's pieces in place, in a process's own tensors."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from resharder.converters.geometry.layout import PUBLISHABLE, Piece, StridedView

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu, "BF16": torch.bfloat16, "F16": torch.float16, "I16": torch.int16, "U16": torch.uint16,
    "F32": torch.float32, "I32": torch.int32, "U32": torch.uint32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
"""torch's dtype for each dtype of safetensors."""

DTYPES = {TORCH_DTYPES[name]: name for name in PUBLISHABLE}
"""safetensors' names of the dtypes that can be published."""


class LookedUp(Mapping[str, torch.Tensor]):
    """Mapping of names to tensors that a function returns at each access."""

    def __init__(self, names: Iterable[str], look_up: Callable[[str], torch.Tensor]) -> None:
        self._names, self._look_up = dict.fromkeys(names), look_up

    def find_again(self) -> None:
        """Look for objects that were exchanged, before a version is read. Raises LayoutError."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._look_up(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def tensor_of_bits(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """Return the memory of an array of unsigned integers as a tensor of a safetensors dtype. It is only to be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable"
        return torch.from_numpy(np.asarray(array)).view(TORCH_DTYPES[dtype])


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
