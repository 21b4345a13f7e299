"""Whole tensors of a source, one after the other, verified."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from resharder.client.errors import CorruptData
from resharder.client.versions.source import WeightSource
from resharder.converters.geometry.layout import box_index, full_box
from resharder.converters.models.tensor_io import tensor_of_bits
from resharder.converters.storage.digest import Array, digest

if TYPE_CHECKING:
    import torch


def whole_tensors(source: WeightSource) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield the tensors of a source with their names, in host memory, only to be read. Each has the digest of the source.

    Raises:
        CorruptData: A digest differs.
        DaemonUnreachable: The daemon cannot be reached.
    """
    wanted = [(name, full_box(spec.shape)) for name, spec in source.specs.items()]
    expected = source.digests(wanted)
    for (name, box), array in zip(wanted, _arrays(source), strict=True):
        spec = source.specs[name]
        found = digest(array, box, spec.shape)
        if found != expected[name, box]:
            raise CorruptData(f"{source.name}: {name}: expected digest {expected[name, box]:016x}, got {found:016x}")
        yield name, tensor_of_bits(array, spec.dtype)


def _arrays(source: WeightSource) -> Iterator[Array]:
    """Yield the elements of all tensors; a tensor that arrives in parts is assembled first."""
    shapes = [spec.shape for spec in source.specs.values()]
    current, array = 0, None
    for position, box, bits in source.parts([(name, full_box(spec.shape)) for name, spec in source.specs.items()]):
        if position != current:
            assert array is not None
            yield array
            current, array = position, None
        if box == full_box(shapes[position]):
            array = bits
            continue
        if array is None:
            array = np.empty(shapes[position], bits.dtype)
        array[box_index(box)] = bits
    if array is not None:
        yield array
