"""The verdict of a soak: how fast each measure of each process grows, and whether that is below its bound. Pure functions.

    for growth in judge(samples):
        print(growth.process, growth.measure, growth.slope, growth.bound, growth.exceeded)

The growth of a measure is the Theil–Sen slope over the versions published, after the warm-up: the median slope between all
pairs of samples, which single outliers do not move.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

MIB = float(1 << 20)
WARM_UP = 1 / 3
"""Part of the versions, from the first one on, during which samples do not count."""
FEWEST = 20
"""Samples after the warm-up below which a process has no slope."""
BOUNDS: Mapping[str, float] = {
    "rss": 16 * MIB, "pss": inf, "uss": 16 * MIB, "anonymous": 16 * MIB, "shared": 16 * MIB,
    "descriptors": 8, "sockets": 8, "pipes": 8, "events": 8, "segments": 8, "files": 8,
    "mappings": 64, "threads": 8, "children": 4, "processes": 4,
    "store files": 8, "store bytes": 16 * MIB, "staging files": 8, "staging bytes": 16 * MIB,
    "held files": 8, "held bytes": 16 * MIB, "fleets bytes": 0.25 * MIB,
    "history bytes": inf, "events bytes": inf, "log bytes": 8 * MIB, "metrics bytes": 4096,
    "slots": 1, "active": 1, "registered": 1, "pinned": 1, "loaded": 1, "kinds": 1, "known": inf,
}  # fmt: skip
"""Growth in 1,000 versions that each measure may have: bytes, or a count.

Other processes of the machine change pss as well, and journals grow until they are rotated: LIMITS bounds them.
"""
LIMITS: Mapping[str, float] = {"history bytes": 2 * 2.1 * MIB, "events bytes": 2 * 10_000 * 1024.0, "known": 100 * 256.0}
"""Bounds on the size of a journal with its rotated file, and on what is remembered of versions, whatever their growth."""


@dataclass(frozen=True)
class Sample:
    """Measures of one process, or of all files of the run, when `versions` had been published."""

    process: str
    versions: int
    measures: Mapping[str, float]


@dataclass(frozen=True)
class Growth:
    """Growth of one measure of one process.

    Attributes:
        first: Median of the first tenth of the samples that count.
        last: Median of the last tenth.
        slope: Growth in 1,000 versions.
        bound: Bound on `slope`.
        limit: Bound on the greatest value; None without one.
        greatest: Greatest value, the warm-up included.
    """

    process: str
    measure: str
    first: float
    last: float
    slope: float
    bound: float
    limit: float | None
    greatest: float

    @property
    def exceeded(self) -> bool:
        """Whether the measure grows faster than its bound, or is greater than its limit."""
        return self.slope > self.bound or (self.limit is not None and self.greatest > self.limit)


def theil_sen(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the median slope of all pairs of points with different `x`. Raises ValueError without such a pair."""
    across, up = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    first, second = np.triu_indices(len(across), 1)
    run = across[second] - across[first]
    apart = run != 0
    if not apart.any():
        raise ValueError(f"expected two different values of x, got {len(across)} points at {sorted(set(x))}")
    return float(np.median((up[second] - up[first])[apart] / run[apart]))


def judge(samples: Iterable[Sample]) -> list[Growth]:
    """Return the growth of every measure of every process that has samples enough, in the order in which they appear.

    The others begin or end during the run; `processes` counts them.

    Raises:
        KeyError: A measure has no bound.
        ValueError: No process has `FEWEST` samples after the warm-up, or no version was published meanwhile.
    """
    series: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        series[sample.process].append(sample)
    warm = WARM_UP * max((sample.versions for found in series.values() for sample in found), default=0)
    counted = {process: [sample for sample in found if sample.versions > warm] for process, found in series.items()}
    most = max(map(len, counted.values()), default=0)
    if most < FEWEST:
        raise ValueError(f"expected at least {FEWEST} samples of a process after the warm-up, got {most}")
    judged = [process for process, found in counted.items() if len(found) >= FEWEST]
    return [growth for process in judged for growth in _growths(process, counted[process], series[process])]


def _growths(process: str, counted: Sequence[Sample], samples: Sequence[Sample]) -> Iterator[Growth]:
    versions = [float(sample.versions) for sample in counted]
    for measure in counted[0].measures:
        values = [sample.measures[measure] for sample in counted]
        tenth = max(1, len(values) // 10)
        yield Growth(
            process=process,
            measure=measure,
            first=float(np.median(values[:tenth])),
            last=float(np.median(values[-tenth:])),
            slope=1000 * theil_sen(versions, values),
            bound=BOUNDS[measure],
            limit=LIMITS.get(measure),
            greatest=max(sample.measures[measure] for sample in samples),
        )
