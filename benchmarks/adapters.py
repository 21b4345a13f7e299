"""Versions of an adapter on one server: `python -m benchmarks.adapters [--rounds N] [--gpu]`.

From the trainer's call of `publish_tensors` to the first token of the new version, by its label; and what streams of the base,
and of another adapter, see meanwhile. Beside it, in the same run, vLLM's own way: the adapter saved as a folder in /dev/shm,
`/v1/load_lora_adapter` in place, and the first token of a request after that.

The base is a shape with random weights that vLLM makes itself: the daemon has adapters alone. Without `--gpu`, a small one on a
CPU.
"""

import argparse
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from resharder.client import connect
from resharder.client.operator import Operator
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks.shapes import QWEN3_8B
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import save_tokenizer
from tests.support.vllm_server import VllmServer, completion

NAME, OTHER = "policy-lora", "other-lora"
SMALL = QWEN3_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}
PROMPT = [5, 6, 7, 8]


def adapter(shape: Mapping[str, int], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of all linear layers, by PEFT's names."""
    hidden, head = shape["hidden_size"], shape["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, shape["num_attention_heads"] * head),
        "self_attn.k_proj": (hidden, shape["num_key_value_heads"] * head),
        "self_attn.v_proj": (hidden, shape["num_key_value_heads"] * head),
        "self_attn.o_proj": (shape["num_attention_heads"] * head, hidden),
        "mlp.gate_proj": (hidden, shape["intermediate_size"]),
        "mlp.up_proj": (hidden, shape["intermediate_size"]),
        "mlp.down_proj": (shape["intermediate_size"], hidden),
    }
    draw, found = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer in range(shape["num_hidden_layers"]):
        for module, (inner, outer) in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            found[f"{name}.lora_A.weight"] = (torch.randn(rank, inner, generator=draw) * 0.02).bfloat16()
            found[f"{name}.lora_B.weight"] = (torch.randn(outer, rank, generator=draw) * 0.02).bfloat16()
    return found


@dataclass
class Stream:
    """Requests for one model, one after the other, each a stream of tokens."""

    server: VllmServer
    model: str
    tokens: list[float] = field(default_factory=list)
    """Times of tokens, within requests."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(time of a token, seconds since the one before), within requests."""
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.ended.is_set():
            at = [token.at for token in self.server.stream(PROMPT, 400, model=self.model)]
            self.gaps += [(after, after - before) for before, after in pairwise(at)]

    def between(self, since: float, until: float) -> list[float]:
        return [seconds for at, seconds in self.gaps if since <= at <= until]


@contextmanager
def streaming(server: VllmServer, *models: str) -> Iterator[list[Stream]]:
    streams = [Stream(server, model) for model in models]
    threads = [threading.Thread(target=stream.run) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        yield streams
    finally:
        for stream in streams:
            stream.ended.set()
        for thread in threads:
            thread.join()


def note_gaps(found: Sequence[dict[str, float]], streams: Sequence[Stream]) -> None:
    """Replace the times of each version by the longest gap of each stream in them, as a multiple of its median."""
    for version in found:
        since, until = version.pop("since"), version.pop("until") + 0.2
        for stream in streams:
            usual = median(seconds for _, seconds in stream.gaps)
            version[f"gap {stream.model}"] = max(stream.between(since, until), default=0.0) / usual
            version[f"median {stream.model}"] = usual


def first_token(server: VllmServer, model: str, label: str = "") -> float:
    """Return when the first token of `model` arrives; with a label, of that version."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with server._send("POST", "/v1/completions", completion(PROMPT, 1, model=model, stream=True), 60) as (status, _, answer):
            for line in answer if status == 200 else ():
                if line.startswith(b"data: {") and label.encode() in line and b'"token_ids"' in line:
                    return time.monotonic()
    raise TimeoutError(f"no token of {label or model} within 60 s")


def config_of(rank: int) -> dict[str, object]:
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank * 2,
        "target_modules": modules,
        "bias": "none",
    }


def ours(server: VllmServer, daemon: Daemon, shape: Mapping[str, int], rank: int, rounds: int) -> list[dict[str, float]]:
    """Return seconds of each version: until READY, until its first token; and gaps of other streams, as a share of the median."""
    publishers = {
        name: connect(
            daemon.endpoint, model=name, base="policy", job=uuid.uuid4().hex, rank=0, world_size=1, config=config_of(rank)
        )
        for name in (NAME, OTHER)
    }
    tensors = [adapter(shape, rank, seed) for seed in range(3)]
    publishers[OTHER].publish_tensors(1, tensors[2].items()).wait_ready(60)
    first_token(server, OTHER, f"{OTHER}=1")
    found = []
    with streaming(server, "m", OTHER) as streams:
        time.sleep(2)
        for step in range(1, rounds + 2):
            began = time.monotonic()
            handle = publishers[NAME].publish_tensors(step, tensors[step % 2].items())
            published = time.monotonic()
            handle.wait_ready(60)
            ready = time.monotonic()
            served = first_token(server, NAME, f"{NAME}={step}")
            time.sleep(1.5)
            with Operator(daemon.endpoint) as operator:
                (worker,) = next(each for each in operator.servers() if each.name == f"servers/one.{NAME}").workers
            spans = {"publish": published - began, "ready": ready - began, "staging": worker.stage_seconds}
            found.append(spans | {"served": served - began, "since": began, "until": served})
        time.sleep(1.5)
    note_gaps(found, streams)
    for publisher in publishers.values():
        publisher.close()
    return found


def theirs(server: VllmServer, shape: Mapping[str, int], rank: int, rounds: int, folder: Path) -> list[dict[str, float]]:
    """Return seconds of vLLM's own way: to save a folder, to load it, until the first token; and gaps of other streams."""
    tensors = [adapter(shape, rank, seed) for seed in range(3)]

    def save(name: str, which: int) -> Path:
        path = folder / name
        path.mkdir(exist_ok=True)
        save_file(tensors[which], path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config_of(rank)))
        return path

    def load(name: str, path: Path, **options: object) -> None:
        answer = server.request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **options})
        assert answer.status == 200, answer.body

    load(OTHER, save(OTHER, 2))
    load(NAME, save(NAME, 0))
    first_token(server, NAME)
    found = []
    with streaming(server, "m", OTHER) as streams:
        time.sleep(2)
        for step in range(1, rounds + 2):
            began = time.monotonic()
            path = save(NAME, step % 2)
            saved = time.monotonic()
            load(NAME, path, load_inplace=True)
            loaded = time.monotonic()
            served = first_token(server, NAME)
            time.sleep(1.5)
            found.append(
                {"save": saved - began, "load": loaded - saved, "served": served - began, "since": began, "until": served}
            )
        time.sleep(1.5)
    note_gaps(found, streams)
    return found


