"""Tiny models, the boxes of their ranks, and the weights that a job has at a step."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128

import numpy as np
import numpy.typing as npt
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Range, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import BITS, FileLayout, lay_out
from resharder.server.ingest.boxes import PackedBoxes, pack

Weights = Mapping[str, npt.NDArray[np.generic]]
FILES = {"config.json": b'{"architectures": ["None"]}', "tokenizer.json": b"[]"}


@dataclass(frozen=True)
class Model:
    """Tensors, the boxes that each rank holds (tensor, box, replica), and how they are cut.

    The tensors at `frozen` change seldom, and all ranks say so.
    """

    specs: tuple[TensorSpec, ...]
    held: tuple[tuple[tuple[int, Box, bool], ...], ...]
    chunk_bytes: int
    file_bytes: int
    frozen: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return id(self)

    @property
    def world_size(self) -> int:
        return len(self.held)


def _rows(start: int, count: int, columns: int) -> Box:
    return (Range(start, count), Range(0, columns))


MODELS = (
    Model((TensorSpec("a", "F32", (4,)),), (((0, full_box((4,)), False),),), 1 << 20, 1 << 20),
    Model(
        (TensorSpec("a", "BF16", (4, 8)), TensorSpec("b", "F32", (3,))),
        (((0, _rows(0, 2, 8), False), (1, full_box((3,)), False)), ((0, _rows(2, 2, 8), False),)),
        32,
        1 << 20,
    ),
    Model(
        (TensorSpec("a", "U8", (6, 5)), TensorSpec("b", "BF16", (4, 4)), TensorSpec("c", "F32", ())),
        (
            ((0, _rows(0, 2, 5), False), (1, (Range(0, 4), Range(0, 2, 2)), False), (2, (), True)),
            ((0, _rows(2, 2, 5), False), (1, (Range(0, 4), Range(1, 2, 2)), False)),
            ((0, _rows(4, 2, 5), False), (2, (), False)),
        ),
        16,
        32,
    ),
    Model(
        (TensorSpec("a", "F32", (8,)), TensorSpec("b", "F32", (2,))),
        (((0, full_box((8,)), False),), (), ((1, full_box((2,)), False),)),
        16,
        16,
    ),
    Model(
        (TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (6,))),
        (((0, full_box((4,)), False), (1, full_box((6,)), False)),),
        16,
        1 << 20,
        (1,),
    ),
    Model(
        (TensorSpec("a", "BF16", (4, 4)), TensorSpec("b", "U8", (6, 5)), TensorSpec("c", "F32", (8,))),
        (
            ((0, _rows(0, 2, 4), False), (1, _rows(0, 3, 5), False)),
            ((1, _rows(3, 3, 5), False), (0, _rows(2, 2, 4), False)),
            ((2, full_box((8,)), False),),
        ),
        16,
        32,
        (1, 2),
    ),
)
"""One rank and tensor; two ranks; three ranks with strided boxes, a replica and two files; a rank without boxes; one rank with a
frozen tensor; three with two files of frozen tensors, one of which two ranks write and one a rank that has no others."""
STILL = 3
"""Steps between two changes of a frozen tensor."""


@lru_cache(maxsize=512)
def weights(model: Model, job: str, step: int, variant: str) -> Weights:
    """Return the raw bits of all tensors. `variant` tells apart processes that compute a step anew."""
    made = {}
    for number, spec in enumerate(model.specs):
        stage = f"{step // STILL}" if number in model.frozen else f"{step}/{variant}"
        content = shake_128(f"{job}/{stage}/{spec.name}".encode()).digest(spec.size)
        made[spec.name] = np.frombuffer(content, BITS[ITEM_SIZES[spec.dtype]]).reshape(spec.shape)
    return made


@lru_cache(maxsize=64)
def packed(model: Model, rank: int, *, torn: bool = False) -> PackedBoxes:
    """Return what a rank registers. `torn`: without its boxes of the first tensor, so that the slots do not tile the model."""
    return pack(each for each in model.held[rank] if each[0] or not torn)


@lru_cache(maxsize=8)
def layouts(model: Model) -> tuple[FileLayout, ...]:
    """Return the files of a version."""
    return lay_out(model.specs, model.file_bytes, dict.fromkeys((model.specs[number].name for number in model.frozen), "/frozen"))


def part(values: Weights, model: Model, rank: int, position: int) -> npt.NDArray[np.generic]:
    """Return the elements of a box that a rank holds."""
    tensor, box, _ = model.held[rank][position]
    array = values[model.specs[tensor].name]
    return array[box_index(box)] if box else array


def digest_of(values: Weights, model: Model, rank: int, position: int) -> int:
    """Return the digest of a box that a rank holds."""
    tensor, box, _ = model.held[rank][position]
    return digest(part(values, model, rank, position), box, model.specs[tensor].shape)
