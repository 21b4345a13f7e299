"""Install of a new version of a Qwen3-0.6B-shaped model into a running vLLM server on the same host.

The server runs in raw mode (linear layers keep their parameters, as on a GPU), so the box path is measured. It is
compared with a memcpy of the worker's bytes, and with the common practice: write safetensors to disk, then `reload_weights` or a
restart.
"""

import json
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from resharder.client import connect
from safetensors.torch import save_file

from benchmarks.rows import Row
from benchmarks.shapes import QWEN3_0_6B
from benchmarks.stores import fast_store
from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

SHORT = ["--max-model-len", "256"]  # fits the small KV cache
RAW_MODE = Path(__file__).parents[1] / "tests" / "support" / "raw_mode"


def measure(rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    weights = random_weights(QWEN3_0_6B, 1, torch.bfloat16)
    folder = Path(tempfile.mkdtemp(prefix="resharder-benchmark-"))
    try:
        save_tokenizer(folder, 1024)
        (folder / "config.json").write_text(json.dumps(QWEN3_0_6B))
        with fast_store() as (store, _), Daemon(store=store, keep_count=1) as daemon:
            return _measure(daemon, weights, folder, rounds)
    finally:
        shutil.rmtree(folder)


def _measure(daemon: Daemon, weights: dict[str, torch.Tensor], folder: Path, rounds: int) -> list[Row]:
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "VLLM_PLUGINS": "resharder,raw_mode",
        "PYTHONPATH": str(RAW_MODE),
    }
    arrays = [tensor.view(torch.int16).numpy() for tensor in weights.values()]
    copies = [np.ones_like(array) for array in arrays]
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "served", "stage", "apply", "pause")}
    with connect(
        daemon.endpoint, model="policy", job="b", rank=0, world_size=1, config=QWEN3_0_6B, tokenizer=folder
    ) as publisher:
        publisher.publish_tensors(0, list(weights.items())).wait_ready(120)
        with VllmServer(folder, [*SHORT, "--load-format", "resharder"], environment, dtype="bfloat16", timeout=400):
            for step in range(1, rounds + 2):
                next(iter(weights.values()))[0] += 1
                start = time.perf_counter()
                handle = publisher.publish_tensors(step, list(weights.items()))
                handle.wait_serving(120)
                served = time.perf_counter() - start
                found = wait_serving(daemon, handle.version)
                (worker,) = found.workers
                start = time.perf_counter()
                for target, source in zip(copies, arrays, strict=True):
                    np.copyto(target, source)
                memcpy = time.perf_counter() - start
                values = (memcpy, served, worker.stage_seconds, worker.apply_seconds, found.install.pause_seconds)
                if step > 1:  # the first install uses load_weights, and records which tensors are boxes
                    for name, value in zip(times, values, strict=True):
                        times[name].append(value)
    written, restarted, reloaded = _others(weights, folder, rounds)
    ours = {name: median(values) for name, values in times.items()}
    boxed = f"{worker.boxed_bytes / max(1, worker.needed_bytes):.0%} by boxes"
    return [
        Row(f"apply Qwen3-0.6B, digests proven, {boxed} (peer: memcpy)", ours["apply"], ours["memcpy"], ours["memcpy"]),
        Row("pause of the server in one install (peer: reload_weights)", ours["pause"], reloaded, ours["memcpy"]),
        Row("publish to served (peer: write safetensors, reload_weights)", ours["served"], written + reloaded, None),
        Row("publish to served (peer: write safetensors, restart)", ours["served"], written + restarted, None),
    ]


def _others(weights: dict[str, torch.Tensor], folder: Path, rounds: int) -> tuple[float, float, float]:
    """Return the seconds to write the checkpoint, to start vLLM on it, and of vLLM's own reload from it.

    This server uses vLLM's own load format, because vLLM cannot reload the format `resharder` from disk.
    """
    written = median(_write(weights, folder) for _ in range(rounds))
    environment = {"PYTHONPATH": str(RAW_MODE), "VLLM_PLUGINS": "raw_mode", "VLLM_SERVER_DEV_MODE": "1"}
    with VllmServer(folder, SHORT, environment, dtype="bfloat16", timeout=400) as server:
        return written, server.ready_seconds, median(_reload(server, folder) for _ in range(rounds))


def _write(weights: dict[str, torch.Tensor], folder: Path) -> float:
    start = time.perf_counter()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return time.perf_counter() - start


def _reload(server: VllmServer, folder: Path) -> float:
    start = time.perf_counter()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    response = server.request("POST", "/collective_rpc", body)
    if response.status != 200:
        raise RuntimeError(f"expected 200 for reload_weights, got {response.status}: {response.body[:300]!r}")
    return time.perf_counter() - start
