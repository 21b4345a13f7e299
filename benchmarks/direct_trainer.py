"""One of two Megatron ranks for `benchmarks.direct_install`: a model of a real shape on its GPU, told what to publish.

Weights are a hash of each element's tensor, place and step, small enough for a model to run with.
"""
# ruff: noqa: E402, I001 - megatron-core on a CPU needs something to be imported first

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CPU = not torch.cuda.is_available()
if CPU:
    from tests.support import megatron_shim  # noqa: F401
from demo.jobs import answer, next_request
from resharder.client import connect
from resharder.converters.building import build_chunks
from resharder.converters.layout import Piece
from resharder.converters.local import view_of
from resharder.converters.megatron import local_layout


def values(piece: Piece, shape: tuple[int, ...], step: int, device: torch.device) -> torch.Tensor:
    place = torch.full((), sum(piece.tensor.encode()) * 7919 + step * 104729, dtype=torch.int64, device=device)
    for r, n in zip(piece.box, shape, strict=True):
        place = place.unsqueeze(-1) * n + torch.arange(r.start, r.last + 1, r.step, device=device)
    return (place.mul_(0x9E3779B1).bitwise_right_shift_(13).bitwise_and_(0xFFFF).to(torch.float32) / 65536 - 0.5).mul_(0.04)


def main() -> None:
    endpoint, model_name, folder, settings = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    dist.init_process_group("gloo")
    device = torch.device("cpu" if CPU else "cuda", None if CPU else int(os.environ["LOCAL_RANK"]))
    if not CPU:
        torch.cuda.set_device(device)
    config, options = settings.pop("config"), settings.pop("connect")
    chunks = build_chunks(config, **settings, dtype=torch.bfloat16, device=device.type)
    layout, tensors = local_layout(chunks, config)
    publisher = connect(endpoint, model=model_name, **options)
    began = time.perf_counter()
    publisher.attach(chunks, config, tokenizer=folder.parent)
    attached, number = time.perf_counter() - began, 0
    while True:
        number += 1
        request: list[Any] = [next_request(folder, number) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(request)
        if request[0].pop("do") == "stop":
            break
        step, seed, direct = (request[0][name] for name in ("step", "seed", "direct"))
        with torch.no_grad():
            for piece in layout.pieces:
                there = view_of(tensors[piece.local], piece.view(piece.box))
                there.copy_(values(piece, layout.tensors[piece.tensor].shape, seed, device))
        dist.barrier()
        began = time.perf_counter()
        handle = publisher.publish(step, direct=direct)
        took = time.perf_counter() - began
        if dist.get_rank() == 0:
            answer(folder, number, {"version": handle.version, "publish_s": took, "attach_s": attached})
    publisher.close()


if __name__ == "__main__":
    main()
