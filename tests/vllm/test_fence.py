"""The fence in vLLM's own engine core."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.inference.control.fence import FENCED, clock_id
from resharder.client.inference.vllm import engine_core

from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_engine import Engine

pytestmark = pytest.mark.compat("fence")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder, config = tmp_path_factory.mktemp("model"), tiny_config("qwen3")
    save_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    with Engine(folder, load_format="dummy", environment={"RESHARDER_ENDPOINT": "127.0.0.1:1"}) as running:
        yield running


def ask(engine: Engine, term: int, method: str, *args: Any, left: float | None = 60.0) -> Any:
    """As a side of that term asks whose lease ends in `left` seconds."""
    until = None if left is None else time.monotonic() + left
    return engine.core(FENCED, [term, until, clock_id()], method, list(args))


def test_the_engine_core_obeys_the_newest_term_on_a_living_lease_alone(engine: Engine) -> None:
    assert ask(engine, 1, "is_scheduler_paused") is False
    ask(engine, 1, "pause_scheduler", "keep", False)
    assert ask(engine, 1, "is_scheduler_paused") is True

    marker, reason, term = ask(engine, 1, "resume_scheduler", left=-0.5)
    assert (marker, term) == ("resharder: refused", 1)
    assert reason.startswith("the lease of the order ended 0.5")
    assert engine.core("is_scheduler_paused") is True

    (described,) = ask(engine, 2, "collective_rpc", "resharder_describe", None, [], None, left=None)
    assert described["ok"]
    expected = "expected an order of term 2 or later, got one of term 1: another control side leads"
    for method, *args in (
        ("resume_scheduler",),
        ("pause_scheduler", "keep", False),
        ("sleep", 1, "keep"),
        ("wake_up", ["weights"]),
        ("collective_rpc", "resharder_apply", None, ["i1"], None),
    ):
        assert ask(engine, 1, method, *args) == ["resharder: refused", expected, 2], method
    assert engine.core("is_scheduler_paused") is True
    assert engine.one("resharder_describe") == described, "the workers were not asked either"

    assert ask(engine, 2, "resume_scheduler") is None
    assert engine.core("is_scheduler_paused") is False
    assert len(engine.logprobs([5, 17, 42], 4)) == 4


def test_no_other_caller_ends_the_pause_of_an_order(engine: Engine) -> None:
    """A side that does not lead has no record of the order; its `/resume` reaches the engine core."""
    term = ask(engine, 10, "collective_rpc", "resharder_describe", None, [], None, left=None) and 10
    ask(engine, term, "pause_scheduler", "keep", False)
    engine.core("resharder_resume")
    assert engine.core("is_scheduler_paused") is True
    ask(engine, term, "resume_scheduler")
    assert engine.core("is_scheduler_paused") is False
    engine.core("pause_scheduler", "keep", False)
    engine.core("resharder_resume")
    assert engine.core("is_scheduler_paused") is False, "its own pause it ends"


def test_no_other_caller_ends_the_pause_of_an_order_by_a_wake_up(engine: Engine) -> None:
    """vLLM's own `wake_up` resumes the scheduler, also of an engine that is awake."""
    for tags in ([], [["scheduling"]]):
        ask(engine, 20, "pause_scheduler", "keep", False)
        engine.core("wake_up", *tags)
        assert engine.core("is_scheduler_paused") is True, tags
        ask(engine, 20, "resume_scheduler")
        assert engine.core("is_scheduler_paused") is False
    engine.core("pause_scheduler", "keep", False)
    engine.core("wake_up")
    assert engine.core("is_scheduler_paused") is False, "its own pause it ends"


def test_a_wake_up_by_another_caller_resumes_what_an_order_put_to_sleep(engine: Engine) -> None:
    ask(engine, 30, "pause_scheduler", "keep", False)
    ask(engine, 30, "sleep", 1, "keep")
    engine.core("wake_up")
    assert engine.core("is_scheduler_paused") is False
    engine.core("pause_scheduler", "keep", False)
    engine.core("resharder_resume")
    assert engine.core("is_scheduler_paused") is False, "no order's pause is left behind"


def test_calls_without_a_token_pass(engine: Engine) -> None:
    engine.core("pause_scheduler", "keep", False)
    engine.core("resume_scheduler")
    assert engine.core("is_scheduler_paused") is False


@pytest.mark.parametrize("refusals", [("", ""), ("its lease has ended", ""), ("", "its lease has ended")])
def test_engine_cores_that_wait_for_each_other_refuse_together(refusals: tuple[str, str], tmp_path: Path) -> None:
    """In two threads, with a real process group."""
    pytest.importorskip("vllm.config", reason="the cores' agreement is vLLM's")
    from datetime import timedelta

    from torch.distributed import FileStore, ProcessGroupGloo

    def agreed(rank: int) -> str:
        group = ProcessGroupGloo(FileStore(str(tmp_path / "store"), 2), rank, 2, timedelta(seconds=60))
        return engine_core._agreed(SimpleNamespace(dp_group=group, engines_running=False), refusals[rank])

    with ThreadPoolExecutor(2) as pool:
        found = tuple(pool.map(agreed, range(2)))
    assert [bool(one) for one in found] == [any(refusals)] * 2
    assert all(own in one for own, one in zip(refusals, found, strict=True))
    running = SimpleNamespace(dp_group=None, engines_running=True)
    assert engine_core._agreed(running, refusals[0]) == refusals[0]
