"""Digests of boxes of a rank, computed where its memory is, with constants added."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import torch
from resharder.client.gpu.digest import CachedDigester
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import StridedView, box_shape
from resharder.converters.geometry.piece_arrays import Ints, Pieces
from resharder.converters.models.tensor_io import view_of
from resharder.converters.storage.digest import digest_torch


class BoxDigests:
    """Digests of the same boxes for every version: by a GPU that has all of them, else each on its own device."""

    def __init__(self, pieces: Pieces[int], device: torch.device) -> None:
        self._pieces, self._device, self._on_gpu = pieces, device, device.type == "cuda"
        self._plain, self._changed = np.flatnonzero(pieces.plus == 0), np.flatnonzero(pieces.plus != 0)
        self._digester = CachedDigester(_take(pieces, self._plain), device)

    def of(self, tensors: Collection[str]) -> "BoxDigests":
        """Return those of boxes of some HF tensors."""
        which = np.flatnonzero([self._pieces.specs[number].name in tensors for number in self._pieces.tensor.tolist()])
        return BoxDigests(_take(self._pieces, which), self._device)

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Locate the tensors, before their digests are needed. Raises LayoutError."""
        try:
            _check_inside(self._pieces, tensors)
            if self._on_gpu:
                self._digester.at(tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise LayoutError(f"cannot compute the digests of boxes: {error}") from error

    def digests(self, tensors: Mapping[str, torch.Tensor]) -> list[int]:
        """Return the digests in the order of the pieces, after the current stream's pending work. Raises LayoutError."""
        self.prepare(tensors)
        try:
            if not self._on_gpu:
                return [_digest(self._pieces, i, tensors) for i in range(len(self._pieces))]
            found = np.zeros(len(self._pieces), np.uint64)
            found[self._plain] = self._digester.at(tensors).digests()
            for i in self._changed.tolist():
                found[i] = _digest(self._pieces, i, tensors)
        except (KeyError, ValueError, RuntimeError) as error:
            raise LayoutError(f"cannot compute the digests of boxes: {error}") from error
        digests: list[int] = found.tolist()
        return digests


def _digest(sent: Pieces[int], i: int, tensors: Mapping[str, torch.Tensor]) -> int:
    n, spec = sent.dimensions(i), sent.specs[sent.tensor[i]]
    box = sent.boxes.box(i, n)
    view = StridedView(box_shape(box), tuple(sent.strides[i, :n].tolist()), int(sent.offset[i]))
    values = view_of(tensors[sent.locals[sent.local[i]]], view)
    return digest_torch(values + float(sent.plus[i]) if sent.plus[i] else values, box, spec.shape)


def _check_inside(sent: Pieces[int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for a piece outside of its tensor."""
    ends = sent.offset + ((sent.boxes.count - 1) * sent.strides).sum(axis=1)
    used = np.unique(sent.local).tolist()
    room = np.zeros(len(sent.locals), np.int64)
    for number in used:
        tensor = tensors[sent.locals[number]]
        room[number] = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if len(outside := np.flatnonzero(ends >= room[sent.local])):
        raise ValueError(f"a box ends outside of {sent.locals[sent.local[outside[0]]]}")


def _take(sent: Pieces[int], which: Ints) -> Pieces[int]:
    names = ("tensor", "process", "local", "offset", "strides", "plus")
    return replace(sent, boxes=sent.boxes.take(which), **{name: getattr(sent, name)[which] for name in names})
