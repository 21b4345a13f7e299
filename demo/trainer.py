"""One rank of a Megatron trainer under torchrun: builds a model, publishes on request, and scores tokens with its own forward.

torchrun --nproc-per-node 4 -m demo.trainer ENDPOINT MODEL FOLDER '{"config": {…}, "tp": 2, "pp": 2, "connect": {…}}'
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.megatron_models import build_model, fill_from_hf, logits  # isort: skip
import torch
import torch.distributed as dist
from resharder.client import connect

from demo.jobs import answer, next_request
from tests.support.tiny_hf import save_tokenizer
from tests.support.weights import random_weights


def main() -> None:
    endpoint, model_name, folder, settings = sys.argv[1], sys.argv[2], Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config, options = settings.pop("config"), settings.pop("connect", {})
    dtype = getattr(torch, settings.pop("dtype", "float32"))
    chunks = build_model(config, **settings, dtype=dtype)
    if dist.get_rank() == 0:
        save_tokenizer(folder / "tokenizer", config["vocab_size"])
    dist.barrier()
    fill_from_hf(chunks, config, random_weights(config, seed=0))

    publisher = connect(endpoint, model=model_name, **options)
    publisher.attach(chunks, config, tokenizer=folder / "tokenizer")
    number = 0
    while True:
        number += 1
        request: list[Any] = [next_request(folder, number) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(request)
        if request[0]["do"] == "stop":
            break
        reply = ACTIONS[request[0].pop("do")](publisher, chunks, config, **request[0])
        if dist.get_rank() == 0:
            answer(folder, number, reply)
    publisher.close()
    dist.destroy_process_group()


def publish(publisher: Any, chunks: Any, config: Any, step: int) -> dict[str, Any]:
    """Make an "optimizer step" (new random weights), publish, then overwrite the weights, which publishing no longer needs."""
    fill_from_hf(chunks, config, random_weights(config, step))
    dist.barrier()
    start = time.perf_counter()
    handle = publisher.publish(step)
    handed_over = time.perf_counter() - start
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    handle.wait_ready(120)
    ready = time.perf_counter() - start
    times = torch.tensor([handed_over, ready])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    fill_from_hf(chunks, config, random_weights(config, step))
    return {"version": handle.version, "handed_over_s": times[0].item(), "ready_s": times[1].item()}


def score(publisher: Any, chunks: Any, config: Any, tokens: list[int]) -> dict[str, Any]:
    """Return log-probabilities of `tokens` after the first by Megatron's own forward, and the likeliest tokens."""
    scores = logits(chunks, config, torch.tensor([tokens]))
    found = torch.zeros(2, len(tokens) - 1, dtype=torch.float64)
    if scores is not None:
        next_tokens = torch.tensor(tokens[1:])
        found[0] = scores[0, :-1].float().log_softmax(-1).gather(-1, next_tokens[:, None])[:, 0]
        found[1] = scores[0, :-1].argmax(-1)
    dist.broadcast(found, dist.get_world_size() - 1)  # the last rank is always in the last pipeline stage
    return {"logprobs": found[0].tolist(), "greedy": found[1].long().tolist()}


ACTIONS = {"publish": publish, "score": score}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
