"""`benchmarks.compare` on CPUs: a small model, Resharder, and vLLM's reload from a folder."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from resharder.converters.architectures.checkpoint import expected_shapes

from benchmarks.compare import POINTS, Comparison, Result, bars, markdown
from benchmarks.direct_layouts import DENSE
from benchmarks.systems.base import Setup
from benchmarks.systems.running import Seen, WrongVersion
from benchmarks.systems.vllm_transfer import described_trainer, source_of
from tests.support.tiny_hf import save_tokenizer

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


@pytest.mark.engine
@pytest.mark.full
def test_a_version_that_is_not_what_a_fresh_engine_loads_is_a_failure_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tokenizer(tmp_path, DENSE["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    comparison = Comparison(Setup(DENSE, "tp", str(tmp_path)), ["vllm-reload"], rounds=2, seconds=300)

    def wrong(setup: Setup, vocabulary: int) -> object:
        found = right(setup, vocabulary)
        (held,) = found[1].hashes
        name = next(iter(held))
        return found | {1: found[1]._replace(hashes=[held | {name: "another"}])}

    from benchmarks import compare

    right = compare.wanted
    monkeypatch.setattr(compare, "wanted", wrong)
    comparison.run(in_turn=False)
    result = comparison.results["vllm-reload"]
    assert (result.failed, result.seen) == (True, [])
    assert result.why.startswith(f"{WrongVersion.__name__}: 1 tensors of version 1 are not those of a fresh engine")
    assert "vllm-reload failed" in capsys.readouterr().out
