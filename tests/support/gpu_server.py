"""Helpers of GPU tests of sleeping servers: shapes, options, answers and fingerprints."""

from typing import Any

import torch

from tests.support.vllm_server import Answer, VllmServer

PROMPTS = ([5, 17, 42, 7, 300, 11], [800, 2, 9])
KV_CACHE_BYTES = 1 << 30
WIDE = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # The vocabulary is no multiple of 64: vLLM pads it, and no version has those rows.
    "dense": ("qwen3", WIDE | {"intermediate_size": 6144, "num_hidden_layers": 8, "vocab_size": 40001}),
    "moe": ("qwen3_moe", WIDE | {"moe_intermediate_size": 768, "num_experts": 32, "num_hidden_layers": 4}),
}
SLEEP_MODE = ["--enable-sleep-mode"]


def free_bytes(device: int = 0) -> int:
    """Return the free bytes of a GPU, as the driver reports them for all processes."""
    return torch.cuda.mem_get_info(device)[0]


def answers(server: VllmServer) -> list[Answer]:
    return [server.generate(prompt, 12) for prompt in PROMPTS]


def tokens_and_logprobs(given: list[Answer]) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(answer.token_ids, answer.logprobs) for answer in given]


def fingerprints(server: VllmServer) -> dict[str, int]:
    """Return the fingerprint of every tensor that the model reads, of a server with one worker."""
    (tensors,) = worker_fingerprints(server)
    return tensors


def worker_fingerprints(server: VllmServer) -> list[dict[str, int]]:
    """Return the fingerprints of every tensor that each worker's model reads."""
    results = server.request("POST", "/collective_rpc", {"method": "resharder_fingerprint"}).json()["results"]
    assert all(answer["ok"] for answer in results), results
    return [answer["tensors"] for answer in results]
