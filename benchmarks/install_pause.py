"""Parts of an install's pause beside its transfer: `python -m benchmarks.install_pause [--rounds N] [--each N]`.

Megatron ranks, a daemon and a vLLM server run on a CPU, over gloo, with a model so small that a transfer takes almost no time.
`--gpu`: with the shape of Qwen3-8B, over NCCL, on a GPU for each rank and each worker.

An answer is streamed throughout. The phases of an install are those of its trace (docs/tracing.md), with the gaps between them.
It prints medians over all installs, direct and staged, and lower quartiles, on which other load of the machine has less effect.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median, quantiles

from rich.console import Console
from rich.table import Table

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, Client, System
from tests.support.collector import Collector, Span
from tests.support.observing import wait_serving, wait_until

PHASES = {
    "pause": "vLLM's pause: the step under way ends",
    "to workers": "from there into the slowest worker",
    "turn": "the worker finds its tensors and waits for its turn",
    "transfer": "bytes arrive",
    "verify": "digests",
    "apply": "the rest of what the worker does",
    "from workers": "until the control side has heard of all workers",
    "reset": "vLLM's caches",
    "daemon": "to the daemon, which commits, and back",
    "resume": "vLLM goes on",
    "first": "until the first token",
    "pause in all": "from the order to where vLLM goes on",
    "as the client sees it": "from the last token to the first",
    "otherwise": "from one token to the next",
}


def phases(spans: Sequence[Span], tokens: Sequence[float]) -> dict[str, float]:
    """Return the phases of one install in milliseconds. `tokens`: times of tokens, in seconds since 1970."""
    by_name: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    (pause,), (workers,), (reset,), (resume,) = (by_name[name] for name in ("pause", "workers", "reset", "resume"))
    slowest = max(by_name["apply"], key=lambda span: span.end)
    inner = {span.name: span for span in spans if span.attributes.get("rank") == slowest.attributes["rank"]}
    before = max(at for at in tokens if at <= resume.start / 1e9)
    after = min(at for at in tokens if at > resume.start / 1e9)
    found = {
        "pause": pause.end - pause.start,
        "to workers": slowest.start - pause.end,
        "from workers": workers.end - slowest.end,
        "reset": reset.end - reset.start,
        "daemon": resume.start - reset.end,
        "resume": resume.end - resume.start,
        "first": after * 1e9 - resume.end,
        "pause in all": resume.end - pause.start,
        "as the client sees it": after * 1e9 - before * 1e9,
        "otherwise": median(b - a for a, b in pairwise(tokens)) * 1e9,
    }
    found |= {name: inner[name].end - inner[name].start for name in ("turn", "transfer", "verify") if name in inner}
    found["apply"] = slowest.end - slowest.start - sum(found.get(name, 0) for name in ("turn", "transfer", "verify"))
    return {name: each / 1e6 for name, each in found.items()}


def measure(system: System, collector: Collector, client: Client, direct: bool) -> dict[str, float]:
    known = {span.id for span in collector.spans}
    version = system.publish(direct=direct)
    wait_serving(system.daemon, version, 300)

    def about(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.id not in known and span.attributes.get("version") == version]

    collector.wait_for(lambda spans: "resume" in {span.name for span in about(spans)}, f"the trace of version {version}")
    ended = time.time()
    wait_until(lambda: client.times()[-1] > ended, "the client's next token")
    if system.sent(version) != direct:
        raise AssertionError(f"version {version} came over the other path: {system.events('direct_failed')}")
    return phases(about(collector.spans), client.times())


def run(rounds: int, each: int, gpu: bool) -> None:
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    with Collector() as collector:
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with System((GPU_JOBS if gpu else CPU_JOBS)[0], each, each, cpu=not gpu, eager=not gpu, direct_seconds=20) as system:
            client = Client(system.servers[0])
            for round_ in range(rounds + 1):
                for direct, runs in found.items():
                    seen = measure(system, collector, client, direct)
                    system.say(", ".join(f"{name} {ms:.1f}" for name, ms in seen.items()))
                    if round_:  # the first one of each path connects and compiles
                        runs.append(seen)
            client.end()
    table = Table("phase", "direct, ms", "staged, ms", "what")
    for name, what in PHASES.items():
        cells = [_middle(runs, name) for runs in found.values()]
        table.add_row(name, *cells, what)
    Console(width=150).print(table)


def _middle(runs: list[dict[str, float]], name: str) -> str:
    there = [each[name] for each in runs if name in each]
    low, middle, _ = quantiles(there) if len(there) > 1 else (0.0, 0.0, 0.0)
    return f"{middle:.1f} ({low:.1f})" if there else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--each", type=int, default=1, help="ranks of the trainer, and workers of the server")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    run(arguments.rounds, arguments.each, arguments.gpu)


if __name__ == "__main__":
    main()
