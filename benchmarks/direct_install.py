"""Installs over the direct and the staged path with everything in its place: two Megatron ranks on two GPUs, a daemon, one vLLM
server of two workers on two others. `python -m benchmarks.direct_install [--rounds N] [--json FILE] [--only NAME] [--peer]`;
`--each 1`: one rank to one worker, on two GPUs; `--servers 2 --each 1`: one rank to two servers of one worker, on three;
`--cpu-tiny` runs it all on a CPU, to try it.

For each version: the pause as the daemon has it from the server, as a client sees it (the longest wait between two tokens of an
answer that goes on through the install), and what the workers said of it. At the end the weights of the first version come once
more over the direct path, and every tensor that workers read is compared with what it was after the boot.
"""

import argparse
import time
from pathlib import Path
from statistics import median

from benchmarks import vllm_nccl
from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, Client, Job, System
from benchmarks.rows import Row, show, write
from tests.support.operating import servers, wait_serving


def run(job: Job, rounds: int, staged: int, cpu: bool, each: int, count: int, peer: float | None) -> list[Row]:
    with System(job, each, each, count, cpu, direct_seconds=20) as system:
        held = system.fingerprints()
        clients = [Client(server) for server in system.servers]
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for direct, times in ((True, 1 + rounds), (False, 1 + staged if staged else 0)):
            for _ in range(times):
                time.sleep(0.5)
                for client in clients:
                    client.longest()
                version = system.publish(direct=direct)
                wait_serving(system.daemon, version, 300)
                time.sleep(0.3)
                there = servers(system.daemon)
                pauses, seen = [one.install.pause_seconds for one in there], [client.longest() for client in clients]
                found[direct].append((max(pauses), max(seen)))
                applied = max(worker.apply_seconds for one in there for worker in one.workers)
                system.say(
                    f"version {version}, {'direct' if direct else 'staged'}: pause {_ms(pauses)} ms, "
                    f"client {_ms(seen)} ms, applied in {applied * 1000:.0f} ms"
                )
        version = system.publish(seed=1)
        wait_serving(system.daemon, version, 300)
        for client in clients:
            client.end()
        equal = system.fingerprints() == held
        sent = [line["seconds"] for line in system.events("direct_transfer")]
        failed = [line["reason"] for line in system.events("direct_failed")]
        planned = [line["seconds"] for line in system.events("direct_planned")]
        system.say(
            f"direct transfers, from turn to the last member's word: {', '.join(f'{s * 1000:.1f}' for s in sent)} ms; "
            f"planned in {planned} s; failed: {failed}; {sum(map(len, held))} tensors as after the boot: {equal}"
        )
        for server in system.servers:
            lines = [line.split("] ", 1)[-1] for line in server.log_text().splitlines() if "received" in line]
            system.say("; ".join(lines[-2 * each :]))
        if not equal or len(sent) != count * (rounds + 2):
            raise AssertionError(f"{job.name}: the direct path did not do all of it")
        rows = []
        for direct, rounds_ in found.items():
            if not rounds_:
                continue
            what = f"{'direct' if direct else 'staged'} {job.name}, {each} to {f'{count} servers of ' if count > 1 else ''}{each}"
            rows.append(Row(f"pause, {what}", median(pause for pause, _ in rounds_[1:]), peer, None))
            rows.append(Row(f"pause as a client sees it, {what}", median(waited for _, waited in rounds_[1:]), peer, None))
        return rows


def _ms(seconds: list[float]) -> str:
    return ", ".join(f"{each * 1000:.0f}" for each in seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staged", type=int, default=3, help="rounds of the staged path")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--each", type=int, default=2, help="ranks of the trainer, and workers of each server")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--peer", action="store_true", help="measure vLLM's own transfer to as many workers in the same run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for job in CPU_JOBS if arguments.cpu_tiny else GPU_JOBS:
        if arguments.only in (None, job.name):
            peer = vllm_nccl.measure(job.name, arguments.each) if arguments.peer else None
            rows += run(job, arguments.rounds, arguments.staged, arguments.cpu_tiny, arguments.each, arguments.servers, peer)
            if arguments.json:
                write(rows, arguments.json)
    show(rows)


if __name__ == "__main__":
    main()
