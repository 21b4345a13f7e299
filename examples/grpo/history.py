"""Records of a run: a line of JSON for each optimizer step and for each install."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

FIRST, LAST = slice(5), slice(-5, None)
"""Steps whose rewards are compared."""


@dataclass(frozen=True)
class Step:
    """Optimizer step, and the samples that it used."""

    step: int
    version: int
    """Version that holds the weights after the step."""
    reward: float
    """Mean over the samples."""
    lag: float
    """Mean over the tokens, in optimizer steps."""
    max_lag: int
    mixed: int
    """Samples in the middle of which an install happened."""
    dropped: float
    """Share of the tokens that were too stale."""
    seconds: float


@dataclass(frozen=True)
class Pause:
    """Install on the server."""

    version: int
    seconds: float
    """Time from the pause of the engine to its resumption."""


@dataclass(frozen=True)
class History:
    """Complete run."""

    steps: list[Step]
    pauses: list[Pause]

    def mean_reward(self, steps: slice) -> float:
        """Return the mean reward of some steps."""
        return fmean(step.reward for step in self.steps[steps])

    def write(self, path: Path) -> None:
        """Write the run as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def append(path: Path, step: Step) -> None:
    """Append a step to a file of JSON lines."""
    with path.open("a") as lines:
        lines.write(json.dumps(asdict(step)) + "\n")


def read_steps(path: Path) -> list[Step]:
    """Return the steps of a file of JSON lines; none if it does not exist yet. An incomplete last line is skipped."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]


def read(path: Path) -> History:
    """Return the run of a file that `History.write` has written."""
    content = json.loads(path.read_text())
    return History([Step(**step) for step in content["steps"]], [Pause(**pause) for pause in content["pauses"]])
