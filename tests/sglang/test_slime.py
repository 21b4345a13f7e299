"""slime's weight updater `resharder`: two Megatron ranks, a real daemon and a real SGLang server.

slime is in no package index. With RESHARDER_TEST_SLIME, a checkout of it (`make test-sglang SLIME=…`), its own lines make the
updater and call it, and start the server. Read, and run so, with 0.3.1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from resharder.client.errors import UsageError

from tests.sglang.slime_ranks import LINE, PROMPT, TOKENS, installed, options
from tests.support.daemon import Daemon
from tests.support.ports import free_port
from tests.support.sglang_server import SGLangServer
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config

ROOT = Path(__file__).parents[2]


def test_each_update_of_slimes_actor_is_served_when_it_returns(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    with Daemon() as daemon:
        common: dict[str, str | None] = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy"}
        with SGLangServer(folder, env=common | {"RESHARDER_UNREACHABLE": "prefer"}, module="tests.sglang.slime_server") as server:
            program = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
            done = subprocess.run(
                [sys.executable, *program, "-m", "tests.sglang.slime_ranks", str(folder), f"http://127.0.0.1:{server.port}"],
                env={**os.environ, **common, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stderr[-3000:] + server.log_tail()
    served = [json.loads(line.removeprefix(LINE)) for line in done.stdout.splitlines() if line.startswith(LINE)]
    model = load_model(folder)
    first = list(greedy_answer(model, PROMPT, TOKENS))
    model.lm_head.weight.data.mul_(-1)
    assert served == [{"version": "1", "tokens": first}, {"version": "2", "tokens": list(greedy_answer(model, PROMPT, TOKENS))}]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"colocate": True}, "--colocate"),
        ({"update_weight_mode": "delta"}, "--update-weight-mode"),
        ({"update_weight_transport": "disk"}, "--update-weight-transport"),
    ],
)
def test_a_job_that_would_make_another_updater_is_refused_by_its_option(given: dict[str, Any], named: str) -> None:
    args = options("")
    vars(args).update(given)
    with pytest.raises(UsageError, match=f"by itself with {named}"):
        installed(args)
