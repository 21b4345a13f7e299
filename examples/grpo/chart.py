"""Chart of a run: reward, lag of the tokens, and pauses of the server, step by step.

python -m examples.grpo.chart        # docs/images/grpo.svg, from examples/grpo/results.json
"""

from collections.abc import Sequence
from pathlib import Path

from examples.grpo.history import History, read

RESULTS, IMAGE = Path(__file__).with_name("results.json"), Path(__file__).parents[2] / "docs" / "images" / "grpo.svg"
_LEFT, _WIDTH, _TOP, _HEIGHT, _GAP = 60, 640, 34, 110, 52  # pixels
_BLUE, _ORANGE, _RED, _GRAY = "#4c78a8", "#f58518", "#e45756", "#9d9da1"

Points = Sequence[tuple[float, float]]
"""Optimizer steps and values."""


def svg(history: History) -> str:
    """Return the picture, with the same bytes for the same history."""
    steps = history.steps
    last = steps[-1].step
    step_of = {step.version: step.step for step in steps}
    pauses = [(step_of[pause.version], 1000 * pause.seconds) for pause in history.pauses if pause.version in step_of]
    oldest, longest = max(step.max_lag for step in steps), max((milliseconds for _, milliseconds in pauses), default=1)
    reward = _Panel("reward: mean over the samples of a step (0.5 by chance)", (0.4, 0.6, 0.8, 1.0), last, 0)
    lag = _Panel("lag of the tokens in optimizer steps: mean, and oldest token (gray)", _ticks(oldest), last, 1)
    pause = _Panel("pause of the server for the install of a step's version, in ms", _ticks(longest), last, 2)
    lines = [
        *reward.axes(),
        reward.line([(s.step, s.reward) for s in steps], _BLUE),
        *lag.axes(),
        lag.line([(s.step, s.max_lag) for s in steps], _GRAY),
        lag.line([(s.step, s.lag) for s in steps], _ORANGE),
        *pause.axes(),
        *pause.bars(pauses, _RED),
    ]
    size = f'width="{_LEFT + _WIDTH + 20}" height="{_TOP + 3 * (_HEIGHT + _GAP)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""])


class _Panel:
    """One of the three plots. The ends of `ticks` are those of its axis."""

    def __init__(self, title: str, ticks: Sequence[float], last: int, position: int) -> None:
        self._title, self._ticks, self._last = title, ticks, last
        self._top = _TOP + position * (_HEIGHT + _GAP)

    def axes(self) -> list[str]:
        lines = [f'<text x="{_LEFT}" y="{self._top - 12}" font-weight="bold">{self._title}</text>']
        for tick in self._ticks:
            y = self._y(tick)
            lines.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_LEFT + _WIDTH}" y2="{y}" stroke="#ddd"/>')
            lines.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#777">{tick:g}</text>')
        for step in [1, *range(5, self._last + 1, 5)]:
            y = self._top + _HEIGHT + 16
            lines.append(f'<text x="{self._x(step)}" y="{y}" text-anchor="middle" fill="#777">{step}</text>')
        return lines

    def line(self, points: Points, color: str) -> str:
        at = " ".join(f"{self._x(step)},{self._y(value)}" for step, value in points)
        return f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="2"/>'

    def bars(self, points: Points, color: str) -> list[str]:
        width, foot = 0.6 * _WIDTH / self._last, self._top + _HEIGHT
        return [
            f'<rect x="{self._x(step) - width / 2:.1f}" y="{self._y(value)}" width="{width:.1f}" '
            f'height="{foot - self._y(value):.1f}" fill="{color}"/>'
            for step, value in points
        ]

    def _x(self, step: float) -> float:
        return round(_LEFT + _WIDTH * (step - 0.5) / self._last, 1)

    def _y(self, value: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return round(self._top + _HEIGHT * (1 - share), 1)


def _ticks(highest: float) -> tuple[float, ...]:
    """Return about four round values, from 0 to at least `highest`."""
    step = next(s * 10**power for power in range(-3, 9) for s in (1, 2, 5) if 4 * s * 10**power >= highest)
    return tuple(step * position for position in range(5))


def main() -> None:
    IMAGE.write_text(svg(read(RESULTS)))


if __name__ == "__main__":
    main()
