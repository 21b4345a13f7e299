"""The staged path on one host with a GPU: one Megatron rank, a daemon, one vLLM server of one worker.
`python -m benchmarks.staged_gpu [--only NAME] [--rounds N] [--json FILE]`; on one GPU, `CUDA_VISIBLE_DEVICES=0,0` has trainer and
server share it. `--cpu-tiny` runs it on a CPU, to try it.

For each version: what `publish` took, and the pause as a client sees it (the longest wait between two tokens of an answer that
goes on through the install). Beside it, in the same run, vLLM's own `reload_weights` of the same files in shared memory; the
limit is a copy of the worker's bytes from pinned memory. At the end the first version comes once more, and every tensor that the
worker reads is compared with what it was after the boot.
"""

import argparse
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, KV_CACHE, Client, Job, System
from benchmarks.rows import Row, show, write
from tests.support.operating import servers, wait_serving
from tests.support.vllm_server import VllmServer

SHARED = ("--gpu-memory-utilization", "0.6")  # with a trainer on the same GPU
PEER = Path("/dev/shm/resharder-staged-gpu-peer")


def link_seconds(size: int) -> float:
    """For so many bytes, from pinned memory to the GPU."""
    here, there = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        began = time.perf_counter()
        there.copy_(here, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    del here, there
    torch.cuda.empty_cache()
    return median(times[1:]) * size / (1 << 30)


@contextmanager
def only(gpu: str) -> Iterator[None]:
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def reload_seconds(folder: Path, rounds: int, device: str) -> float:
    """vLLM's own, of the checkpoint in `folder`."""
    with VllmServer(
        folder,
        ["--kv-cache-memory-bytes", str(KV_CACHE)],
        {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": device},
        dtype="bfloat16",
    ) as server:
        times = []
        for _ in range(1 + rounds):
            began = time.perf_counter()
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            answer = server.request("POST", "/collective_rpc", body)
            times.append(time.perf_counter() - began)
            if answer.status != 200:
                raise RuntimeError(f"expected 200 for reload_weights, got {answer.status}: {answer.body[:300]!r}")
        print(f"reload_weights: {', '.join(f'{t:.2f}' for t in times)} s", flush=True)
        return median(times[1:])


def run(job: Job, rounds: int, cpu: bool) -> list[Row]:
    times: list[tuple[float, float, float, float]] = []
    with System(job, ranks=1, workers=1, cpu=cpu, more=() if cpu else SHARED, direct=False) as system:
        held, client = system.fingerprints(), Client(system.servers[0])
        for left in range(rounds, -1, -1):
            time.sleep(0.5)
            client.longest()
            version = system.publish(None if left else 1, direct=False)
            handed = time.monotonic()
            wait_serving(system.daemon, version, 300)
            served = time.monotonic() - handed
            time.sleep(0.3)
            there = servers(system.daemon)[0]
            worker = there.workers[0]
            times.append((system.published_seconds, client.longest(), worker.apply_seconds, worker.stage_seconds))
            system.say(
                f"served {served:.2f} s later; staged in {worker.stage_seconds:.2f} s, pause "
                f"{there.install.pause_seconds * 1000:.0f} ms, client {times[-1][1] * 1000:.0f} ms, applied in "
                f"{worker.apply_seconds * 1000:.0f} ms"
            )
        client.end()
        equal = system.fingerprints() == held
        system.say(f"{sum(map(len, held))} tensors as after the boot: {equal}; {worker.needed_bytes} bytes")
        if not equal:
            raise AssertionError(f"{job.name}: other weights than after the boot")
        shutil.rmtree(PEER, ignore_errors=True)
        kept = max(system.daemon.store.glob("**/*.safetensors"), key=lambda path: path.stat().st_mtime).parent
        shutil.copytree(kept, PEER)
        for file in system.folder.iterdir():
            if file.is_file() and not (PEER / file.name).exists():
                shutil.copy(file, PEER)
    try:
        peer = reload_seconds(PEER, rounds, system.gpus[0][0])
    finally:
        shutil.rmtree(PEER, ignore_errors=True)
    with only(system.gpus[0][0]):
        limit = None if cpu else link_seconds(worker.needed_bytes)
    published, pauses, applied, staged = (median(column) for column in zip(*times[1:], strict=True))
    return [
        Row(f"staged {job.name}: publish", published, None, limit),
        Row(f"staged {job.name}: stage, while the server serves", staged, None, None),
        Row(f"staged {job.name}: the worker's install", applied, peer, limit),
        Row(f"staged {job.name}: pause as a client sees it", pauses, peer, limit),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cpu-tiny", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for job in CPU_JOBS if arguments.cpu_tiny else GPU_JOBS:
        if arguments.only in (None, job.name):
            rows += run(job, arguments.rounds, arguments.cpu_tiny)
            if arguments.json:
                write(rows, arguments.json)
    show(rows)


if __name__ == "__main__":
    main()
