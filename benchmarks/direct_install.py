"""Installs over the direct and the staged path in a complete system: two Megatron ranks on two GPUs, a daemon, one vLLM server of
two workers on two others. `python -m benchmarks.direct_install [--rounds N] [--json FILE] [--only NAME] [--reload]`;
`--each 1`: one rank to one worker, on two GPUs; `--servers 2 --each 1`: one rank to two servers of one worker, on three;
with `--replicas 2`: a rank to each server, concurrently, on four; `--servers 2 --workers 1`: two ranks to two servers of one
worker, on four.
`--gpus` lists the GPUs, repeated where processes share one: `0,1,1` for two servers, `0,1,1,0` for two ranks that send to two
workers across two GPUs (NCCL joins no two processes on one GPU: in the dense shape these exchange nothing). `--cpu-tiny` runs
on a CPU, as a trial. Servers run with CUDA graphs, unless `--eager` is given. With `--quantization fp8`, ranks cast to FP8
blocks; if FILE has the rows of BF16 from a preceding run, the fractions of BF16's times are rows too.

For each version, it measures the pause as the server reports it, the pause as a client observes it (the longest wait between two
tokens of an answer that continues through the install), the workers' phases, and the time from the trainer's call of `publish`
until the version is served. Versions arrive over the direct path, over the direct path ahead of READY, and over the staged path.
After the rounds of each path, the weights of the first version are installed again, and every tensor that workers read is
compared with its value after the boot.

Rows are added to FILE. The peer of the staged path is vLLM's `reload_weights` of the same files (`--reload`), and its limit is a
copy of a worker's bytes from pinned memory. `benchmarks.compare` has the other peers.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import vllm_reload
from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, Client, Job, System
from benchmarks.rows import Row, add, read, show
from benchmarks.stores import fast_store
from tests.support.observing import servers

NAMES = {"staged": "staged", "direct": "direct", "ahead": "direct, ahead of READY,"}
APART = {"staged": 4.0, "direct": 0.5, "ahead": 0.5}
"""Seconds before an install. Between two staged ones, as in an RL run, workers register the next version's files."""


class Seen(NamedTuple):
    """Durations of one install in seconds, each of the slowest server or worker."""

    publish: float
    ready: float  # from the beginning of `publish`
    served: float  # the same
    stage: float
    apply: float
    pause: float
    client: float


def install(system: System, clients: list[Client], path: str, seed: int | None = None) -> Seen:
    time.sleep(APART[path])
    for client in clients:
        client.longest()
    version = system.publish(seed, path != "staged")
    happened = system.happened(version)
    time.sleep(0.3)
    there = servers(system.daemon)
    workers = [worker for one in there for worker in one.workers]
    pauses, longest = [one.install.pause_seconds for one in there], [client.longest() for client in clients]
    waits = [seconds for seconds, _ in longest]
    stage, apply = max(worker.stage_seconds for worker in workers), max(worker.apply_seconds for worker in workers)
    system.say(
        f"version {version}, {path}: {', '.join(f'{what} {at:.2f}' for what, at in happened.items())} s; "
        f"staged in {stage:.2f} s, pause {_ms(pauses)} ms, client {_ms(waits)} ms until "
        f"{', '.join(f'{at - system.began:.2f}' for _, at in longest)} s, applied in {apply * 1000:.0f} ms"
    )
    return Seen(system.published_seconds, happened["READY"], happened["served"], stage, apply, max(pauses), max(waits))


