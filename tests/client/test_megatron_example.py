"""examples/megatron as its head says to run it, and that examples are programs of a user: they import nothing of the tests."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resharder.client import Operator
from transformers import AutoModelForCausalLM

from tests.support.daemon import Daemon

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))
TEXT = torch.arange(64).remainder(7)[None]


@pytest.mark.full
def test_each_version_of_two_megatron_ranks_has_the_loss_that_the_example_prints(daemon: Daemon, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "examples.megatron.train", "--steps", "2"],
        cwd=ROOT,
        env=os.environ | {"RESHARDER_ENDPOINT": daemon.endpoint, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    printed = re.findall(r"^models/policy/versions/(\d): loss (\S+)$", done.stdout, re.MULTILINE)
    assert [number for number, _ in printed] == ["1", "2"]
    with Operator(daemon.endpoint) as operator:
        for number, loss in printed:
            operator.export(int(number), tmp_path / number)
            model = AutoModelForCausalLM.from_pretrained(tmp_path / number, dtype=torch.float32)
            assert model(TEXT, labels=TEXT).loss.item() == pytest.approx(float(loss), abs=2e-4)


@pytest.mark.parametrize("path", PROGRAMS, ids=[str(path.relative_to(ROOT)) for path in PROGRAMS])
def test_an_example_imports_nothing_of_the_tests(path: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    assert [name for name in names if name.split(".")[0] in ("tests", "tools")] == []
