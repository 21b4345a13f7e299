"""One of the Megatron ranks of `benchmarks.direct_system`: a model of a real shape on its GPU, which publishes on request.

Weights are those of `benchmarks.weights`. `fault`: action of rank 0 in the middle of its next transfer: "stop" (SIGSTOP), "die"
(SIGKILL), or a number of seconds to sleep.
"""
# ruff: noqa: E402, I001 - megatron-core on a CPU needs something to be imported first

import json
import logging
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CPU = not torch.cuda.is_available()
if CPU:
    from tests.support import megatron_shim  # noqa: F401
from demo.jobs import answer, next_request
from resharder.client import connect
from resharder.client.direct.transfer import Seconds, Transfer
from resharder.converters.models.megatron.build import build_chunks
from resharder.converters.models.tensor_io import view_of
from resharder.converters.models.megatron.layout import local_layout

from benchmarks.weights import values
from tests.support.late_group import DelayedGroup, DelayedPairs

_plain_run = Transfer.run
_fault = ""


def run(self: Transfer, *arguments: Any, **options: Any) -> Seconds:
    """Run a transfer, with the fault before others read this rank's memory or, if none does, between two of its messages."""
    global _fault
    what, _fault = _fault, ""
    if not what:
        return _plain_run(self, *arguments, **options)
    signals = {"stop": signal.SIGSTOP, "die": signal.SIGKILL}
    act = partial(os.kill, os.getpid(), signals[what]) if what in signals else partial(time.sleep, float(what))
    group, pairs = self.group, self._pairs
    sending = [number for number, exchange in enumerate(self.schedule.rounds, 1) if exchange.sends]
    if pairs.owners:
        self._pairs = DelayedPairs(pairs, act)  # type: ignore[assignment]
    else:
        self.group = DelayedGroup(group, sending[:2][-1], act)
    try:
        return _plain_run(self, *arguments, **options)
    finally:
        self.group, self._pairs = group, pairs


def main() -> None:
    global _fault
    logging.basicConfig(level=logging.INFO)
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
        asked = request[0].pop("do")
        if asked == "stop":
            break
        if asked == "fault":
            if dist.get_rank() == 0:
                _fault = str(request[0]["what"])
                answer(folder, number, {"pid": os.getpid()})
            continue
        step, seed, direct = (request[0][name] for name in ("step", "seed", "direct"))
        with torch.no_grad():
            for piece in layout.pieces:
                there = view_of(tensors[piece.local], piece.view(piece.box))
                there.copy_(values(piece.tensor, piece.box, layout.tensors[piece.tensor].shape, seed, device))
        dist.barrier()
        began = time.time()
        handle = publisher.publish(step, direct=direct)
        took = time.time() - began
        if dist.get_rank() == 0:
            answer(folder, number, {"version": handle.version, "began": began, "publish_s": took, "attach_s": attached})
    publisher.close()


if __name__ == "__main__":
    Transfer.run = run  # type: ignore[method-assign]
    main()
