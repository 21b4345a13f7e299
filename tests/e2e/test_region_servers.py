"""A vLLM server in a region, which sees nothing of home but the bucket, answers as the one at home."""

import json
from pathlib import Path

import pytest
import torch
from resharder.client import connect
from resharder.client.operator import Operator

from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import Answer, VllmServer
from tests.support.weights import random_weights

pytestmark = pytest.mark.full

PROMPTS = ([5, 17, 42, 7, 300, 11], [800, 2, 9], [77] * 12)


def test_a_server_in_a_region_answers_as_the_one_at_home_and_rolls_back(tmp_path: Path) -> None:
    config = tiny_config("qwen3_tied", dtype="float32")
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    bucket = tmp_path / "bucket"
    weights = random_weights(config, 1, torch.float32)
    with (
        Daemon(archive_url=bucket, archive_every=1) as home,
        Daemon(follow=bucket) as region,
        connect(home.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, weights.items()).wait_ready(60)
        with server(tmp_path, home) as here, server(tmp_path, region) as there:
            wait_serving(home, 1)
            wait_serving(region, 1)
            first = same(answers(here), answers(there), "1")
            for step in (2, 3):
                for tensor in weights.values():
                    tensor.view(-1)[::7] += 0.01 * step
                publisher.publish_tensors(step, weights.items()).wait_serving(120)
                wait_serving(region, step)
                assert same(answers(here), answers(there), str(step)) != first
            with Operator(region.endpoint) as operator:
                operator.rollback("policy", 1)
            wait_serving(region, 1)
            wait_serving(home, 3)
            assert tokens(answers(there)) == first


def server(folder: Path, daemon: Daemon) -> VllmServer:
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
    return VllmServer(folder, ["--load-format", "resharder"], environment, dtype="float32", eager=True)


def answers(server: VllmServer) -> list[Answer]:
    return [server.generate(prompt, max_tokens=12) for prompt in PROMPTS]


def tokens(found: list[Answer]) -> list[tuple[list[int], list[float]]]:
    return [(list(answer.token_ids), list(answer.logprobs)) for answer in found]


def same(here: list[Answer], there: list[Answer], version: str) -> list[tuple[list[int], list[float]]]:
    """The answers, if they are the same, of this version."""
    assert {answer.version for answer in (*here, *there)} == {version}
    assert tokens(here) == tokens(there)
    return tokens(there)
