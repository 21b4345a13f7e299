"""Every kind of server: boots from the daemon, takes a second version while running, and then answers exactly as a fresh engine
that loads the exported folder itself, token by token and logprob by logprob.
"""

import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, wait_live
from tests.support.observing import export, wait_serving
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import MLA
from tests.support.vllm_server import Answer, VllmServer
from tests.support.weights import random_weights

pytestmark = pytest.mark.full

PROMPTS = ([5, 17, 42, 7, 300, 11], [800, 2, 9], [77] * 12)


@dataclass(frozen=True)
class Case:
    family: str
    options: tuple[tuple[str, str | int], ...] = ()  # vLLM's
    dtype: str = "float32"
    eager: bool = True
    shared_memory: bool = True
    pause_mode: str = "keep"
    changes: dict[str, Any] = field(default_factory=dict)  # of the config

    @property
    def args(self) -> list[str]:
        return [text for name, value in self.options for text in (f"--{name.replace('_', '-')}", str(value))]


CASES = {
    # vLLM's CPU build cannot run MoE under data parallelism; a dense model at DP=2 is in tests/vllm/test_control_server.py
    "MoE, TP=2, boxes by HTTP ranges and gRPC, then mapped from a node, pause wait": Case(
        "qwen3_moe", (("tensor_parallel_size", 2),), shared_memory=False, pause_mode="wait"
    ),
    "dense, tied, bf16, fp8 per channel, compiled, pause abort": Case(
        "qwen3_tied", (("quantization", "fp8_per_channel"),), dtype="bfloat16", eager=False, pause_mode="abort"
    ),
    "Gemma, TP=2": Case("gemma", (("tensor_parallel_size", 2),)),
    "Hy3, TP=2, routers that vLLM holds in fp32": Case(
        "hy_v3",
        (("tensor_parallel_size", 2),),
        dtype="bfloat16",
        changes={"first_k_dense_replace": 1, "expert_hidden_dim": 48, "route_norm": True, "qk_norm": True},
    ),
    "GLM-4.7-Flash": Case("glm4_moe_lite", dtype="bfloat16", changes=MLA | {"first_k_dense_replace": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_updated_server_answers_exactly_as_a_fresh_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    dtype = getattr(torch, case.dtype)
    config: dict[str, Any] = tiny_config(case.family, dtype=case.dtype, **case.changes)
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        Daemon(shared_memory=case.shared_memory, pause_mode=case.pause_mode, data_listen="127.0.0.1:0") as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(config, 1, dtype).items()).wait_ready(60)
        environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
        arguments = [*case.args, "--load-format", "resharder"]
        with VllmServer(tmp_path, arguments, environment, dtype=case.dtype, eager=case.eager) as server, ExitStack() as stack:
            first = answers(server)
            assert {answer.version for answer in first} == {"1"}
            assert transports(wait_serving(daemon, 1)) == {"shared-memory" if case.shared_memory else "http"}
            if not case.shared_memory:
                stack.enter_context(Node(daemon.endpoint, "one"))
                wait_live(daemon, "one")
            publisher.publish_tensors(2, random_weights(config, 2, dtype).items()).wait_serving(120)
            installed = wait_serving(daemon, 2)
            updated = answers(server)
        assert transports(installed) == {"shared-memory" if case.shared_memory else "node"}
        assert {answer.version for answer in updated} == {"2"}
        exported = tmp_path / "exported"
        export(daemon, "models/policy/versions/2", exported)
    with Engine(exported, dtype=case.dtype, enforce_eager=case.eager, **dict(case.options)) as fresh:
        reference = [tuple(fresh.logprobs(prompt, 12)) for prompt in PROMPTS]
    assert content(updated) == reference
    assert content(first) != reference


def transports(server: resources_pb2.Server) -> set[str]:
    return {worker.transport for worker in server.workers}


def answers(server: VllmServer) -> list[Answer]:
    return [server.generate(prompt, 12) for prompt in PROMPTS]


def content(answers: list[Answer]) -> list[tuple[tuple[int, float], ...]]:
    return [tuple(zip(answer.token_ids, answer.logprobs, strict=True)) for answer in answers]
