"""A real vLLM server and a trainer go on when the daemon is killed and its standby takes over."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.client.trainer.connect import Handle

from tests.support.daemon import Daemon
from tests.support.node import Node, wait_live
from tests.support.observing import export, wait_serving, wait_until
from tests.support.ports import free_port
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


class Site:
    """A trainer and a vLLM server of one model, which know the addresses of two daemons."""

    def __init__(self, stack: ExitStack, folder: Path, first: Daemon, second: Daemon) -> None:
        self.folder, endpoint = folder, f"{second.endpoint},{first.endpoint}"
        self.config: dict[str, Any] = tiny_config("qwen3_tied", dtype="float32")
        save_tokenizer(folder, self.config["vocab_size"])
        (folder / "config.json").write_text(json.dumps(self.config))
        given = {"model": "policy", "job": "j", "rank": 0, "world_size": 1, "config": self.config, "tokenizer": folder}
        self.publisher = stack.enter_context(connect(endpoint, **given))
        self.publish(1).wait_ready(60)
        environment = {"RESHARDER_ENDPOINT": endpoint, "VLLM_PLUGINS": "resharder"}
        self.server = stack.enter_context(VllmServer(folder, ["--load-format", "resharder"], environment))
        self.before = self.server.generate(PROMPT, 12)
        assert self.before.version == "1"

    def publish(self, step: int) -> Handle:
        return self.publisher.publish_tensors(step, random_weights(self.config, step, torch.float32).items())

    def answers_as_before(self, seconds: float) -> None:
        """Check that the server answers with version 1 for some seconds."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            assert self.server.generate(PROMPT, 12) == self.before

    def goes_on_with(self, daemon: Daemon) -> None:
        """Publish the next step, and check that it is served, and that a daemon has both versions bit for bit."""
        handle = self.publish(2)
        handle.wait_serving(120)
        wait_serving(daemon, handle.version)
        after = self.server.generate(PROMPT, 12)
        assert (after.version, after.token_ids != self.before.token_ids) == (str(handle.version), True)
        for step, number in ((1, 1), (2, handle.version)):
            export(daemon, f"models/policy/versions/{number}", self.folder / f"{step}")
            found, wanted = read_folder(str(self.folder / f"{step}")), random_weights(self.config, step, torch.float32)
            assert found.keys() == wanted.keys()
            assert all(found[name].tobytes() == wanted[name].numpy().tobytes() for name in wanted)


@pytest.mark.full
def test_a_server_answers_through_a_take_over_and_serves_the_next_step(pair: tuple[Daemon, Daemon], tmp_path: Path) -> None:
    first, second = pair
    with ExitStack() as stack:
        site = Site(stack, tmp_path, first, second)
        first.kill()
        died = time.monotonic()
        site.answers_as_before(LEASE_SECONDS)
        site.goes_on_with(second)
        print(f"from the death of the daemon until the next step is served: {time.monotonic() - died:.2f} s")


@pytest.mark.full
def test_a_server_answers_while_another_daemon_takes_the_registry_from_nodes(tmp_path: Path) -> None:
    options = {"replicas": 2, "lease_seconds": LEASE_SECONDS, "data_listen": "127.0.0.1:0"}
    with (
        closing(Daemon(**options)) as first,  # type: ignore[arg-type]
        closing(Daemon(port=free_port(), from_nodes=True, **options)) as second,  # type: ignore[arg-type]
        ExitStack() as stack,
    ):
        first.start()
        for name in "ab":
            stack.enter_context(Node(f"{second.endpoint},{first.endpoint}", name))
        wait_live(first, "a", "b")
        site = Site(stack, tmp_path, first, second)
        first.kill()
        died = time.monotonic()
        shutil.rmtree(first.store)
        second.launch()
        site.answers_as_before(LEASE_SECONDS + 1)
        site.goes_on_with(second)
        print(f"from the loss of the daemon's folder until the next step is served: {time.monotonic() - died:.2f} s")
