"""The staged path's peer: vLLM's own `reload_weights` of a checkpoint in shared memory, to a server of one or two GPUs."""

import shutil
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.direct_system import KV_CACHE, System
from tests.support.vllm_server import VllmServer


def keep_newest(system: System) -> Path:
    """Link the newest version's files and the model's other files into a folder that outlives the daemon, and return it."""
    (newest,) = system.daemon.store.glob(f"models/*/versions/{system.newest:08}")
    folder = system.daemon.store.with_name("reload")
    shutil.copytree(newest, folder, copy_function=_link)
    for file in system.folder.iterdir():
        if file.is_file() and not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


def _link(source: str, target: str) -> None:
    """Link rather than copy: two copies of a large model may not fit."""
    Path(target).hardlink_to(source)


def measure(folder: Path, devices: list[str], rounds: int) -> float:
    """Return the median seconds of the rounds after the first, and remove the folder.

    Raises RuntimeError if the server refuses.
    """
    try:
        return _measured(folder, devices, rounds)
    finally:
        shutil.rmtree(folder)


def _measured(folder: Path, devices: list[str], rounds: int) -> float:
    with VllmServer(
        folder,
        ["--kv-cache-memory-bytes", str(KV_CACHE), "--tensor-parallel-size", str(len(devices))],
        {"VLLM_SERVER_DEV_MODE": "1", "VLLM_PLUGINS": "none", "CUDA_VISIBLE_DEVICES": ",".join(devices)},
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


def limit_seconds(size: int) -> float:
    """Return the seconds of a copy of `size` bytes from pinned memory to the GPU."""
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
