"""NCCL M2N (`nccl-extensions`), which vLLM's `nccl_m2n` backend uses, from one GPU to the next, without vLLM.

Two processes hold a model's tensors, and one reshards all of them to the other, in the fewest calls that M2N could be given: one
for each of vLLM's tensors, the experts of a layer in two. M2N verifies nothing; here the sums of all elements of both are
compared after the first round. M2N_SITE names the folder with `nccl-extensions` and the NCCL that it needs, which the processes
preload.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks.systems.base import Setup, TransferAlone, needs_gpus

Shapes = dict[str, tuple[int, ...]]


def fused(config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a model's tensors, the experts of each layer as two."""
    found: Shapes = dict(expected_shapes(dict(config)))
    if "num_experts" not in config:
        return found
    width, hidden, experts = config["moe_intermediate_size"], config["hidden_size"], config["num_experts"]
    kept = {tensor: shape for tensor, shape in found.items() if ".experts." not in tensor}
    for layer in range(config["num_hidden_layers"]):
        kept |= {f"{layer}.w13": (experts * 2 * width, hidden), f"{layer}.w2": (experts * hidden, width)}
    return kept


class NcclM2n(TransferAlone):
    name = "nccl-m2n-alone"

    def unavailable(self, setup: Setup) -> str:
        return needs_gpus(setup, apart=True) or ("" if os.environ.get("M2N_SITE") else "M2N_SITE names no folder")

    @contextmanager
    def running(self, setup: Setup) -> Iterator[Callable[[], float]]:
        site = Path(os.environ["M2N_SITE"])
        environment = os.environ | {
            "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
            "LD_PRELOAD": str(site / "nvidia/nccl/lib/libnccl.so.2"),
            "NCCL_NVLS_ENABLE": "0",
            "CUDA_VISIBLE_DEVICES": ",".join(setup.gpus),
        }
        command = [sys.executable, "-m", "benchmarks.systems.nccl_m2n", json.dumps(setup.config)]
        with ExitStack() as stack:
            processes: list[subprocess.Popen[str]] = []
            for rank in ("0", "1"):
                uid = [_line(processes[0])] if processes else []
                process = subprocess.Popen(
                    [*command, rank, *uid], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
                processes.append(process)
            sums = {_line(process) for process in processes}
            if len(sums) != 1:
                raise RuntimeError(f"expected the same sums in both processes, got {sums}")

            def once() -> float:
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("round\n")
                    process.stdin.flush()
                return max(float(_line(process)) for process in processes)

            yield once


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"NCCL M2N: a process ended with {process.wait()}")
    return line


def member(config: Mapping[str, Any], rank: int, uid: str) -> None:
    """Run one of the two processes: print the group's id (rank 0), the tensors' sum after one round, then seconds of rounds."""
    import torch
    from nccl.core import Communicator
    from nccl.core.utils import UniqueId, get_unique_id
    from nccl.m2n import DistTensor, Handle, Mesh, Replicate, Shard

    group = bytes.fromhex(uid) if uid else bytes(get_unique_id())
    if not uid:
        print(group.hex(), flush=True)
    torch.cuda.set_device(rank)
    communicator = Communicator.init(2, rank, UniqueId.from_bytes(group))
    stream, handle = torch.cuda.current_stream(), Handle.create()
    torch.manual_seed(rank)
    held = [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for shape in fused(config).values()]
    sides, placements = [Mesh((1, 1), start_rank=0), Mesh((1, 1), start_rank=1)], [Replicate(), Shard(0)]

    def side(tensor: torch.Tensor, of: int) -> Any:
        mine = tensor if of == rank else None
        return DistTensor(mine, local_shape=tuple(tensor.shape), dtype="bfloat16", mesh=sides[of], placements=placements)

    pairs = [(side(tensor, 0), side(tensor, 1)) for tensor in held]
    one = torch.zeros(1, device="cuda")

    def meet() -> None:
        (communicator.send if rank == 0 else communicator.recv)(one, 1 - rank, stream=stream)
        torch.cuda.synchronize()

    def once() -> float:
        torch.cuda.synchronize()
        meet()
        began = time.perf_counter()
        for source, target in pairs:
            handle.reshard(communicator, source, target, stream=stream)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    once()
    meet()
    print(sum(int(tensor.view(torch.int16).to(torch.int64).sum()) for tensor in held), flush=True)
    for _ in sys.stdin:
        print(once(), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        member(json.loads(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:] or [""])
