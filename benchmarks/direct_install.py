"""Installs over the direct and the staged path with everything in its place: two Megatron ranks on two GPUs, a daemon, one vLLM
server of two workers on two others. `python -m benchmarks.direct_install [--rounds N] [--json FILE] [--only NAME] [--peer]`;
`--each 1`: one rank to one worker, on two GPUs; `--cpu-tiny` runs it all on a CPU, to try it.

For each version: the pause as the daemon has it from the server, as a client sees it (the longest wait between two tokens of an
answer that goes on through the install), and what the workers said of it. At the end the weights of the first version come once
more over the direct path, and every tensor that workers read is compared with what it was after the boot.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import shapes, vllm_nccl
from benchmarks.direct_layouts import DENSE, EXPERTS
from benchmarks.rows import Row, show, write
from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.operating import servers, wait_serving
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import ServerFailed, VllmServer

ROOT = Path(__file__).parents[1]
PROMPT = [5, 17, 42, 7, 300, 11]
KV_CACHE = 1 << 30  # bytes


class Job(NamedTuple):
    name: str
    config: dict[str, Any]
    kind: str  # of the trainer's parallelism


GPU_JOBS = (Job("Qwen3-8B", shapes.QWEN3_8B, "tp"), Job("Qwen3-30B-A3B", shapes.QWEN3_30B_A3B, "ep"))
CPU_JOBS = (Job("tiny dense", DENSE, "tp"), Job("tiny experts", EXPERTS, "ep"))


class Client:
    """One answer that never ends, and the longest wait for a token since it was last asked for."""

    def __init__(self, server: VllmServer) -> None:
        self._server, self._times, self._ended = server, [time.monotonic()], False
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ended:
            try:
                for token in self._server.stream(PROMPT, 400):
                    self._times.append(token.at)
                    if self._ended:
                        return
            except (ServerFailed, OSError):
                time.sleep(0.05)

    def longest(self) -> float:
        times, self._times = self._times, self._times[-1:]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def end(self) -> None:
        self._ended = True
        self._thread.join(30)


def fingerprints(server: VllmServer) -> list[dict[str, int]]:
    said = server.request("POST", "/collective_rpc", {"method": "resharder_fingerprint"}).json()["results"]
    if not all(one["ok"] for one in said):
        raise AssertionError(said)
    return [one["tensors"] for one in said]


def run(job: Job, rounds: int, staged: int, cpu: bool, each: int, peer: float | None) -> list[Row]:
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{job.name}: {time.monotonic() - began:.0f} s: {what}", flush=True)

    folder = Path(tempfile.mkdtemp())
    save_tokenizer(folder, job.config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(job.config))
    (folder / "trainer").mkdir()
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    with Daemon(keep_count=1, log_format="json", direct_seconds=20) as daemon:
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "VLLM_PLUGINS": "resharder,raw_mode" if cpu else "resharder",
            "PYTHONPATH": f"{ROOT}/tests/support/raw_mode:{os.environ.get('PYTHONPATH', '')}" if cpu else None,
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": ",".join(devices[each : 2 * each]),
        }
        if environment["PYTHONPATH"] is None:
            del environment["PYTHONPATH"]
        arguments = ["--load-format", "resharder", "--tensor-parallel-size", str(each), "--kv-cache-memory-bytes", str(KV_CACHE)]
        server = VllmServer(folder, arguments, environment, dtype="bfloat16", timeout=400)  # type: ignore[arg-type]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[:each])
        settings = {"config": job.config, job.kind: each, "connect": {"direct_wait": 120.0}}
        trainer = TrainerJob(
            daemon.endpoint, "policy", folder / "trainer", settings, ranks=each, module="benchmarks.direct_trainer"
        )
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        try:
            server.start()
            said = trainer.ask(timeout=400, do="publish", step=1, seed=1, direct=False)
            say(f"attached in {said['attach_s']:.1f} s, version 1 handed over in {said['publish_s']:.1f} s")
            server.wait_ready()
            wait_serving(daemon, 1, 300)
            say(f"the server has booted from it in {server.ready_seconds:.0f} s")
            held = fingerprints(server)
            client = Client(server)
            found: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
            step = 1
            for direct, count in ((True, 1 + rounds), (False, 1 + staged if staged else 0)):
                for _ in range(count):
                    step += 1
                    time.sleep(0.5)
                    client.longest()
                    said = trainer.ask(timeout=300, do="publish", step=step, seed=step, direct=direct)
                    wait_serving(daemon, said["version"], 300)
                    time.sleep(0.3)
                    there = servers(daemon)[0]
                    applied = max(worker.apply_seconds for worker in there.workers)
                    found[direct].append((there.install.pause_seconds, client.longest(), applied))
                    pause, seen, applied = found[direct][-1]
                    say(
                        f"version {said['version']}, {'direct' if direct else 'staged'}: published in {said['publish_s']:.2f} s,"
                        f" pause {pause * 1000:.0f} ms, client {seen * 1000:.0f} ms, applied in {applied * 1000:.0f} ms"
                    )
            said = trainer.ask(timeout=300, do="publish", step=step + 1, seed=1, direct=True)
            wait_serving(daemon, said["version"], 300)
            client.end()
            equal = fingerprints(server) == held
            log = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
            sent = [line["seconds"] for line in log if line["event"] == "direct_transfer"]
            failed = [line["reason"] for line in log if line["event"] == "direct_failed"]
            planned = [line["seconds"] for line in log if line["event"] == "direct_planned"]
            say(
                f"direct transfers, from turn to the last member's word: {', '.join(f'{s * 1000:.1f}' for s in sent)} ms; "
                f"planned in {planned} s; failed: {failed}; {sum(map(len, held))} tensors as after the boot: {equal}"
            )
            if not equal or len(sent) != rounds + 2:
                raise AssertionError(f"{job.name}: the direct path did not do all of it")
            taken = [line.split("] ", 1)[-1] for line in server.log_text().splitlines() if "received" in line]
            say("; ".join(taken[-2:]))
            rows = []
            for direct, rounds_ in found.items():
                if not rounds_:
                    continue
                path, (pauses, seen_, _) = "direct" if direct else "staged", zip(*rounds_[1:], strict=True)
                what = f"{path} {job.name}, {each} to {each}"
                rows.append(Row(f"pause, {what}", median(pauses), peer, None))
                rows.append(Row(f"pause as a client sees it, {what}", median(seen_), peer, None))
            return rows
        except BaseException:
            print(server.log_tail(30), (folder / "trainer" / "trainer.log").read_text()[-3000:], flush=True)
            print(daemon.log.read_text()[-3000:], flush=True)
            raise
        finally:
            trainer.kill()
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staged", type=int, default=3, help="rounds of the staged path")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cpu-tiny", action="store_true")
    parser.add_argument("--each", type=int, default=2, help="ranks of the trainer, and workers of the server")
    parser.add_argument("--peer", action="store_true", help="measure vLLM's own transfer to as many workers in the same run")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for job in CPU_JOBS if arguments.cpu_tiny else GPU_JOBS:
        if arguments.only in (None, job.name):
            peer = vllm_nccl.measure(job.name, arguments.each) if arguments.peer else None
            rows += run(job, arguments.rounds, arguments.staged, arguments.cpu_tiny, arguments.each, peer)
            if arguments.json:
                write(rows, arguments.json)
    show(rows)


if __name__ == "__main__":
    main()
