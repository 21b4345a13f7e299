"""The direct path's peers: vLLM's own weight transfer (0.26 and later), from one trainer GPU to a server of one or two.

`nccl` is its packed NCCL transfer, from a GPU of its own; `ipc` its CUDA IPC transfer, within one GPU. The seconds of each update
include its start, the transfer and `load_weights`, and its finish. vLLM does not verify the received data.
`python -m benchmarks.vllm_transfer BACKEND NAME WORKERS` prints them.
"""

import base64
import contextlib
import faulthandler
import json
import math
import os
import pickle
import subprocess
import sys
import tempfile
import time
import types
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

import psutil
import torch
from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks import shapes
from tests.support.ports import free_port
from tests.support.vllm_server import CPU_ENVIRONMENT

MODELS = {"Qwen3-8B": shapes.QWEN3_8B, "Qwen3-30B-A3B": shapes.QWEN3_30B_A3B}
ROUNDS, WARM_UP = 5, 1
Backend = Literal["nccl", "ipc"]


def devices() -> list[str]:
    """Return the GPUs that may be used."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def measure(name: str, workers: int = 2, backend: Backend = "nccl", seconds: float = 300.0) -> float | None:
    """Return the median seconds of the rounds after the first; print the reason and return None if it cannot be measured here."""
    needed = workers + 1 if backend == "nccl" else 1
    if len(devices()) < needed:
        print(f"{name}: vLLM's own transfer to {workers} needs {needed} GPUs, {len(devices())} are here", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "seconds.json", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.vllm_transfer", backend, name, str(workers), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Without Resharder's plugin, and without a network.
                env=os.environ
                | CPU_ENVIRONMENT
                | {"VLLM_PLUGINS": "none", "CUDA_VISIBLE_DEVICES": ",".join(devices()), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
            )
            deadline = time.monotonic() + seconds
            while not answer.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        end(process)
        if not answer.exists():
            print(f"{name}: no figure of vLLM's own transfer: {log.read_text(errors='replace')[-4000:]}", flush=True)
            return None
        took: list[float] = json.loads(answer.read_text())
    print(f"{name}: vLLM's {backend} transfer to {workers} took {', '.join(f'{t * 1000:.0f}' for t in took)} ms", flush=True)
    return median(took[WARM_UP:])


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its children, and wait until their memory is free."""
    all_ = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else [process]
    for each in all_:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(all_[1:], timeout=30)


def trainer(backend: Backend, name: str, workers: int, port: int) -> None:
    """Hold all tensors, whole, on one GPU, and send them for each line of standard input."""
    weights = [
        (tensor, torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02))
        for tensor, shape in expected_shapes(MODELS[name]).items()
    ]
    print("READY", flush=True)
    if backend == "ipc":
        sys.modules.setdefault("ray", types.ModuleType("ray"))  # imported for a way to send that is not used here
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        for _ in sys.stdin:
            IPCWeightTransferEngine.trainer_send_weights(iter(weights), {"send_mode": _write_update})
        return
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    group = NCCLWeightTransferEngine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": workers + 1})
    for _ in sys.stdin:
        NCCLWeightTransferEngine.trainer_send_weights(iter(weights), {"group": group, "packed": True})
        torch.cuda.synchronize()


def _write_update(update: Any) -> None:
    """Write handles of the tensors to standard output."""
    print(base64.b64encode(pickle.dumps(asdict(update))).decode(), flush=True)


def server(backend: Backend, name: str, workers: int, answer: Path) -> None:
    faulthandler.dump_traceback_later(150, repeat=True)
    began, port, own = time.monotonic(), free_port(), devices()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what}", flush=True)

    command = [sys.executable, "-m", "benchmarks.vllm_transfer", backend, name, str(workers), "trainer", str(port)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": own[0]}
    sender = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert sender.stdin is not None
    assert sender.stdout is not None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own[1 : 1 + workers] if backend == "nccl" else own[:1])
    sys.modules.setdefault("ray", types.ModuleType("ray"))
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        engine: Any = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=workers,
            gpu_memory_utilization=0.85 if backend == "nccl" else 0.5,
            max_model_len=2048,
            weight_transfer_config=WeightTransferConfig(backend=backend),
        )
    say("the server has started")
    while "READY" not in (line := sender.stdout.readline()):
        if not line:
            raise RuntimeError("the sender ended")
    say("the sender is ready")
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": workers + 1}
    where = where if backend == "nccl" else {}
    engine.init_weight_transfer_engine({"init_info": where})
    say("they have met")
    known = expected_shapes(MODELS[name])
    update = {
        "names": list(known),
        "dtype_names": ["bfloat16"] * len(known),
        "shapes": [list(shape) for shape in known.values()],
        "packed": True,
    }
    took = []
    for _ in range(WARM_UP + ROUNDS):
        began_round = time.perf_counter()
        engine.start_weight_update()
        sender.stdin.write("go\n")
        if backend == "ipc":
            update = pickle.loads(base64.b64decode(sender.stdout.readline()))
        engine.update_weights({"update_info": update})
        engine.finish_weight_update()
        took.append(time.perf_counter() - began_round)
        say(f"{sum(2 * math.prod(shape) for shape in known.values()) / 1e9:.2f} GB in {took[-1]:.3f} s")
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(took))
    part.rename(answer)  # the reader of this file ends this process and its children


if __name__ == "__main__":
    backend, name, workers, *rest = sys.argv[1:]
    if not rest:
        measure(name, int(workers), "ipc" if backend == "ipc" else "nccl")
    elif rest[0] == "trainer":
        trainer("ipc" if backend == "ipc" else "nccl", name, int(workers), int(rest[1]))
    else:
        server("ipc" if backend == "ipc" else "nccl", name, int(workers), Path(rest[0]))
