"""Write what the tests marked `compat` have shown of each release of vLLM and of megatron-core; a test compares.

Run `python -m tools.releases_table`. It reads `tests/vllm/releases/*.json`, which `make test-vllm VERSION=0.30.0` writes, and
`tests/converters/releases/*.json` of `make test-megatron VERSION=0.19.2`. It writes the tables in docs/reference/vllm.md
and docs/reference/trainer.md, the releases of vLLM that pages name, and `TESTED` in the plugin. What has run on GPUs is in
benchmarks/results/gpu_tests.md.
"""

import json
import re
from pathlib import Path
from typing import Any

from resharder.client.inference.vllm import in_words

from tests.support.release_results import MEGATRON, VLLM, Component

ROOT = Path(__file__).parents[1]
PAGES = {VLLM: ROOT / "docs" / "reference" / "vllm.md", MEGATRON: ROOT / "docs" / "reference" / "trainer.md"}
PLUGIN = ROOT / "client/resharder/client/inference/vllm/__init__.py"
NAMING = (ROOT / "docs" / "vllm.md", ROOT / "docs" / "guarantees.md", ROOT / "README.md")
"""Pages that name the tested releases: `0.28 to 0.32 on CPU, 0.26 on GPUs`."""
GPU_RUNS = ROOT / "benchmarks" / "results" / "gpu_tests.md"
BEGIN, END = "<!-- Table of releases, made by `python -m tools.releases_table`. -->", "<!-- End of the table. -->"
_MINORS = r"\d[\d.]*(?:(?:,| and| to) \d[\d.]*)*"
_NAMED = re.compile(f"{_MINORS} on CPU, {_MINORS} on GPUs")
TITLES = {
    "boxes": "install by boxes",
    "load_weights": "install by `load_weights`",
    "weight transfer": "[weight transfer](../frameworks.md)",
}
"""Titles of columns that are not the feature's name."""


def results(component: Component) -> list[dict[str, Any]]:
    """Return the files of all releases, the oldest first."""
    found = [json.loads(path.read_text()) for path in component.folder.glob("*.json")]
    return sorted(found, key=lambda each: _numbers(each[component.name]))


def minor(release: str) -> tuple[int, int]:
    """Return (0, 30) for `0.30.0`."""
    first, second = _numbers(release)[:2]
    return first, second


def on_cpus(component: Component = VLLM) -> list[tuple[int, int]]:
    """Return the minors that have shown every feature, and failed no test, on CPUs."""
    releases = results(component)
    return [minor(each[component.name]) for each in releases if all(map(_shown, map(each["features"].get, component.features)))]


def on_gpus() -> list[tuple[int, int]]:
    """Return the minors that the GPU tests have run with."""
    return sorted({minor(release) for release in re.findall(r"vLLM (\d+\.\d+\.\d+)", GPU_RUNS.read_text())})


def tested() -> list[tuple[int, int]]:
    """Return all of them, the oldest first."""
    return sorted({*on_cpus(), *on_gpus()})


def _shown(found: dict[str, Any] | None) -> bool:
    return found is not None and found["passed"] > 0 and not found["failed"]


def table(component: Component) -> str:
    """Return the table, with passed/all tests where some failed or were skipped, and the reasons for the latter."""
    if not results(component):
        return "No run has been recorded yet."
    rows = [[component.name, "Python", "torch", *(TITLES.get(feature, feature) for feature in component.features)]]
    rows.append(["---"] * len(rows[0]))
    skipped = dict[str, list[str]]()
    for each in results(component):
        release, python = each[component.name], ".".join(each.get("python", "–").split(".")[:2])
        cells = (_cell(each["features"].get(feature)) for feature in component.features)
        rows.append([release, python, each["torch"].partition("+")[0], *cells])
        reasons = sorted({reason for found in each["features"].values() for reason in found["skipped"]})
        for reason in reasons:
            skipped.setdefault(reason, []).append(release)
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return "\n\n".join([text, *(["Skipped:", "\n".join(_reasons(skipped))] if skipped else [])])


def _reasons(skipped: dict[str, list[str]]) -> list[str]:
    return [f"- {reason}: {', '.join(releases)}" for reason, releases in skipped.items()]


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    passed, failed, skipped = found["passed"], len(found["failed"]), sum(found["skipped"].values())
    share = f"{passed}/{passed + failed + skipped}" if failed or skipped else str(passed)
    return f"{share} **{failed} failed**" if failed else share


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def named() -> str:
    """Return the tested releases of vLLM as pages name them."""
    return f"{in_words(on_cpus())} on CPU, {in_words(on_gpus())} on GPUs"


def files() -> dict[Path, str]:
    """Return the text of each file that is made of the results."""
    texts = {path: path.read_text() for path in (*NAMING, *PAGES.values())}
    if results(VLLM):
        texts = {path: _NAMED.sub(named(), text) for path, text in texts.items()} | {PLUGIN: _plugin()}
    for component, page in PAGES.items():
        before, _, rest = texts[page].partition(BEGIN)
        texts[page] = f"{before}{BEGIN}\n\n{table(component)}\n\n{END}{rest.partition(END)[2]}"
    return texts


def _plugin() -> str:
    return re.sub(r"^TESTED = .*$", f"TESTED = {tuple(tested())}", PLUGIN.read_text(), count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
