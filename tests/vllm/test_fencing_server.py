"""Two real API servers of one real engine, and a real daemon: the leader is stopped with a resumption on its way."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_serving, wait_until
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = [pytest.mark.full, pytest.mark.compat("fence")]

RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
PROMPT = [5, 17, 42]
LEASE = 10.0


def test_a_stopped_leaders_resumption_is_refused_and_the_engine_stays_paused_until_the_next_leader_resumes_it(
    tmp_path: Path,
) -> None:
    config, model, held = tiny_config("qwen3"), tmp_path / "model", tmp_path / "held"
    model.mkdir()
    held.mkdir()
    save_tokenizer(model, config["vocab_size"])
    (model / "config.json").write_text(json.dumps(config))

    def holding() -> list[int]:
        return sorted(int(path.name.removeprefix("held-")) for path in held.glob("held-*"))

    def let_go(pid: int) -> None:
        (held / f"go-{pid}").touch()

    with (
        Daemon(lease_seconds=LEASE) as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=model) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(120)
        environment = {
            "RESHARDER_ENDPOINT": daemon.endpoint,
            "VLLM_PLUGINS": "resharder,held_resumption",
            "PYTHONPATH": os.pathsep.join([str(RAW_MODE), os.environ.get("PYTHONPATH", "")]),
            "HELD_RESUMPTIONS": str(held),
        }
        args = ["--load-format", "resharder", "--api-server-count", "2"]
        with VllmServer(model, args, environment, timeout=900) as server, ThreadPoolExecutor(1) as pool:
            wait_until(lambda: [one.control_sides for one in servers(daemon)] == [2], "both API servers hold the lease")
            wait_serving(daemon, 1)
            publisher.publish_tensors(2, random_weights(config, 2).items()).wait_ready(120)
            wait_until(lambda: len(holding()) == 1, "the leader's resumption is on its way")
            (leader,) = holding()
            os.kill(leader, signal.SIGSTOP)
            let_go(leader)
            try:
                wait_until(lambda: len(holding()) == 2, "the other one leads, and its resumption is on its way")
                (other,) = set(holding()) - {leader}
            finally:
                os.kill(leader, signal.SIGCONT)
            wait_until(lambda: "was refused: expected an order of term" in server.log_text(), "the stopped leader is refused")
            asked = pool.submit(server.generate, PROMPT, 4)
            with pytest.raises(TimeoutError):
                asked.result(1)
            assert not (held / "ran").exists(), "the engine is still paused"
            let_go(other)
            assert asked.result(60).version == "2"
            wait_serving(daemon, 2)
