"""Layouts and copies over the wire: the same on the other side, and refused where they cannot be."""

from typing import Any

import numpy as np
import pytest
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.piece_arrays import join, pack
from resharder.converters.geometry.plan import plan, plan_pieces
from resharder.converters.wire.direct import copies_from_proto, copies_to_proto, layout_from_proto, layout_to_proto
from resharder.v1 import direct_pb2

from benchmarks.direct_layouts import DENSE, EXPERTS, written_trainer, written_workers

CONFIGS = {"dense": DENSE, "experts": EXPERTS}


@pytest.mark.parametrize("kind", CONFIGS)
def test_layouts_that_were_sent_one_by_one_give_the_same_plan(kind: str) -> None:
    trainer, workers = written_trainer(CONFIGS[kind], 2), written_workers(CONFIGS[kind], 2)
    sides = [
        join([layout_from_proto(sent(layout_to_proto(pack({rank: layout}))), rank) for rank, layout in enumerate(side.values())])
        for side in (trainer, workers)
    ]
    here, there = copies_of(plan(trainer, workers)), copies_of(plan_pieces(*sides))
    arrived = copies_from_proto(direct_pb2.DirectCopies.FromString(copies_to_proto(there).SerializeToString()))
    assert arrived.source_locals == here.source_locals
    assert arrived.target_locals == here.target_locals
    for name in ("source", "target", "source_local", "target_local", "source_offset", "counts", "target_strides", "item", "plus"):
        assert np.array_equal(getattr(arrived, name), getattr(here, name)), name


def first(config: dict[str, Any]) -> Layout:
    return next(iter(written_trainer(config, 2).values()))


def sent(message: direct_pb2.MemoryLayout) -> direct_pb2.MemoryLayout:
    return direct_pb2.MemoryLayout.FromString(message.SerializeToString())


@pytest.mark.parametrize(
    ("field", "content", "why"),
    [
        ("local", b"", "local: expected .* bytes"),
        ("strides", bytes(8), "strides: expected .* bytes"),
        ("tensor", None, "numbers of a tensor below"),
        ("start", None, "expected a box inside of"),
        ("count", None, "expected a box inside of"),
        ("offset", None, "offsets and strides of 0 or more"),
    ],
)
def test_arrays_that_cannot_be_are_refused(field: str, content: bytes | None, why: str) -> None:
    message = layout_to_proto(pack({0: first(DENSE)}))
    given = getattr(message, field)
    setattr(message, field, np.full(len(given) // 8, -5, "<i8").tobytes() if content is None else content)
    with pytest.raises(LayoutError, match=why):
        layout_from_proto(message, 0)


def test_copies_that_cannot_be_are_refused() -> None:
    message = copies_to_proto(copies_of(plan(written_trainer(DENSE, 2), written_workers(DENSE, 2))))
    for field, why in (
        ("source_local", "numbers of a tensor below"),
        ("counts", "1 or more"),
        ("target_offset", "nothing below 0"),
    ):
        wrong = direct_pb2.DirectCopies.FromString(message.SerializeToString())
        setattr(wrong, field, np.full(len(getattr(message, field)) // 8, -5, "<i8").tobytes())
        with pytest.raises(LayoutError, match=why.replace("tensor", "source_local") if field == "source_local" else why):
            copies_from_proto(wrong)


def test_tensors_that_two_processes_know_differently_are_refused_by_name() -> None:
    one, other = (pack({0: first(config)}) for config in (DENSE, DENSE | {"hidden_size": 2 * DENSE["hidden_size"]}))
    with pytest.raises(LayoutError, match="held as"):
        join([one, other])
