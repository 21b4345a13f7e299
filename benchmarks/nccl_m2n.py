"""Peer of the direct path: NCCL M2N (`nccl-extensions`, vLLM's `m2n` backend), from one GPU to the next, without vLLM.

Two processes hold a model's tensors, and one reshards all of them to the other. M2N verifies nothing; here the sums of all
elements of both are compared after the first round. `checkpoint`: one call for each tensor of the checkpoint; `fused`: one for
each of vLLM's tensors, the experts of a layer in two: the fewest that M2N could be given. Five rounds are printed:
`python -m benchmarks.nccl_m2n NAME CALLS --site SITE`.
"""

import argparse
import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks import shapes

MODELS = {"Qwen3-8B": shapes.QWEN3_8B, "Qwen3-30B-A3B": shapes.QWEN3_30B_A3B}
Calls = Literal["checkpoint", "fused"]
Shapes = dict[str, tuple[int, ...]]


def tensors(name: str, calls: Calls) -> Shapes:
    """Return the shapes of a model's tensors, as M2N gets them."""
    found: Shapes = dict(expected_shapes(MODELS[name]))
    if calls == "checkpoint" or "num_experts" not in MODELS[name]:
        return found
    config = MODELS[name]
    width, hidden, experts = config["moe_intermediate_size"], config["hidden_size"], config["num_experts"]
    kept = {tensor: shape for tensor, shape in found.items() if ".experts." not in tensor}
    for layer in range(config["num_hidden_layers"]):
        kept |= {f"{layer}.w13": (experts * 2 * width, hidden), f"{layer}.w2": (experts * hidden, width)}
    return kept


class Peer:
    """Both processes. `round` returns the seconds of the slower one."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        self._processes = processes

    def round(self) -> float:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("round\n")
            process.stdin.flush()
        return max(float(_line(process)) for process in self._processes)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"NCCL M2N: a process ended with {process.wait()}")
    return line


@contextmanager
def running(site: Path, name: str, calls: Calls, gpus: tuple[str, str]) -> Iterator[Peer]:
    """Run the peer. `site`: folder with `nccl-extensions` and the NCCL that it needs, which the processes preload."""
    environment = os.environ | {
        "PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}",
        "LD_PRELOAD": str(site / "nvidia/nccl/lib/libnccl.so.2"),
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
    }
    command = [sys.executable, "-m", "benchmarks.nccl_m2n", name, calls, "--rank"]
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        for rank in (0, 1):
            uid = ["--uid", _line(processes[0])] if processes else []
            process = subprocess.Popen(
                [*command, str(rank), *uid], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        sums = {_line(process) for process in processes}
        if len(sums) != 1:
            raise AssertionError(f"NCCL M2N: expected the same sums in both processes, got {sums}")
        yield Peer(processes)


def measure(site: Path | None, name: str, gpus: str, calls: Calls = "fused") -> None:
    """Print the seconds of five rounds between the first two of `gpus`, unless `site` is None."""
    if site is None:
        return
    first, second = gpus.split(",")[:2]
    with running(site, name, calls, (first, second)) as peer:
        rounds = [peer.round() for _ in range(5)]
    size = 2 * sum(map(math.prod, tensors(name, calls).values()))
    print(f"{name}: NCCL M2N, {calls}, {size / 1e9:.2f} GB: {', '.join(f'{s * 1000:.1f}' for s in rounds)} ms", flush=True)


def process(name: str, calls: Calls, rank: int, uid: str) -> None:
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
    held = [torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_() for shape in tensors(name, calls).values()]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("calls", choices=["checkpoint", "fused"])
    parser.add_argument("--site", type=Path, help="run both processes, with the packages in this folder, and print five rounds")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--uid", default="")
    arguments = parser.parse_args()
    if arguments.rank is not None:
        with contextlib.suppress(KeyboardInterrupt):
            process(arguments.name, arguments.calls, arguments.rank, arguments.uid)
        return
    measure(arguments.site, arguments.name, "0,1", arguments.calls)


if __name__ == "__main__":
    main()
