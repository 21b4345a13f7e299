"""The form of a family's table: which rows of a whole Megatron tensor are which rows of HF tensors.

A table knows nothing of ranks: it speaks of tensors as they would be with no parallelism and no padding, under the names
that `sharded_state_dict` gives them (those are the same whatever the layout). Where a rank's part lies is Megatron's to say.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Box, Range, intersect_ranges

HFConfig = Mapping[str, Any]
"""A model's config.json."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows:
    """Megatron rows `at … at + count` are HF rows `first, first + step, …` of `tensor`. `index` picks one of several
    tensors that HF stacks in a leading dimension."""

    at: int
    count: int
    tensor: str
    first: int = 0
    step: int = 1
    index: int | None = None


class Overlap(NamedTuple):
    """Megatron rows from `row` on are `box` of HF tensor `tensor`."""

    row: int
    tensor: str
    box: Box


@dataclass(frozen=True)
class Weight:
    """One whole Megatron tensor. `runs` cover its dimension `axis`, some rows twice where HF stores them twice; where
    `transpose`, HF keeps the dimensions in reverse order; where `padded`, Megatron may add rows of no meaning at the end of
    dimension 0. HF's values are Megatron's plus `plus`; or, for the gain of a norm, `gain` is what HF stores for a gain of one
    (0 where HF adds the one itself), and what Megatron stores for it is the model's to say."""

    shape: tuple[int, ...]
    runs: tuple[Rows, ...]
    axis: int = 0
    transpose: bool = False
    padded: bool = False
    plus: float = 0.0
    gain: float | None = None

    def plus_where_one_is(self, stored: float) -> float:
        """HF's values less Megatron's, where Megatron stores a gain of one as `stored`."""
        return self.plus if self.gain is None else self.gain - stored

    def under(self, prefix: str) -> "Weight":
        """The same with every HF name under `prefix`. (Rows are made by hand: dataclasses.replace takes a second for 60,000.)"""
        runs = (Rows(run.at, run.count, prefix + run.tensor, run.first, run.step, run.index) for run in self.runs)
        return replace(self, runs=tuple(runs))

    def in_hf_order(self, dimensions: Sequence[T], stacked: T | None) -> tuple[T, ...]:
        """One item per Megatron dimension, as one per HF dimension; `stacked` is that of HF's leading dimension, if any."""
        ordered = tuple(dimensions[::-1] if self.transpose else dimensions)
        return ordered if stacked is None else (stacked, *ordered)

    def rows_known(self, within: Range) -> int:
        """How many of these rows the runs speak of."""
        known, end = 0, within.start
        for run in sorted(self.runs, key=lambda run: run.at):
            first, last = max(end, run.at), min(within.last + 1, run.at + run.count)
            known, end = known + max(0, last - first), max(end, last)
        return known

    def overlaps(self, within: Box) -> Iterator[Overlap]:
        """What the elements of `within`, a box of steps 1 of this Megatron tensor, are in HF tensors."""
        for run in self.runs:
            rows = intersect_ranges(Range(run.at, run.count), within[self.axis])
            if rows is None:
                continue
            first, step = run.first + (rows.start - run.at) * run.step, run.step if rows.count > 1 else 1
            dimensions = [*within[: self.axis], Range(first, rows.count, step), *within[self.axis + 1 :]]
            stacked = None if run.index is None else Range(run.index, 1)
            yield Overlap(rows.start, run.tensor, self.in_hf_order(dimensions, stacked))


Table = Mapping[str, tuple[Weight, ...]]
"""By Megatron key: one weight, or as many as the axis counts that Megatron puts before it (experts)."""


def hf_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Name and shape of every HF tensor the table speaks of: the least that holds all its rows.

    Raises LayoutError where two lines give one tensor different numbers of dimensions.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for weight in (weight for weights in table.values() for weight in weights):
        before, after = weight.shape[: weight.axis], weight.shape[weight.axis + 1 :]
        for run in weight.runs:
            rows, stacked = run.first + (run.count - 1) * run.step + 1, None if run.index is None else run.index + 1
            ends = weight.in_hf_order((*before, rows, *after), stacked)
            known = shapes.setdefault(run.tensor, ends)
            if len(known) != len(ends):
                name = run.tensor
                raise LayoutError(f"{name}: the table gives it {len(known)} dimensions in one line and {len(ends)} in another")
            if known != ends:
                shapes[run.tensor] = tuple(map(max, known, ends))
    return shapes
