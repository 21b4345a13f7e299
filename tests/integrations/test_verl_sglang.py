"""verl's SGLang rollout with backend `resharder`: verl's own lines of an update, a real daemon and a real SGLang server, on CPUs.

verl 0.9.1 pins SGLang 0.5.12, and does not start 0.5.23: this runs with 0.5.17.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import Operator

from tests.support.daemon import Daemon
from tests.support.sglang_server import environment
from tests.support.tiny_hf import greedy_answer, load_model, save_checkpoint, tiny_config

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(
        not (find_spec("verl") and find_spec("sglang")), reason="verl or SGLang is not installed: make integrations"
    ),
]

LINE, PROMPT, TOKENS = "answered: ", [5, 17, 42, 7], 8


def run(folder: Path, variables: Mapping[str, str], **arguments: Any) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.verl_sglang_program", str(folder), json.dumps(arguments)],
        env={**os.environ, **environment(), "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line.removeprefix(LINE)) for line in done.stdout.splitlines() if line.startswith(LINE)]


def expected(folder: Path, sign: float) -> list[int]:
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sign)
    return list(greedy_answer(model, PROMPT, TOKENS))


def test_a_server_that_verl_starts_serves_each_update_of_the_trainer_when_verl_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=2), seed=3)
    plugin = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": "policy", "RESHARDER_UNREACHABLE": "prefer"}
    found = run(folder, plugin, model="policy", endpoint=daemon.endpoint, follow=True, timeout=120.0)
    first, second = expected(folder, 1.0), expected(folder, -1.0)
    assert found == [{"tokens": first, "step": None}, {"tokens": second, "step": 1}, {"tokens": first, "step": 2}]
    assert first != second
    with Operator(daemon.endpoint) as operator:
        assert {server.version for server in operator.servers()} == {2}
