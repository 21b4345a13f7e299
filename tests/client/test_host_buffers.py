"""Batches of parts of host tensors, each of which is valid until the next one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from resharder.client.transport.host_buffers import HostPart, host_batches, host_parts
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import full_box

if TYPE_CHECKING:
    from resharder.client.transport.base import Item

MIB = 1 << 20
BOXES = [full_box((rows, MIB)) for rows in (3, 40, 1, 2, 30)]
CUTS = [[part.box for chunk in cut_chunks([box], [1], 4 * MIB) for part in chunk] for box in BOXES]
TENSORS = [torch.full((box[0].count, MIB), number, dtype=torch.uint8) for number, box in enumerate(BOXES)]


def boxes_of(batch: list[HostPart]) -> list[int]:
    """The boxes of a batch, each of whose parts is there once and has the box's values."""
    assert all((array == number).all() for number, _, array in batch)
    numbers = sorted({number for number, _, _ in batch})
    assert [(number, part) for number, part, _ in batch] == [(n, part) for n in numbers for part in range(len(CUTS[n]))]
    return numbers


def reused() -> "Iterator[Item]":
    """The items, in memory that each of them overwrites."""
    memory = torch.empty(max(tensor.numel() for tensor in TENSORS), dtype=torch.uint8)
    for number, tensor in enumerate(TENSORS):
        memory.fill_(99)
        yield number, memory[: tensor.numel()].view(tensor.shape).copy_(tensor)


def test_without_lasting_tensors_a_batch_has_those_of_one() -> None:
    assert [boxes_of(batch) for batch in host_batches(reused(), BOXES, CUTS)] == [[0], [1], [2], [3], [4]]


def test_lasting_tensors_share_a_batch_until_it_has_32_mib() -> None:
    found = host_batches(enumerate(TENSORS), BOXES, CUTS, lasting=True)
    assert [boxes_of(batch) for batch in found] == [[0, 1], [2, 3, 4]]


def test_parts_come_one_by_one_in_the_order_of_the_items() -> None:
    found = [(number, part, int(array.min()), int(array.max())) for number, part, array in host_parts(reused(), BOXES, CUTS)]
    assert found == [(number, part, number, number) for number, cuts in enumerate(CUTS) for part in range(len(cuts))]
