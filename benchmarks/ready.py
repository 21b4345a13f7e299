"""From `publish` to READY of one rank, without servers: `python -m benchmarks.ready [--gpus 0] [--model 1] [--versions 6]`.

For each version: how long `publish` held the trainer, the parts of the rank's delivery, and when the rank had sealed it, the
daemon had verified it, and it was READY.
The first versions of a rank register the files of the store's sets, and compile kernels. The limit is a copy of the same bytes
from pinned memory (on a GPU). `--model`: 0 is Qwen3-8B, 1 Qwen3-30B-A3B; without `--gpus`, small models on a CPU.
"""

import argparse
import os
import re
import time
from math import prod

from resharder.converters.architectures.checkpoint import expected_shapes
from rich.console import Console
from rich.table import Table

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, System
from benchmarks.stores import fast_store
from benchmarks.vllm_reload import limit_seconds
from tests.support.collector import Collector

PARTS = re.compile(r"wrote \d+ boxes: ([\d.]+) s to plan, ([\d.]+) s to map, ([\d.]+) s to copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="", help="the rank's")
    parser.add_argument("--model", type=int, default=0, choices=(0, 1))
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument(
        "--step", type=float, default=3, help="seconds between versions: the next files are laid out and registered"
    )
    asked = parser.parse_args()
    cpu = not asked.gpus
    job = (CPU_JOBS if cpu else GPU_JOBS)[asked.model]
    table = Table("version", "held", "plan, map, copy", "sealed", "verified", "READY")
    with Collector() as collector, fast_store() as (folder, kind):
        os.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with System(job, 1, 0, 0, cpu, gpus=asked.gpus, store=folder / "store") as system:
            published = {1: (system.began, system.published_seconds)}
            for _ in range(1, asked.versions):
                time.sleep(asked.step)
                version = system.publish(direct=False)
                published[version] = system.began, system.published_seconds
                system.wait_ready(version)
            time.sleep(1)  # for the last spans
            wrote = PARTS.findall(system.trainer_log()) or [()] * len(published)
        for (version, (began, held)), parts in zip(published.items(), wrote, strict=True):
            ends = {span.name: span.end / 1e9 - began for span in collector.spans if span.attributes.get("version") == version}
            took = ", ".join(parts) or "–"
            moments = (f"{ends[name]:.3f}" for name in ("publish", "verify", "commit"))
            table.add_row(str(version), f"{held:.3f}", took, *moments)
    size = 2 * sum(map(prod, expected_shapes(job.config).values()))
    limit = "" if cpu else f"; limit {limit_seconds(size):.3f} s"
    print(f"{job.name}, {size / 1e9:.1f} GB, the store is in {kind}{limit}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
