"""The figures of a soak as Markdown."""

from collections.abc import Sequence
from math import inf

from tests.soak.verdict import Growth

_BYTES = ("rss", "pss", "uss", "anonymous", "shared")


def table(growths: Sequence[Growth], measures: Sequence[str] = ()) -> str:
    """Return a table with a line for each measure of each process; of all measures by default."""
    lines = ["| process | measure | after the warm-up | at the end | in 1,000 versions | bound |", "|---|---|---|---|---|---|"]
    for growth in growths:
        if not measures or growth.measure in measures:
            shown = [amount(growth.measure, value) for value in (growth.first, growth.last, growth.slope, growth.bound)]
            shown[2] = f"**{shown[2]}**" if growth.exceeded else shown[2]
            lines.append(f"| {growth.process} | {growth.measure} | {' | '.join(shown)} |")
    return "\n".join(lines)


def verdict(growths: Sequence[Growth]) -> list[str]:
    """Return a sentence for each measure that grows faster than its bound, or that is greater than its limit."""
    found = []
    for growth in growths:
        name = f"{growth.process}: {growth.measure}"
        if growth.slope > growth.bound:
            slope, bound = amount(growth.measure, growth.slope), amount(growth.measure, growth.bound)
            found.append(f"{name} grows by {slope} in 1,000 versions, the bound is {bound}")
        if growth.limit is not None and growth.greatest > growth.limit:
            greatest, limit = amount(growth.measure, growth.greatest), amount(growth.measure, growth.limit)
            found.append(f"{name} reached {greatest}, the limit is {limit}")
    return found


def amount(measure: str, value: float) -> str:
    """Return a value with its unit: MiB for bytes, else a count."""
    if value == inf:
        return "–"
    if measure in _BYTES or measure.endswith(" bytes"):
        return f"{value / (1 << 20):.2f} MiB"
    return f"{value:.1f}".removesuffix(".0")
