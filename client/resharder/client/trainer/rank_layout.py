"""Boxes that a rank registers, and the tensors from which they are read at each publish."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import index as integer_of
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from resharder.client.errors import UsageError
from resharder.client.transport.base import HostArray, LiveItems
from resharder.converters.errors import ConversionError
from resharder.converters.geometry.layout import (
    PUBLISHABLE,
    Box,
    Layout,
    Piece,
    Range,
    TensorSpec,
    box_shape,
    format_box,
    full_box,
)
from resharder.converters.json_input import is_text

LAST_STEP = (1 << 63) - 1
Index = tuple[int | slice, ...]

if TYPE_CHECKING:
    import torch
    from resharder.client.transport.base import Item
    from resharder.converters.models.tensor_io import LookedUp

    Elements = torch.Tensor | HostArray
    TensorItem = tuple[str, Elements] | tuple[str, Index, Elements]
    """(hf_name, whole tensor) or (hf_name, index, part that the index selects)."""


class RankBox(NamedTuple):
    """Box of an HF tensor that a rank has; `replica` marks a copy of another rank's box."""

    tensor: str
    box: Box
    replica: bool = False


@dataclass(frozen=True)
class RankLayout:
    """Boxes that a rank registers, and their HF tensors by name.

    `contributed` and `received` have the blocks that a rank which casts to FP8 shares with others, as numbers of elements of
    their scales: `converters.quantization.layout`. `frozen` has the tensors that the rank does not expect to change.
    """

    tensors: dict[str, TensorSpec]
    boxes: tuple[RankBox, ...]
    contributed: Mapping[str, list[int]] = field(default_factory=dict)
    received: Mapping[str, list[int]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @cached_property
    def positions(self) -> dict[tuple[str, Box], int]:
        """Index of each (tensor, box) in `boxes`."""
        return {(each.tensor, each.box): position for position, each in enumerate(self.boxes)}


class DeclaredTensor(NamedTuple):
    """HF tensor, whole or in part, that a rank delivers.

    Attributes:
        name: Name of the HF tensor.
        dtype: torch's dtype, or safetensors' name.
        shape: Shape of the whole tensor.
        part: Index that selects the rank's part; None for the whole.
    """

    name: str
    dtype: "torch.dtype | str"
    shape: tuple[int, ...]
    part: Index | None = None


def step_number(step: object) -> int:
    """Return the label of a version. Raises UsageError for anything but an integer from 0 to `LAST_STEP`."""
    try:
        number = integer_of(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= LAST_STEP:
        raise UsageError(f"expected a step as an integer from 0 to {LAST_STEP}, got {step!r}")
    return number


def rank_layout_of(layout: Layout, frozen: Collection[str] = ()) -> RankLayout:
    """Return the boxes of a model's layout, in the order of its pieces. `frozen`: names of local tensors that do not change."""
    boxes = tuple(RankBox(piece.tensor, piece.box, piece.replica) for piece in layout.pieces)
    changing = {piece.tensor for piece in layout.pieces if piece.local not in frozen}
    return RankLayout(dict(layout.tensors), boxes, frozen=tuple(name for name in layout.tensors if name not in changing))


def declared_rank_layout(declared: Iterable[DeclaredTensor | tuple[Any, ...]]) -> RankLayout:
    """Return the layout of declared tensors.

    Raises UsageError for a dtype that safetensors lacks, two shapes of one tensor, and a box declared twice.
    """
    specs: dict[str, TensorSpec] = {}
    boxes: dict[tuple[str, Box], RankBox] = {}
    for entry in declared:
        name, dtype, shape, index = DeclaredTensor(*entry)
        tensor_name(name)
        spec = TensorSpec(name, dtype_name(name, dtype), tuple(shape))
        if specs.setdefault(name, spec) != spec:
            raise UsageError(
                f"{name}: declared as {specs[name].dtype} {list(specs[name].shape)} and as {spec.dtype} {list(shape)}"
            )
        box = box_of(name, index, spec.shape)
        if (name, box) in boxes:
            raise UsageError(f"{name}{format_box(box)}: declared twice")
        boxes[name, box] = RankBox(name, box)
    return RankLayout(specs, tuple(boxes.values()))


def declare(items: "Iterable[TensorItem]", shapes: Mapping[str, tuple[int, ...]]) -> list[DeclaredTensor]:
    """Return the declaration of items. `shapes` has the whole shapes of tensors that come in parts."""
    declared = []
    for item in items:
        name, index, tensor = split_item(item)
        shape = tuple(tensor.shape) if index is None else shapes.get(name)
        if shape is None:
            raise UsageError(
                f"{name}: expected the whole tensor, got a part, and the config does not determine the whole shape: "
                "call attach_tensors with names, dtypes, shapes and indices first"
            )
        declared.append(DeclaredTensor(name, tensor.dtype, shape, index))
    return declared


def opened(items: "Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]") -> "Iterable[TensorItem]":
    """Return the items, from either form in which a trainer gives them."""
    return items() if callable(items) else items


def split_item(item: "TensorItem") -> "tuple[str, Index | None, Elements]":
    """Return (name, index or None, tensor) of an item. Raises UsageError for any other form, and for a tensor without elements
    in memory.
    """
    if len(item) == 2 and _has_elements(item[1]):
        return tensor_name(item[0]), None, _readable(item[0], item[1])
    if len(item) == 3 and _has_elements(item[2]) and isinstance(item[1], tuple):
        return tensor_name(item[0]), item[1], _readable(item[0], item[2])
    raise UsageError(f"expected (hf_name, tensor) or (hf_name, index, tensor), got {tuple(type(part).__name__ for part in item)}")


def tensor_name(name: object) -> str:
    """Return the name of a tensor. Raises UsageError for one that is no text."""
    if not isinstance(name, str) or not is_text(name):
        raise UsageError(f"expected the name of a tensor as text, got {name!r}")
    return name


def _readable(name: str, tensor: "Elements") -> "Elements":
    if isinstance(tensor, HostArray):
        return tensor
    if (kind := type(tensor).__name__) == "DTensor":
        raise UsageError(f"{name} is a {kind}, a part of a tensor: attach the model, or pass its full_tensor()")
    if str(tensor.layout) != "torch.strided":
        raise UsageError(f"{name} has the layout {tensor.layout}: pass a dense tensor, such as its to_dense()")
    if has_no_memory(tensor):
        raise UsageError(_absent(name, tensor))
    return tensor


def has_no_memory(tensor: "torch.Tensor") -> bool:
    """Return whether a tensor has elements and no memory: it is on the meta device, or its storage is freed."""
    return bool(tensor.data_ptr() == tensor.storage_offset() * tensor.element_size() and tensor.numel())


def _has_elements(value: object) -> "TypeGuard[Elements]":
    torch = sys.modules.get("torch")  # absent: an import of safetensors runs without torch
    return isinstance(value, HostArray) or (torch is not None and isinstance(value, torch.Tensor))


def dtype_name(name: str, dtype: "torch.dtype | str") -> str:
    """Return safetensors' name of a dtype. Raises UsageError, naming tensor `name`, for one that cannot be published."""
    found = dtype if isinstance(dtype, str) else _torch_names().get(dtype, "")
    if found not in PUBLISHABLE:
        raise UsageError(f"{name}: expected one of {', '.join(PUBLISHABLE)}, got {dtype}")
    return found


def _torch_names() -> "dict[torch.dtype, str]":
    from resharder.converters.models.tensor_io import DTYPES

    return DTYPES


def box_of(name: str, index: Index | None, shape: tuple[int, ...]) -> Box:
    """Return the box that `tensor[index]` selects; an integer selects one index. Raises UsageError for an invalid index."""
    if index is None:
        return full_box(shape)
    if len(index) > len(shape):
        raise UsageError(f"{name}: expected at most {len(shape)} indices for shape {list(shape)}, got {index}")
    box = []
    for number, size in zip((*index, *[slice(None)] * (len(shape) - len(index))), shape, strict=True):
        if isinstance(number, slice):
            selected = range(*number.indices(size))
        elif isinstance(number, int):
            selected = range(number, number + 1)
        else:
            raise UsageError(f"{name}: expected slices and integers as index, got {number!r}")
        if not selected or selected[0] < 0 or selected[-1] >= size or selected.step < 1:
            raise UsageError(f"{name}: expected a forward range inside of {list(shape)}, got {index}")
        box.append(Range(selected[0], len(selected), selected.step if len(selected) > 1 else 1))
    return tuple(box)


class LiveTensors:
    """A model's own tensors, read in place at each publish."""

    def __init__(self, layout: Layout, tensors: "LookedUp"):
        self._layout, self._tensors = layout, tensors
        self._known = {name: _memory_form(tensor) for name, tensor in tensors.items()}
        self._positions: list[int] = []
        self._pieces: list[Piece] = []  # those at `_positions`

    @property
    def device(self) -> "torch.device | None":
        """Device of all tensors; None if there are several devices or no tensors."""
        return LiveItems(self._tensors, ()).device

    def check(self) -> None:
        """Find the tensors in the model again, before a version is read.

        Raises UsageError for tensors that were exchanged for others of another form, or have changed their shape, strides or
        dtype, or have no memory.
        """
        try:
            self._tensors.find_again()
        except ConversionError as error:
            raise UsageError(str(error)) from error
        for name, tensor in self._tensors.items():
            if (found := _memory_form(tensor)) != (known := self._known[name]):
                raise UsageError(
                    f"{name}: expected {_form_text(known)} as when the model was attached, found {_form_text(found)}: "
                    "attach again"
                )
            if has_no_memory(tensor):
                raise UsageError(_absent(name, tensor))

    def items(self, positions: Iterable[int]) -> LiveItems:
        """Return the tensors of the boxes at these positions, numbered in order."""
        if (positions := list(positions)) != self._positions:
            self._positions, self._pieces = positions, [self._layout.pieces[position] for position in positions]
        return LiveItems(self._tensors, self._pieces)


_Form = tuple["torch.dtype", tuple[int, ...], tuple[int, ...]]
"""Dtype, shape and strides."""


def _memory_form(tensor: "torch.Tensor") -> "_Form":
    return tensor.dtype, tensor.shape, tensor.stride()


def _absent(name: str, tensor: "torch.Tensor") -> str:
    if tensor.is_meta:
        return f"{name} is on the meta device and has no values: load the model before it is published"
    return f"{name}: its memory is freed: bring the parameters back before they are published"


def _form_text(form: "_Form") -> str:
    dtype, shape, strides = form
    return f"{dtype} {list(shape)} with strides {list(strides)}"


def assigned_items(rank_layout: RankLayout, positions: Iterable[int], items: "Iterable[TensorItem]") -> "Iterator[Item]":
    """Yield the assigned items with their numbers in the slot.

    Raises UsageError unless `items` are exactly the registered ones, in any order.
    """
    numbers = {position: number for number, position in enumerate(positions)}
    open_ = dict(rank_layout.positions)
    for item in items:
        name, index, tensor = split_item(item)
        spec = rank_layout.tensors.get(name)
        if spec is None:
            raise UsageError(f"{name}: this rank registered no such tensor; it registered {len(rank_layout.tensors)} others")
        box = box_of(name, index, spec.shape)
        position = open_.pop((name, box), None)
        if position is None:
            again = "was given twice" if (name, box) in rank_layout.positions else "was not registered by this rank"
            raise UsageError(f"{name}{format_box(box)}: {again}")
        number = numbers.get(position)
        if dtype_name(name, tensor.dtype) != spec.dtype or not _same_shape(tensor, box):
            raise UsageError(
                f"{name}{format_box(box)}: expected {spec.dtype} {list(box_shape(box))} as registered, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        if number is not None:
            yield number, tensor.reshape(box_shape(box)) if len(tensor.shape) != len(box) else tensor
    if open_:
        names = ", ".join(f"{name}{format_box(box)}" for name, box in list(open_)[:4])
        raise UsageError(f"{len(open_)} pieces of tensors that this rank registered were not given: {names}")


def _same_shape(tensor: "Elements", box: Box) -> bool:
    """Return whether shapes are equal, apart from dimensions of length 1, which integer indices omit."""
    return [n for n in tensor.shape if n != 1] == [n for n in box_shape(box) if n != 1]
