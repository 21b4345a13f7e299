"""`benchmarks.compare` on CPUs: a small model, Resharder, and vLLM's reload from a folder."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks.compare import POINTS, Result, bars, markdown
from benchmarks.direct_layouts import DENSE
from benchmarks.systems import running
from benchmarks.systems.base import Site
from benchmarks.systems.running import Running, Seen, Wanted, WrongVersion
from benchmarks.systems.vllm_transfer import described_trainer, source_of
from tests.support import tensor_hashes
from tests.support.vllm_server import Answer, Token

ROOT = Path(__file__).parents[2]
SEEN = Seen(0.012, 0.1, None, 0.2, 0.3, 0.05, 0.01)


def test_the_table_has_each_system_with_its_points_or_with_the_reason_why_it_has_none() -> None:
    results = [
        Result("one", seen=[SEEN, SEEN._replace(held=0.016), SEEN._replace(held=0.02)]),
        Result("two", "needs a GPU"),
        Result("three", "2 tensors differ", failed=True, seen=[SEEN]),
        Result("four", alone=[0.25]),
    ]
    lines = markdown("title", results).splitlines()[4:]
    cells = ["16.0 (12.0 to 20.0)", "100 (100 to 100)", "–", "200 (200 to 200)", "50.0 (50.0 to 50.0)", "300 (300 to 300)"]
    assert lines[0] == f"| one | {' | '.join(cells)} | 3 right |"
    assert lines[1] == f"| two |{' |' * len(POINTS)} not run: needs a GPU |"
    assert lines[2].endswith("| 1 right, then failed: 2 tensors differ |")
    assert lines[3] == "| four | – | 250 | – | – | – | – | 1 transfers |"
    assert [bar.label for bar in bars(results)][:2] == ["one: first new token", "three: first new token"]


def test_vllms_engines_get_every_tensor_as_they_are_told() -> None:
    """Their transfers need GPUs; what they are made from does not."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_shapes(DENSE).items()}
    for backend in ("nccl", "ipc", "nccl_m2n"):
        source = source_of(backend, tensors)  # type: ignore[arg-type]
        sent = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
        assert sent.keys() == tensors.keys()
        meeting = {"master_address": "127.0.0.1", "master_port": 1, "world_size": 2}
        assert described_trainer(backend, meeting).backend == backend  # type: ignore[arg-type]


@pytest.mark.engine
@pytest.mark.full
def test_two_systems_bring_versions_that_equal_a_fresh_engine_and_the_others_say_why_they_do_not_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.compare", "--rounds", "2", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found = {each["name"]: each for each in json.loads((tmp_path / "compare.json").read_text())["systems"]}
    for name in ("resharder", "vllm-reload"):
        assert found[name]["why"] == "", ended.stdout
        assert len(found[name]["seen"]) == 2
        for seen in found[name]["seen"]:
            assert 0 < seen["held"] < seen["token"]
            assert seen["step"] <= seen["gap"]
            assert seen["ready"] > 0
    assert all(seen["verified"] > 0 for seen in found["resharder"]["seen"])
    assert found["vllm-nccl"]["why"] == "needs a GPU"
    table = (tmp_path / "compare.md").read_text()
    assert table.count("2 right") == 2
    assert ended.stdout.endswith(f"{table}\n")
    assert "resharder: first new token" in (tmp_path / "compare.svg").read_text()


class Server:
    """Answers like a server; `token` is what its weights say."""

    token = 1

    def stream(self, prompt: list[int], max_tokens: int) -> Iterator[Token]:
        while True:
            time.sleep(0.005)
            yield Token(self.token, 0.0, time.monotonic())

    def generate(self, prompt: list[int], max_tokens: int) -> Answer:
        time.sleep(0.005)
        return Answer((self.token,), (0.0,), "length", None)


class Published(Running):
    """A system whose trainer holds for 50 ms, and whose server says `token` afterwards."""

    def __init__(self, token: int) -> None:
        self.server: Any = Server()
        self._step, self._socket, self._site, self._token = 0, "", Site(), token

    def _ask(self, timeout: float = 0.0, **request: object) -> dict[str, float]:
        now = time.time()
        if request["do"] == "settle":
            return {"transferred": now}
        if request["do"] == "publish":
            time.sleep(0.05)
            self.server.token = self._token
            return {"began": now, "returned": time.time(), "version": 7}
        return {}


def test_a_version_has_its_points_and_one_that_is_not_what_a_fresh_engine_loads_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "AFTER", 0.1)
    monkeypatch.setattr(running, "SETTLED", 0.05)
    monkeypatch.setattr(tensor_hashes, "hashes", lambda socket: [{"weight": "1"}])
    wanted = Wanted([{"weight": "1"}], [5], token=2)
    seen = Published(2).version(1, wanted)
    assert 0.05 <= seen.held <= seen.token
    assert seen.held <= (seen.transferred or 0)
    assert 0 < seen.step <= seen.gap
    assert (seen.verified, seen.ready) == (None, None)
    with pytest.raises(WrongVersion, match=r"1 tensors of version 7 are not those of a fresh engine: \['weight'\]"):
        Published(2).version(1, wanted._replace(hashes=[{"weight": "2"}]))
    with pytest.raises(WrongVersion, match="expected token 2"):
        Published(3).version(1, wanted)
