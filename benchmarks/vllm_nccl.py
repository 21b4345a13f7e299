"""The direct path's peer: vLLM's own packed NCCL transfer (0.26 and later), one trainer GPU to a server of one or two.

`python -m benchmarks.vllm_nccl NAME WORKERS FILE` writes the seconds of each update to FILE: start, the
transfer and `load_weights`, finish. vLLM does not verify the received data.
"""

import contextlib
import faulthandler
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks import shapes
from tests.support.ports import free_port
from tests.support.vllm_server import CPU_ENVIRONMENT

MODELS = {"Qwen3-8B": shapes.QWEN3_8B, "Qwen3-30B-A3B": shapes.QWEN3_30B_A3B}
ROUNDS, WARM_UP = 5, 1


def devices() -> list[str]:
    """Return the GPUs that may be used."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def measure(name: str, workers: int = 2, seconds: float = 300.0) -> float | None:
    """Return the median seconds of the rounds after the first; print the reason and return None if it cannot be measured here."""
    if len(devices()) <= workers:
        print(f"{name}: vLLM's own transfer to {workers} needs {workers + 1} GPUs, {len(devices())} are here", flush=True)
        return None
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder) / "seconds.json", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.vllm_nccl", name, str(workers), str(answer)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Without Resharder's plugin, and without a network.
                env=os.environ | CPU_ENVIRONMENT | {"VLLM_PLUGINS": "none", "CUDA_VISIBLE_DEVICES": ",".join(devices())},
            )
            deadline = time.monotonic() + seconds
            while not answer.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
        end(process)
        if not answer.exists():
            print(f"{name}: no figure of vLLM's own transfer: {log.read_text(errors='replace')[-4000:]}", flush=True)
            return None
        took: list[float] = json.loads(answer.read_text())
    print(f"{name}: vLLM's packed NCCL transfer to {workers} took {', '.join(f'{t * 1000:.0f}' for t in took)} ms", flush=True)
    return median(took[WARM_UP:])


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its children, and wait until their memory is free."""
    all_ = [process, *psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else [process]
    for each in all_:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(all_[1:], timeout=30)


def trainer(name: str, workers: int, port: int) -> None:
    """Hold all tensors, whole, on one GPU, and send them for each line of standard input."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine

    weights = [
        (tensor, torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02))
        for tensor, shape in expected_shapes(MODELS[name]).items()
    ]
    print("READY", flush=True)
    group = Engine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": workers + 1})
    for _ in sys.stdin:
        Engine.trainer_send_weights(iter(weights), {"group": group, "packed": True})
        torch.cuda.synchronize()


def server(name: str, workers: int, answer: Path) -> None:
    faulthandler.dump_traceback_later(150, repeat=True)
    began, port, own = time.monotonic(), free_port(), devices()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:.0f} s: {what}", flush=True)

    command = [sys.executable, "-m", "benchmarks.vllm_nccl", name, str(workers), "trainer", str(port)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": own[0]}
    sender = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert sender.stdin is not None
    assert sender.stdout is not None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own[1 : 1 + workers])
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
            gpu_memory_utilization=0.85,
            max_model_len=2048,
            weight_transfer_config=WeightTransferConfig(backend="nccl"),
        )
    say("the server has started")
    while "READY" not in (line := sender.stdout.readline()):
        if not line:
            raise RuntimeError("the sender ended")
    say("the sender is ready")
    where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": workers + 1}
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
        engine.update_weights({"update_info": update})
        engine.finish_weight_update()
        took.append(time.perf_counter() - began_round)
        say(f"{sum(2 * math.prod(shape) for shape in known.values()) / 1e9:.2f} GB in {took[-1]:.3f} s")
    part = answer.with_suffix(".part")
    part.write_text(json.dumps(took))
    part.rename(answer)  # the reader of this file ends this process and its children


if __name__ == "__main__":
    if sys.argv[3] == "trainer":
        trainer(sys.argv[1], int(sys.argv[2]), int(sys.argv[4]))
    else:
        server(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
