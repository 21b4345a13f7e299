"""A real vLLM server and a trainer go on when the daemon is killed and its standby takes over."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.observing import export, wait_serving, wait_until
from tests.support.publishing import read_folder
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

PROMPT = [5, 17, 42, 7, 300, 11]
LEASE_SECONDS = 5.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon that holds the lease, and a standby."""
    options = {"store": tmp_path / "store", "lease_file": tmp_path / "lease", "daemon_lease_seconds": LEASE_SECONDS}
    with closing(Daemon(**options)) as first, closing(Daemon(**options)) as second:  # type: ignore[arg-type]
        first.start()
        second.launch()
        wait_until(lambda: "holds the lease" in second.log.read_text(), timeout=60)
        yield first, second


@pytest.mark.full
def test_a_server_answers_through_a_take_over_and_serves_the_next_step(pair: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    first, second = pair
    endpoint = f"{second.endpoint},{first.endpoint}"
    config: dict[str, Any] = tiny_config("qwen3_tied", dtype="float32")
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with connect(endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1, torch.float32).items()).wait_ready(60)
        environment = {"RESHARDER_ENDPOINT": endpoint, "VLLM_PLUGINS": "resharder"}
        with VllmServer(tmp_path, ["--load-format", "resharder"], environment) as server:
            before = server.generate(PROMPT, 12)
            assert before.version == "1"
            first.kill()
            died = time.monotonic()
            while time.monotonic() - died < LEASE_SECONDS:
                assert server.generate(PROMPT, 12) == before
            handle = publisher.publish_tensors(2, random_weights(config, 2, torch.float32).items())
            handle.wait_serving(120)
            print(f"from the death of the daemon until the next step is served: {time.monotonic() - died:.2f} s")
            wait_serving(second, handle.version)
            after = server.generate(PROMPT, 12)
            assert (after.version, after.token_ids != before.token_ids) == (str(handle.version), True)
            for step, number in ((1, 1), (2, handle.version)):
                export(second, f"models/policy/versions/{number}", tmp_path / f"{step}")
                found, wanted = read_folder(str(tmp_path / f"{step}")), random_weights(config, step, torch.float32)
                assert found.keys() == wanted.keys()
                assert all(found[name].tobytes() == wanted[name].numpy().tobytes() for name in wanted)