def table(title: str, found: Sequence[Mapping[str, float]]) -> Table:
    """Return medians over the rounds but the first, beside the first round."""
    made = Table(title=title)
    for column in ("", "median", "lowest", "highest", "first"):
        made.add_column(column)
    for name in found[0]:
        values = [version[name] for version in found[1:]]
        scale, unit = (1, "×") if name.startswith("gap") else (1e3, "ms")
        made.add_row(
            name, *(f"{value * scale:.1f} {unit}" for value in (median(values), min(values), max(values), found[0][name]))
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--gpu", action="store_true")
    given = parser.parse_args()
    shape, console = QWEN3_8B if given.gpu else SMALL, Console(width=110)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        folder = Path(made)
        (folder / "config.json").write_text(json.dumps(shape))
        save_tokenizer(folder, shape["vocab_size"])
        args = ["--load-format", "dummy", "--enable-lora", "--max-loras", "3"]
        args += ["--max-lora-rank", str(given.rank), "--max-model-len", "2048"]
        if given.gpu:
            args += ["--kv-cache-memory-bytes", str(8 << 30)]
        options = {"args": args, "dtype": "bfloat16", "eager": not given.gpu}
        with Daemon() as daemon:
            environment = {
                "RESHARDER_ENDPOINT": daemon.endpoint,
                "RESHARDER_MODEL": "policy",
                "RESHARDER_SERVER_ID": "one",
                "RESHARDER_UNREACHABLE": "prefer",
                "RESHARDER_ADAPTERS": f"{NAME},{OTHER}",
                "VLLM_PLUGINS": "resharder",
            }
            with VllmServer(folder, env=environment, **options) as server:
                wait_until(lambda: server.request("GET", "/health").status == 200, "the server is ready")
                resharder = ours(server, daemon, shape, given.rank, given.rounds)
        console.print(table("Resharder", resharder))
        environment = {"VLLM_PLUGINS": "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "RESHARDER_ENDPOINT": None}
        with VllmServer(folder, env=environment, **options) as server:
            vllm = theirs(server, shape, given.rank, given.rounds, folder)
    size = sum(tensor.nbytes for tensor in adapter(shape, given.rank, 0).values())
    console.print(f"an adapter of rank {given.rank}, {size / 1e6:.0f} MB; {os.cpu_count()} cores")
    console.print(table("vLLM's load_lora_adapter", vllm))
    ratio = median(v["served"] for v in resharder[1:]) / median(v["served"] for v in vllm[1:])
    console.print(f"served: {ratio:.2f} of vLLM's")


if __name__ == "__main__":
    main()
