"""Form of a family's table: the rows of HF tensors that the rows of a whole Megatron tensor correspond to.

A table is independent of ranks. It describes tensors without parallelism and padding, under the names of `sharded_state_dict`,
which are the same for every layout. The place of a rank's part comes from Megatron.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import Box, Range, intersect_ranges

HFConfig = Mapping[str, Any]
"""Content of config.json."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rows:
    """Run of rows: Megatron rows `at … at + count` are HF rows `first, first + step, …` of `tensor`.

    `index` selects one of several tensors that HF stacks in a leading dimension.
    """

    at: int
    count: int
    tensor: str
    first: int = 0
    step: int = 1
    index: int | None = None


class Overlap(NamedTuple):
    """Rows of a Megatron tensor, from `row` on, that are `box` of HF tensor `tensor`."""

    row: int
    tensor: str
    box: Box


@dataclass(frozen=True)
class Weight:
    """One whole Megatron tensor.

    Attributes:
        shape: Shape without parallelism and padding.
        runs: Runs of rows that cover dimension `axis`; some rows twice if HF stores them twice.
        axis: Dimension that the runs divide.
        transpose: Whether HF has the dimensions in reverse order.
        padded: Whether Megatron may add meaningless rows at the end of dimension 0.
        plus: HF's values are Megatron's plus this constant.
        gain: For the gain of a norm, HF's value for a gain of one: 1, or 0 if HF adds one. The model determines Megatron's value.
    """

    shape: tuple[int, ...]
    runs: tuple[Rows, ...]
    axis: int = 0
    transpose: bool = False
    padded: bool = False
    plus: float = 0.0
    gain: float | None = None

    def plus_where_one_is(self, stored: float) -> float:
        """Return the difference of HF's values and Megatron's, for a model that stores a gain of one as `stored`."""
        return self.plus if self.gain is None else self.gain - stored

    def under(self, prefix: str) -> "Weight":
        """Return the same weight with every HF name under `prefix`.

        Rows are constructed directly: `dataclasses.replace` takes a second for 60,000.
        """
        runs = (Rows(run.at, run.count, prefix + run.tensor, run.first, run.step, run.index) for run in self.runs)
        return replace(self, runs=tuple(runs))

    def renamed(self, names: Mapping[str, str]) -> "Weight":
        """Return the same weight with the first part of each HF name replaced as `names` has it."""

        def name_of(tensor: str) -> str:
            return next((new + tensor.removeprefix(old) for old, new in names.items() if tensor.startswith(old)), tensor)

        runs = (Rows(run.at, run.count, name_of(run.tensor), run.first, run.step, run.index) for run in self.runs)
        return replace(self, runs=tuple(runs))

    def in_hf_order(self, dimensions: Sequence[T], stacked: T | None) -> tuple[T, ...]:
        """Return one item per HF dimension, from one per Megatron dimension.

        `stacked` is the item of the leading dimension in which HF stacks tensors; None without such a dimension.
        """
        ordered = tuple(dimensions[::-1] if self.transpose else dimensions)
        return ordered if stacked is None else (stacked, *ordered)

    def rows_known(self, within: Range) -> int:
        """Return the number of rows of `within` that the runs cover."""
        known, end = 0, within.start
        for run in sorted(self.runs, key=lambda run: run.at):
            first, last = max(end, run.at), min(within.last + 1, run.at + run.count)
            known, end = known + max(0, last - first), max(end, last)
        return known

    def overlaps(self, within: Box) -> Iterator[Overlap]:
        """Yield the HF boxes of `within`, a box of steps 1 of this Megatron tensor."""
        for run in self.runs:
            rows = intersect_ranges(Range(run.at, run.count), within[self.axis])
            if rows is None:
                continue
            first, step = run.first + (rows.start - run.at) * run.step, run.step if rows.count > 1 else 1
            dimensions = [*within[: self.axis], Range(first, rows.count, step), *within[self.axis + 1 :]]
            stacked = None if run.index is None else Range(run.index, 1)
            yield Overlap(rows.start, run.tensor, self.in_hf_order(dimensions, stacked))


Table = Mapping[str, tuple[Weight, ...]]
"""Weights by Megatron key: one, or one per expert if Megatron stacks experts in a leading dimension."""


def hf_shapes(table: Table) -> dict[str, tuple[int, ...]]:
    """Return the shape of every HF tensor in the table by name: the smallest shape that contains all its rows.

    Raises LayoutError if two lines give a tensor different numbers of dimensions.
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
