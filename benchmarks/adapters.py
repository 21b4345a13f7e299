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


def adapter(shape: Mapping[str, int], rank: int, seed: int, device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of all linear layers, by PEFT's names, on a trainer's device."""
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
            found[f"{name}.lora_A.weight"] = (torch.randn(rank, inner, generator=draw) * 0.02).bfloat16().to(device)
            found[f"{name}.lora_B.weight"] = (torch.randn(outer, rank, generator=draw) * 0.02).bfloat16().to(device)
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


def longest_gap(streams: Sequence[Stream], since: float, until: float) -> float:
    """Return the longest gap of any stream in an interval, as a multiple of the stream's median."""
    return max(
        max(stream.between(since, until), default=0.0) / median(seconds for _, seconds in stream.gaps) for stream in streams
    )


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


@dataclass
class Versions:
    """Times of versions that were installed one after another."""

    seconds: list[dict[str, float]] = field(default_factory=list)
    spans: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    """Intervals of which the streams' longest gap is wanted, by name, for each version."""

    def rows(self, streams: Sequence[Stream]) -> list[dict[str, float]]:
        gaps = [{f"gap {name}": longest_gap(streams, *span) for name, span in spans.items()} for spans in self.spans]
        return [seconds | found for seconds, found in zip(self.seconds, gaps, strict=True)]


def ours(
    server: VllmServer, daemon: Daemon, shape: Mapping[str, int], rank: int, rounds: int, device: str
) -> list[dict[str, float]]:
    """Return seconds of each version until READY and until its first token, and the longest gaps of other streams.

    Each version is published twice: while requests ask for it until they get it, and while nobody does. New requests cost other
    streams a longer gap of their own, so that the second shows that of the install, and `gap request` that of the requests.
    """
    held = {NAME: adapter(shape, rank, 0, device), OTHER: adapter(shape, rank, 1, device)}
    publishers = {}
    for name, tensors in held.items():
        publishers[name] = connect(daemon.endpoint, model=name, base="policy", job=uuid.uuid4().hex, rank=0, world_size=1)
        publishers[name].attach(tensors, config_of(rank))
    publishers[OTHER].publish(1).wait_ready(60)
    first_token(server, OTHER, f"{OTHER}=1")
    found, step = Versions(), 0
    with streaming(server, "m", OTHER) as streams:
        time.sleep(2)
        for _ in range(rounds + 1):
            quiet = asked = (0.0, 0.0)
            for asks in (True, False):
                step += 1
                for tensor in held[NAME].values():
                    tensor.mul_(-1)  # as a step of the trainer
                time.sleep(0.5)
                began = time.monotonic()
                handle = publishers[NAME].publish(step)
                published = time.monotonic()
                handle.wait_ready(60)
                ready = time.monotonic()
                if asks:
                    served = first_token(server, NAME, f"{NAME}={step}")
                    times = {"publish": published - began, "ready": ready - began, "served": served - began}
                    time.sleep(1.5)
                    asked = time.monotonic(), time.monotonic() + 0.5
                    while time.monotonic() < asked[1]:
                        first_token(server, NAME, f"{NAME}={step}")
                else:
                    time.sleep(1.5)
                    quiet = began, time.monotonic()
                with Operator(daemon.endpoint) as operator:
                    (worker,) = next(each for each in operator.servers() if each.name == f"servers/one.{NAME}").workers
                assert worker.version == step
                if asks:
                    found.seconds.append(times | {"staging": worker.stage_seconds})
            found.spans.append({"install": quiet, "request": asked})
        time.sleep(1.5)
    for publisher in publishers.values():
        publisher.close()
    return found.rows(streams)


def theirs(
    server: VllmServer, shape: Mapping[str, int], rank: int, rounds: int, folder: Path, device: str
) -> list[dict[str, float]]:
    """Return seconds of vLLM's own way: to save a folder, to load it, until the first token; and gaps of other streams."""
    held = {NAME: adapter(shape, rank, 0, device), OTHER: adapter(shape, rank, 1, device)}

    def save(name: str) -> Path:
        path = folder / name
        path.mkdir(exist_ok=True)
        save_file(held[name], path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps(config_of(rank)))
        return path

    def load(name: str, path: Path, **options: object) -> None:
        answer = server.request("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **options})
        assert answer.status == 200, answer.body

    for name in held:
        load(name, save(name))
        first_token(server, name)
    found = Versions()
    with streaming(server, "m", OTHER) as streams:
        time.sleep(2)
        for _ in range(rounds + 1):
            for asks in (True, False):
                for tensor in held[NAME].values():
                    tensor.mul_(-1)
                time.sleep(0.5)
                began = time.monotonic()
                path = save(NAME)
                saved = time.monotonic()
                load(NAME, path, load_inplace=True)
                loaded = time.monotonic()
                if asks:
                    served = first_token(server, NAME)
                    found.seconds.append({"save": saved - began, "load": loaded - saved, "served": served - began})
                time.sleep(1.5)
                if not asks:
                    found.spans.append({"install": (began, time.monotonic())})
        time.sleep(1.5)
    return found.rows(streams)


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
    device = "cuda" if given.gpu else "cpu"
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
                resharder = ours(server, daemon, shape, given.rank, given.rounds, device)
        console.print(table("Resharder", resharder))
        environment = {"VLLM_PLUGINS": "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "RESHARDER_ENDPOINT": None}
        with VllmServer(folder, env=environment, **options) as server:
            vllm = theirs(server, shape, given.rank, given.rounds, folder, device)
    size = sum(tensor.nbytes for tensor in adapter(shape, given.rank, 0, "cpu").values())
    console.print(f"an adapter of rank {given.rank}, {size / 1e6:.0f} MB; {os.cpu_count()} cores")
    console.print(table("vLLM's load_lora_adapter", vllm))
    ratio = median(v["served"] for v in resharder[1:]) / median(v["served"] for v in vllm[1:])
    console.print(f"served: {ratio:.2f} of vLLM's")


if __name__ == "__main__":
    main()
