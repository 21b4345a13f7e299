"""Two ranks of a framework's actor that update a server twice, and what the server answers after each update."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tests.support.tiny_hf import greedy_answer, load_model
from tests.support.vllm_server import VllmServer

ROOT = Path(__file__).parents[2]
PROMPT, TOKENS = [5, 17, 42, 7], 8
_LINE = "served: "


def served(version: str | None, tokens: list[int]) -> None:
    """Rank 0's report of an answer."""
    print(_LINE + json.dumps({"version": version, "tokens": tokens}), flush=True)


def run(module: str, folder: Path, server: VllmServer, environment: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Run `module FOLDER URL` in two ranks, and return rank 0's reports."""
    program = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}", "-m", module]
    done = subprocess.run(
        [sys.executable, *program, str(folder), f"http://127.0.0.1:{server.port}"],
        env={**os.environ, **environment, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:] + server.log_tail()
    return [json.loads(line.removeprefix(_LINE)) for line in done.stdout.splitlines() if line.startswith(_LINE)]


def expected(folder: Path) -> list[dict[str, Any]]:
    """The reports of two updates from `folder`, before the second of which the last layer changes its sign."""
    model = load_model(folder)
    first = list(greedy_answer(model, PROMPT, TOKENS))
    model.lm_head.weight.data.mul_(-1)
    second = list(greedy_answer(model, PROMPT, TOKENS))
    return [{"version": "1", "tokens": first}, {"version": "2", "tokens": second}]