def run(job: Job, arguments: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield the rows, and again after the staged path's peer was measured, which takes long."""
    each, count, cpu = arguments.each, arguments.servers, arguments.cpu_tiny
    workers = arguments.workers or each
    asked = {"direct": arguments.rounds, "ahead": arguments.ahead, "staged": arguments.staged}
    found: dict[str, list[Seen]] = {}
    with fast_store() as (folder, kind):
        own = {
            "gpus": arguments.gpus,
            "replicas": arguments.replicas,
            "store": folder / "store",
            "direct_seconds": arguments.seconds,
        }
        with System(job, each, workers, count, cpu, eager=arguments.eager, **own) as system:
            system.say(f"the store is in {kind}")
            held = system.fingerprints()
            needed = max(worker.needed_bytes for one in servers(system.daemon) for worker in one.workers)
            limit = None if cpu else vllm_reload.limit_seconds(needed)
            clients = [Client(server) for server in system.servers]
            for path, rounds in asked.items():
                if rounds:
                    system.serve_ahead(path == "ahead")
                    found[path] = [install(system, clients, path) for _ in range(1 + rounds)]
                    install(system, clients, path, seed=1)
                    check(system, path, held, count * (2 + rounds))
                    yield rows_of(job, arguments, found, None, limit)
            for client in clients:
                client.end()
            kept = vllm_reload.keep_newest(system) if arguments.reload else None
        if kept is not None:
            peer = vllm_reload.measure(kept, system.gpus[0], max(1, arguments.staged))
            yield rows_of(job, arguments, found, peer, limit)


def check(system: System, path: str, held: list[dict[str, int]], transfers: int) -> None:
    """Raise AssertionError unless tensors equal `held` and `transfers` further transfers used the direct path."""
    equal, sent = system.fingerprints() == held, [line["seconds"] for line in system.events("direct_transfer")]
    failed, planned = system.events("direct_failed"), [line["seconds"] for line in system.events("direct_planned")]
    system.checked, before = len(sent), system.checked
    system.say(
        f"{path}: {sum(map(len, held))} tensors as after the boot: {equal}; transfers, from turn to the last member's word: "
        f"{_ms(sent[before:])} ms; planned in {planned} s; failed: {[line['reason'] for line in failed]}"
    )
    for server in system.servers:
        lines = [line.split("] ", 1)[-1] for line in server.log_text().splitlines() if "received" in line]
        system.say("; ".join(lines[-4:]))
    if not equal or len(sent) - before != (transfers if path != "staged" else 0):
        raise AssertionError(f"{system.job.name}: the {path} path did not do all of it")


def rows_of(
    job: Job,
    arguments: argparse.Namespace,
    found: dict[str, list[Seen]],
    reload: float | None,
    limit: float | None,
) -> list[Row]:
    """Return rows of medians, without the first install, which connects and compiles."""
    each, replicas, count = arguments.each, arguments.replicas, arguments.servers
    whom = "" if (each, replicas, count) == (2, 1, 1) else f", {each * replicas} to {count}"
    whom += f" of {arguments.workers}" if arguments.workers else ""
    rows = []
    for path, seen in found.items():
        if seen:
            middle, what = Seen(*map(median, zip(*seen[1:], strict=True))), f"{NAMES[path]} {job.name}{whom}"
            peer = reload if path == "staged" else None
            rows.append(Row(f"{what}, from publish to READY", middle.ready, None, None))
            rows.append(Row(f"{what}, from publish to served", middle.served, peer, None))
            rows.append(Row(f"{what}, pause", middle.pause, peer, None))
            rows.append(Row(f"{what}, pause as a client sees it", middle.client, peer, None))
            if path == "staged":
                rows.insert(0, Row(what, middle.apply, peer, limit))
                rows.append(Row(f"{what}, publish", middle.publish, None, limit))
                rows.append(Row(f"{what}, to stage while the server serves", middle.stage, None, None))
    return rows


def fractions(rows: Sequence[Row], before: Mapping[str, Row]) -> list[Row]:
    """Return a row for each workload in FP8 of which `before` has the same in BF16: the fraction of BF16's time that it takes."""
    pairs = [(row, before.get(row.work.replace(" FP8", ""))) for row in rows if " FP8" in row.work]
    return [Row(f"{fp8.work}, of BF16's", fp8.ours / bf16.ours, None, None, "") for fp8, bf16 in pairs if bf16 is not None]


def _ms(seconds: list[float]) -> str:
    return ", ".join(f"{each * 1000:.1f}" for each in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staged", type=int, default=5, help="rounds of the staged path")
    parser.add_argument("--ahead", type=int, default=5, help="rounds of the direct path ahead of READY")
    parser.add_argument("--seconds", type=float, default=20, help="the daemon's bound on a direct transfer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--each", type=int, default=2, help="ranks of the trainer, and workers of each server")
    parser.add_argument("--workers", type=int, help="of each server, if not as many as ranks")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="of the trainer's model, each of as many ranks")
    parser.add_argument("--gpus", default="", help="the ranks', then the servers', as 0,1,1,0")
    parser.add_argument("--reload", action="store_true", help="measure vLLM's own reload_weights in the same run")
    parser.add_argument("--quantization", choices=["fp8"], help="format to which ranks cast")
    arguments = parser.parse_args()
    jobs = [job for job in (CPU_JOBS if arguments.cpu_tiny else GPU_JOBS) if arguments.only in (None, job.name)]
    for job in jobs:
        before = read(arguments.json) if arguments.json else {}
        for rows in run(job.in_fp8() if arguments.quantization else job, arguments):
            rows += fractions(rows, before)
            if arguments.json:
                add(rows, arguments.json)
            show(rows)


if __name__ == "__main__":
    main()
