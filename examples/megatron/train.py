"""Train a small Llama on two tensor-parallel Megatron ranks, and publish it after each step. No GPU is needed.

    resharderd &
    torchrun --standalone --nproc-per-node 2 -m examples.megatron.train
    resharder versions

`connect`, `attach` and `publish` are all that it takes; the model and its loss are in model.py. Prints a line for each step.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from resharder.client import connect
from transformers import LlamaConfig

from examples.megatron.model import build, token_losses

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
    dtype="float32",
)
"""For vLLM. `attach` refuses a Megatron model that computes something else."""
TEXT = torch.arange(64).remainder(7)[None]  # 0 1 2 3 4 5 6 0 1 2 …


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer, which vLLM needs for text")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    with connect(model="policy") as publisher:  # at RESHARDER_ENDPOINT, by default 127.0.0.1:7677
        publisher.attach(model, CONFIG, options.tokenizer)
        for step in range(1, options.steps + 1):
            optimizer.zero_grad()
            token_losses(model, TEXT).mean().backward()
            optimizer.step()
            handle = publisher.publish(step)  # the weights may change from here on
            loss = token_losses(model, TEXT).mean()
            handle.wait_ready()
            if dist.get_rank() == 0:
                print(f"{handle.name}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
