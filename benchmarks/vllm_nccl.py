"""The direct path's peer: vLLM's own packed NCCL transfer (0.26 and later), one trainer GPU to a server of one or two.

`python -m benchmarks.vllm_nccl NAME WORKERS` prints the seconds of each update: start, the transfer and `load_weights`, finish.
vLLM makes no proof of what arrived.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from resharder.converters.checkpoint import expected_shapes

from benchmarks import shapes

MODELS = {"Qwen3-8B": shapes.QWEN3_8B, "Qwen3-30B-A3B": shapes.QWEN3_30B_A3B}
ROUNDS, WARM_UP = 5, 1
PORT = 29700


def measure(name: str, workers: int = 2, seconds: float = 200.0) -> float | None:
    """The median of the rounds after the first; None, with the end of its output, where it does not work here."""
    command = [sys.executable, "-m", "benchmarks.vllm_nccl", name, str(workers)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"VLLM_PLUGINS": "none"},  # as it is without Resharder beside it
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    lines = [line for line in said.splitlines() if line.startswith("SECONDS ")]
    if not lines:
        print(f"no figure of vLLM's transfer: {said[-1500:]}", flush=True)
        return None
    took: list[float] = json.loads(lines[0].removeprefix("SECONDS "))
    print(f"{name}: vLLM's packed NCCL transfer took {', '.join(f'{t * 1000:.0f}' for t in took)} ms", flush=True)
    return median(took[WARM_UP:])


def trainer(name: str, workers: int) -> None:
    """Holds every tensor whole on one GPU; sends them all for each line of its input."""
    import torch
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine

    weights = [
        (tensor, torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02))
        for tensor, shape in expected_shapes(MODELS[name]).items()
    ]
    print("READY", flush=True)
    group = Engine.trainer_init({"master_address": "127.0.0.1", "master_port": PORT, "world_size": workers + 1})
    for _ in sys.stdin:
        Engine.trainer_send_weights(iter(weights), {"group": group, "packed": True})
        torch.cuda.synchronize()


def server(name: str, workers: int) -> None:
    command = [sys.executable, "-m", "benchmarks.vllm_nccl", name, str(workers), "trainer"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    sender = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert sender.stdin is not None
    assert sender.stdout is not None
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(1 + i) for i in range(workers))
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
    while "READY" not in (line := sender.stdout.readline()):
        if not line:
            raise RuntimeError("the sender ended")
    where = {"master_address": "127.0.0.1", "master_port": PORT, "rank_offset": 1, "world_size": workers + 1}
    engine.init_weight_transfer_engine({"init_info": where})
    known = expected_shapes(MODELS[name])
    update = {
        "names": list(known),
        "dtype_names": ["bfloat16"] * len(known),
        "shapes": [list(shape) for shape in known.values()],
        "packed": True,
    }
    took = []
    for _ in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        engine.start_weight_update()
        sender.stdin.write("go\n")
        engine.update_weights({"update_info": update})
        engine.finish_weight_update()
        took.append(time.perf_counter() - began)
    print(f"{sum(2 * math.prod(shape) for shape in known.values()) / 1e9:.2f} GB", flush=True)
    print(f"SECONDS {json.dumps(took)}", flush=True)
    sender.stdin.close()
    sender.wait()


if __name__ == "__main__":
    (trainer if sys.argv[3:] == ["trainer"] else server)(sys.argv[1], int(sys.argv[2]))
