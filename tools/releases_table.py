"""Write what the tests marked `compat` have shown of each release of vLLM; a test compares.

Run `python -m tools.releases_table`. It reads `tests/vllm/releases/*.json`, which `make test-vllm VERSION=0.30.0` writes. It
writes the table in docs/vllm.md, the releases that pages name, and `TESTED` in the plugin. What has run on GPUs is in
benchmarks/results/gpu_tests.md.
"""

import json
import re
from pathlib import Path
from typing import Any

from resharder.client.inference.vllm import in_words

from tests.support.release_results import FEATURES, RELEASES

ROOT = Path(__file__).parents[1]
PAGE, PLUGIN = ROOT / "docs" / "vllm.md", ROOT / "client/resharder/client/inference/vllm/__init__.py"
NAMING = (PAGE, ROOT / "docs" / "guarantees.md", ROOT / "README.md")
"""Pages that name the tested releases: `0.28 to 0.32 on CPU, 0.26 on GPUs`."""
GPU_RUNS = ROOT / "benchmarks" / "results" / "gpu_tests.md"
BEGIN, END = "<!-- Table of releases, made by `python -m tools.releases_table`. -->", "<!-- End of the table. -->"
_MINORS = r"\d[\d.]*(?:(?:,| and| to) \d[\d.]*)*"
_NAMED = re.compile(f"{_MINORS} on CPU, {_MINORS} on GPUs")
TITLES = {
    "boxes": "install by boxes",
    "load_weights": "install by `load_weights`",
    "weight transfer": "[weight transfer](frameworks.md)",
}
"""Titles of columns that are not the feature's name."""


def results() -> list[dict[str, Any]]:
    """Return the files of all releases, the oldest first."""
    found = [json.loads(path.read_text()) for path in RELEASES.glob("*.json")]
    return sorted(found, key=lambda each: _numbers(each["vllm"]))


def minor(release: str) -> tuple[int, int]:
    """Return (0, 30) for `0.30.0`."""
    first, second = _numbers(release)[:2]
    return first, second


def on_cpus() -> list[tuple[int, int]]:
    """Return the minors that have shown every feature, and failed no test, on CPUs."""
    return [minor(each["vllm"]) for each in results() if all(map(_shown, map(each["features"].get, FEATURES)))]


def on_gpus() -> list[tuple[int, int]]:
    """Return the minors that the GPU tests have run with."""
    return sorted({minor(release) for release in re.findall(r"vLLM (\d+\.\d+\.\d+)", GPU_RUNS.read_text())})


def tested() -> list[tuple[int, int]]:
    """Return all of them, the oldest first."""
    return sorted({*on_cpus(), *on_gpus()})


def _shown(found: dict[str, Any] | None) -> bool:
    return found is not None and found["passed"] > 0 and not found["failed"]


def table() -> str:
    """Return the table, and what was skipped."""
    rows = [["vLLM", "torch", *(TITLES.get(feature, feature) for feature in FEATURES)]]
    rows.append(["---"] * len(rows[0]))
    skipped = list[str]()
    for each in results():
        rows.append([each["vllm"], each["torch"].partition("+")[0], *(_cell(each["features"].get(name)) for name in FEATURES)])
        reasons = sorted({reason for found in each["features"].values() for reason in found["skipped"]})
        skipped += [f"- {each['vllm']}: {reason}" for reason in reasons]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([text, *(["Skipped:", "\n".join(skipped)] if skipped else [])])


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    parts = [
        f"{found['passed']} passed" if found["passed"] else "",
        f"**{len(found['failed'])} failed**" if found["failed"] else "",
        f"{sum(found['skipped'].values())} skipped" if found["skipped"] else "",
    ]
    return ", ".join(filter(None, parts))


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def named() -> str:
    """Return the tested releases as pages name them."""
    return f"{in_words(on_cpus())} on CPU, {in_words(on_gpus())} on GPUs"


def files() -> dict[Path, str]:
    """Return the text of each file that is made of the results."""
    texts = {path: _NAMED.sub(named(), path.read_text()) for path in NAMING}
    before, _, rest = texts[PAGE].partition(BEGIN)
    texts[PAGE] = f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"
    texts[PLUGIN] = _plugin()
    return texts


def _plugin() -> str:
    return re.sub(r"^TESTED = .*$", f"TESTED = {tuple(tested())}", PLUGIN.read_text(), count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
