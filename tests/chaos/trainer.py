"""One Megatron rank of the chaos suite: `demo.trainer` that survives every refusal, and replies with its reason.

torchrun --nproc-per-node 2 -m tests.chaos.trainer ENDPOINT MODEL FOLDER '{"config": {…}, "tp": 2, "connect": {…}}'
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.megatron_models import build_model, fill_from_hf  # isort: skip
import torch
import torch.distributed as dist
from resharder.client import connect
from resharder.client.errors import ResharderError
from resharder.client.rpc.tls import Tls
from resharder.client.trainer.publisher import Publisher

from demo.jobs import answer, next_request
from tests.support.tiny_hf import save_tokenizer
from tests.support.weights import random_weights

READY_SECONDS = 60.0


def main() -> None:
    endpoint, model, folder, settings = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config, options = settings.pop("config"), settings.pop("connect")
    options |= {"tls": Tls(**options["tls"])} if "tls" in options else {}
    chunks = build_model(config, **settings)
    if dist.get_rank() == 0:
        save_tokenizer(folder / "tokenizer", config["vocab_size"])
    dist.barrier()
    publisher = connect(endpoint, model=model, **options)
    number = 0
    while True:
        number += 1
        request: list[Any] = [next_request(folder, number) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(request)
        if request[0]["do"] == "stop":
            break
        reply = publish(publisher, chunks, config, folder, request[0]["step"], request[0]["direct"])
        if dist.get_rank() == 0:
            answer(folder, number, reply)
    publisher.close()
    dist.destroy_process_group()


def publish(publisher: Publisher, chunks: Any, config: Any, folder: Path, step: int, direct: bool) -> dict[str, Any]:
    """Publish the random weights of a step, overwrite them, and return what every rank got."""
    fill_from_hf(chunks, config, random_weights(config, step))
    dist.barrier()
    began = time.monotonic()
    outcome = {"version": 0, "epoch": 0, "reason": "", "text": "", "transport": "", "transport_reason": ""}
    try:
        if not publisher.epoch:
            publisher.attach(chunks, config, tokenizer=folder / "tokenizer")
        handle = publisher.publish(step, direct=direct)
        outcome |= {"version": handle.version, "epoch": publisher.epoch}
        outcome |= {"transport": handle.transport, "transport_reason": handle.transport_reason}
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(float("nan"))
        handle.wait_ready(READY_SECONDS)
    except ResharderError as error:
        outcome |= {"reason": error.reason, "text": f"{type(error).__name__}: {error}"[:500]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, outcome)
    return {"ranks": everyone, "seconds": round(time.monotonic() - began, 3)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
