"""Deltas of AdamW's steps: `python -m benchmarks.delta [--gigabytes 1.2] [--rates 1e-6 3e-6 1e-5] [--steps 12]`.

A causal language model with FP32 master weights takes policy-gradient steps with group-normalised random advantages: real
gradients, real AdamW. Of its BF16 weights, the last step's delta is measured, piece by piece on one thread as the archive
encodes it: its bytes, and its time beside zstd alone, of the differences (the same bytes) and of the weights.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from statistics import median

import numpy as np
import torch
import zstandard
from resharder.converters.storage.delta import PIECE, decode, encode
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, TOKENS, GROUP = 8192, 64, 4


def main() -> None:
    arguments = parsed()
    torch.manual_seed(0)
    rows = [measured(arguments, rate) for rate in arguments.rates]
    table = Table("learning rate", "changed", "bytes", "encode", "of zstd", "of weights", "decode", "of zstd", "of weights")
    for row in rows:
        table.add_row(
            f"{row['rate']:g}",
            f"{row['changed']:.1%}",
            f"1/{row['ratio']:.1f}",
            f"{row['encode']:.2f} GB/s",
            f"{row['encode_of_zstd']:.2f} x",
            f"{row['encode_of_weights']:.2f} x",
            f"{row['decode']:.2f} GB/s",
            f"{row['decode_of_zstd']:.2f} x",
            f"{row['decode_of_weights']:.2f} x",
        )
    Console(width=130).print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2, help="BF16 weights of the model, about")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    return parser.parse_args()


def measured(arguments: argparse.Namespace, rate: float) -> dict[str, float]:
    """Train, and measure the delta of the last step; times are medians of rounds, in which the ways take turns."""
    before, after = last_step(arguments, rate)
    starts = range(0, len(after), PIECE)
    pieces = [(after[start : start + PIECE].data, before[start : start + PIECE].data) for start in starts]
    differences = [np.bitwise_xor(before[start : start + PIECE], after[start : start + PIECE]).tobytes() for start in starts]
    compress, decompress = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    stored = [encode(*piece) for piece in pieces]
    packed, weights = [compress(each) for each in differences], [compress(piece[0]) for piece in pieces]
    out = np.empty(PIECE, np.uint8)  # the archive uses its buffers again
    ways: dict[str, Callable[[], object]] = {
        "encode": lambda: [encode(*piece) for piece in pieces],
        "zstd": lambda: [compress(each) for each in differences],
        "weights": lambda: [compress(piece[0]) for piece in pieces],
        "decode": lambda: [
            decode(how, content, piece[1], len(piece[0]), out) for (how, content), piece in zip(stored, pieces, strict=True)
        ],
        "unzstd": lambda: [decompress(each) for each in packed],
        "unweights": lambda: [decompress(each) for each in weights],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            start = time.thread_time()
            way()
            times[name].append(time.thread_time() - start)
    taken = {name: median(each) for name, each in times.items()}
    decoded = [decode(how, content, piece[1], len(piece[0])) for (how, content), piece in zip(stored, pieces, strict=True)]
    assert b"".join(decoded) == after.tobytes()
    return {
        "rate": rate,
        "changed": float((before.view(np.uint16) != after.view(np.uint16)).mean()),
        "ratio": len(after) / sum(len(content) for _, content in stored),
        "encode": len(after) / taken["encode"] / 1e9,
        "encode_of_zstd": taken["encode"] / taken["zstd"],
        "encode_of_weights": taken["encode"] / taken["weights"],
        "decode": len(after) / taken["decode"] / 1e9,
        "decode_of_zstd": taken["decode"] / taken["unzstd"],
        "decode_of_weights": taken["decode"] / taken["unweights"],
    }


def last_step(arguments: argparse.Namespace, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the BF16 bytes of the weights before and after the last step."""
    before, after = steps_of(arguments.gigabytes, rate, arguments.steps, 2)
    return before, after


def steps_of(gigabytes: float, rate: float, steps: int, last: int) -> Iterator[np.ndarray]:
    """Yield the BF16 bytes of the weights after each of the last steps."""
    model = a_model(gigabytes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.999))
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (GROUP, TOKENS + 1))
        logits = model(tokens[:, :-1]).logits.float()
        advantages = torch.randn(GROUP)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        log_probabilities = -cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        optimizer.zero_grad()
        (-(advantages * log_probabilities).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= steps - last:
            yield weight_bytes(model)


def a_model(gigabytes: float) -> Qwen3ForCausalLM:
    """Return a model of Qwen3's shape with about so many bytes in BF16, in FP32."""
    width = 1024 if gigabytes >= 0.5 else 512
    layer = width * width * (1 + 0.5 + 0.5 + 1 + 9)
    layers = max(1, round((gigabytes * 1e9 / 2 - VOCABULARY * width) / layer))
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).float()


def weight_bytes(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        parts = [each.to(torch.bfloat16).view(torch.int16).flatten().numpy() for each in model.parameters()]
        return np.concatenate(parts).view(np.uint8)


if __name__ == "__main__":
    main()
