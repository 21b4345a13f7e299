"""Installs over the direct and the staged path with everything in its place: two Megatron ranks on two GPUs, a daemon, one vLLM
server of two workers on two others. `python -m benchmarks.direct_install [--rounds N] [--json FILE] [--only NAME] [--reload]`;
`--each 1`: one rank to one worker, on two GPUs; `--servers 2 --each 1`: one rank to two servers of one worker, on three;
`--cpu-tiny` runs it all on a CPU, to try it. Servers run with CUDA graphs, or as `--eager` says.

For each version: the pause as the daemon has it from the server, as a client sees it (the longest wait between two tokens of an
answer that goes on through the install), and what the workers said of it. At the end the weights of the first version come once
more, over the direct path but with `--rounds 0`, and every tensor that workers read is compared with what it was after the boot.
The peer of the direct path is vLLM's own transfer, where FILE has it from a run of `benchmarks.direct_path` just before, and rows
are added to those; that of the staged path is vLLM's `reload_weights` of the same files (`--reload`), its limit a copy of a
worker's bytes from pinned memory.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import vllm_reload
from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, Client, Job, System
from benchmarks.rows import Row, add, read, show
from tests.support.operating import servers, wait_serving


class Seen(NamedTuple):
    """Of one install: the slowest server's, or worker's, in seconds."""

    publish: float
    stage: float
    apply: float
    pause: float
    client: float


def install(system: System, clients: list[Client], direct: bool, seed: int | None = None) -> Seen:
    time.sleep(0.5)
    for client in clients:
        client.longest()
    version = system.publish(seed, direct)
    published = time.monotonic()
    wait_serving(system.daemon, version, 300)
    served = time.monotonic() - published
    time.sleep(0.3)
    there = servers(system.daemon)
    workers = [worker for one in there for worker in one.workers]
    pauses, waits = [one.install.pause_seconds for one in there], [client.longest() for client in clients]
    stage, apply = max(worker.stage_seconds for worker in workers), max(worker.apply_seconds for worker in workers)
    system.say(
        f"version {version}, {'direct' if direct else 'staged'}: served {served:.2f} s after publish, staged in {stage:.2f} s, "
        f"pause {_ms(pauses)} ms, client {_ms(waits)} ms, applied in {apply * 1000:.0f} ms"
    )
    return Seen(system.published_seconds, stage, apply, max(pauses), max(waits))


def run(job: Job, arguments: argparse.Namespace) -> list[Row]:
    each, count, rounds, cpu = arguments.each, arguments.servers, arguments.rounds, arguments.cpu_tiny
    found: dict[str, list[Seen]] = {}
    with System(job, each, each, count, cpu, eager=arguments.eager, direct_seconds=20) as system:
        held = system.fingerprints()
        clients = [Client(server) for server in system.servers]
        for path, times in (("staged", arguments.staged), ("direct", rounds)):
            found[path] = [install(system, clients, path == "direct") for _ in range(times and 1 + times)]
        install(system, clients, rounds > 0, seed=1)
        for client in clients:
            client.end()
        equal = system.fingerprints() == held
        needed = max(worker.needed_bytes for one in servers(system.daemon) for worker in one.workers)
        sent = [line["seconds"] for line in system.events("direct_transfer")]
        failed = [line["reason"] for line in system.events("direct_failed")]
        planned = [line["seconds"] for line in system.events("direct_planned")]
        system.say(
            f"direct transfers, from turn to the last member's word: {_ms(sent)} ms; planned in {planned} s; failed: {failed}; "
            f"{sum(map(len, held))} tensors as after the boot: {equal}; {needed / 1e9:.2f} GB a worker"
        )
        for server in system.servers:
            lines = [line.split("] ", 1)[-1] for line in server.log_text().splitlines() if "received" in line]
            system.say("; ".join(lines[-2 * each :]))
        if not equal or len(sent) != count * (rounds and 2 + rounds):
            raise AssertionError(f"{job.name}: the direct path did not do all of it")
        kept = vllm_reload.keep_newest(system) if arguments.reload else None
    reload = vllm_reload.measure(kept, system.gpus[0], max(1, arguments.staged)) if kept else None
    return rows_of(job, arguments, found, reload, None if cpu else vllm_reload.limit_seconds(needed))


def rows_of(
    job: Job, arguments: argparse.Namespace, found: dict[str, list[Seen]], reload: float | None, limit: float | None
) -> list[Row]:
    """Of medians without the first, which connects and compiles."""
    whom = "" if (arguments.each, arguments.servers) == (2, 1) else f", {arguments.each} to {arguments.servers}"
    sent = read(arguments.json).get(f"direct {job.name}") if arguments.json else None
    rows = []
    for path, seen in found.items():
        if seen:
            middle, what = Seen(*map(median, zip(*seen[1:], strict=True))), f"{path} {job.name}{whom}"
            peer = reload if path == "staged" else sent.peer if sent else None
            rows.append(Row(f"{what}, pause", middle.pause, peer, None))
            rows.append(Row(f"{what}, pause as a client sees it", middle.client, peer, None))
            if path == "staged":
                rows.insert(0, Row(what, middle.apply, peer, limit))
                rows.append(Row(f"{what}, publish", middle.publish, None, limit))
                rows.append(Row(f"{what}, to stage while the server serves", middle.stage, None, None))
    return rows


def _ms(seconds: list[float]) -> str:
    return ", ".join(f"{each * 1000:.1f}" for each in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staged", type=int, default=5, help="rounds of the staged path")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--each", type=int, default=2, help="ranks of the trainer, and workers of each server")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--reload", action="store_true", help="measure vLLM's own reload_weights in the same run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for job in CPU_JOBS if arguments.cpu_tiny else GPU_JOBS:
        if arguments.only in (None, job.name):
            rows += run(job, arguments)
            if arguments.json:
                add(rows, arguments.json)
    show(rows)


if __name__ == "__main__":
    main()
