"""Chart of the time from `publish` to served, and of the pause, by path: `make chart` writes docs/images/served.svg.

All values are rows of the JSON files in benchmarks/results. A peer moves the same weights without a pause, a proof, or a version
that stays.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.rows import Row, read

RESULTS, IMAGE = Path(__file__).parent / "results", Path(__file__).parents[1] / "docs" / "images" / "served.svg"
ONE_GPU, TWO_GPUS, FOUR_GPUS = "peer_memory.json", "direct_install.json", "direct_path.json"
SERVED, PAUSE = "from publish to served", "pause as a client sees it"
COLORS = {"served": "#4c78a8", "pause": "#f58518", "held": "#54a24b", "peer": "#9d9da1"}
_LEFT, _WIDTH, _BAR, _FIRST, _LAST = 330, 470, 15, 0.01, 20.0  # pixels; seconds at the ends of the axis


class Bar(NamedTuple):
    """A duration in seconds, of kind `served`, `pause`, `held` or `peer`."""

    label: str
    kind: str
    seconds: float


def bars(model: str) -> list[Bar]:
    """Return the bars of a model. Raises KeyError if a row is missing."""
    files = {name: read(RESULTS / name) for name in (ONE_GPU, TWO_GPUS, FOUR_GPUS)}
    found = []
    for path, where, file in (
        ("direct, ahead of READY,", "ahead of READY, within one GPU", ONE_GPU),
        ("direct", "direct, within one GPU", ONE_GPU),
        ("direct, ahead of READY,", "ahead of READY, to another GPU", TWO_GPUS),
        ("direct", "direct, to another GPU", TWO_GPUS),
        ("staged", "staged", TWO_GPUS),
    ):
        for what, kind in ((SERVED, "served"), (PAUSE, "pause")):
            row = files[file][f"{path} {model}, 1 to 1, {what}"]
            found.append(Bar(f"{where}: {'served after' if kind == 'served' else 'pause'}", kind, row.ours))
    within: Row | None = files[ONE_GPU].get(f"direct {model}, 1 to 1, transfer")
    if within is not None and within.peer is not None:
        found.append(Bar("vLLM's CUDA IPC transfer, within one GPU", "peer", within.peer))
    for label, row in (
        ("vLLM's packed NCCL, two GPUs to two", files[FOUR_GPUS][f"direct {model}"]),
        ("vLLM's reload_weights of the same files", files[TWO_GPUS][f"staged {model}, 1 to 1"]),
    ):
        if row.peer is not None:
            found.append(Bar(label, "peer", row.peer))
    return found


def svg(charts: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return the picture: one part for each title, with a logarithmic axis."""
    lines, y = list[str](), 0
    for title, shown in charts:
        lines.append(f'<text x="8" y="{y + 22}" font-weight="bold">{title}</text>')
        top = y + 34
        for bar in shown:
            y = top + 4
            end = _at(bar.seconds)
            lines.append(f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{bar.label}</text>')
            lines.append(f'<rect x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_BAR}" fill="{COLORS[bar.kind]}"/>')
            lines.append(f'<text x="{end + 5:.1f}" y="{y + 12}">{_time(bar.seconds)}</text>')
            top += _BAR + 4
        y = top + 6
        for seconds in (0.01, 0.1, 1.0, 10.0):
            lines.append(f'<text x="{_at(seconds):.1f}" y="{y + 12}" text-anchor="middle" fill="#777">{_time(seconds)}</text>')
        y += 24
    size = f'width="{_LEFT + _WIDTH + 90}" height="{y}"'
    style = 'font-family="sans-serif" font-size="12"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>', background, *lines, "</svg>", ""])


def picture() -> str:
    """Return the picture of the present results."""
    titles = {"Qwen3-8B": "Qwen3-8B, 16.4 GB, one rank to one worker", "Qwen3-30B-A3B": "Qwen3-30B-A3B, 61 GB in 18,867 tensors"}
    return svg([(title, bars(model)) for model, title in titles.items()])


def _at(seconds: float) -> float:
    share = math.log(max(seconds, _FIRST) / _FIRST) / math.log(_LAST / _FIRST)
    return _LEFT + max(1.0, _WIDTH * share)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


if __name__ == "__main__":
    IMAGE.write_text(picture())
