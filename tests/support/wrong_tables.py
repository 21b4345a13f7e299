"""Mistakes in a family's table, which have to move its logits."""

from collections.abc import Callable
from dataclasses import replace

from resharder.converters.architectures.table import Table, Weight


def rewritten(table: Table, key: str, change: Callable[[Weight], Weight]) -> Table:
    return {k: tuple(change(w) for w in ws) if k.endswith(key) else ws for k, ws in table.items()}


def renamed(old: str, new: str) -> Callable[[Weight], Weight]:
    def swap(name: str) -> str:
        return name.replace(old, "\0").replace(new, old).replace("\0", new)

    return lambda weight: replace(weight, runs=tuple(replace(run, tensor=swap(run.tensor)) for run in weight.runs))


def exchanged(i: int, j: int) -> Callable[[Weight], Weight]:
    """Two runs with each other's HF rows."""

    def change(weight: Weight) -> Weight:
        runs = list(weight.runs)
        runs[i], runs[j] = replace(runs[i], first=runs[j].first), replace(runs[j], first=runs[i].first)
        return replace(weight, runs=tuple(runs))

    return change
