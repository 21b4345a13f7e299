"""The plugin's calls in a scheduler process, without a model: who may call, what errors become, and how tokens are labelled."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.inference.control.fence import clock_id
from resharder.client.inference.engine import SleepState
from resharder.client.inference.sglang import scheduler as module
from resharder.client.inference.sglang import spans
from resharder.client.inference.sglang.messages import ResharderReqInput, ResharderReqOutput
from resharder.client.inference.sglang.outputs import new_versions
from resharder.client.inference.sglang.spans import Span, number_of, spans_of
from resharder.client.inference.version_page import VARIABLE, page
from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode


class Agent:
    """The parts of a worker's agent that the calls here use."""

    def __init__(self) -> None:
        self.sleep_state = SleepState()
        self.host = SimpleNamespace(rank=0, device=torch.device("cpu"))
        self.applied: list[str] = []
        self.reported: list[str] = []

    def apply(self, models: Any, install_id: str) -> dict[str, Any]:
        if install_id == "torn":
            raise RuntimeError("the loader raises")
        self.applied.append(install_id)
        page().write(0, 7)
        return {"version": 7}

    def failed(self, install_id: str, error: str) -> None:
        self.reported.append(f"{install_id}: {error}")


class Scheduler:
    """The parts of SGLang's scheduler that the calls here use."""

    def __init__(self) -> None:
        self._engine_paused = False
        self.labels: list[str] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=["waits"])
        self.idle = True
        self.waiting_queue: list[Any] = []
        self.running_batch = self.last_batch = self.chunked_req = None

    def pause_generation(self, request: Any) -> None:
        assert request.mode == "retract"
        self._engine_paused = True

    def continue_generation(self, request: Any) -> None:
        assert not request.torch_empty_cache
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool) -> bool:
        return self.idle and not self.grammar_manager.grammar_queue

    def record_weight_version_change(self, version: str) -> None:
        self.labels.append(version)

    @property
    def label(self) -> int:
        """The version of the next token: SGLang's weight version or, with 0.5.17, which does not note it, the plugin's."""
        return number_of(self.labels[-1]) if self.labels else spans._Noted.version


@pytest.fixture
def rig(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Scheduler, Agent]]:
    agent = Agent()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "page"))
    page.cache_clear()
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_rank=0, tp_size=1))
    monkeypatch.setattr(module, "rank", lambda: 0)
    monkeypatch.setattr(module, "agent_of", lambda scheduler: (agent, {}))
    yield Scheduler(), agent
    page.cache_clear()


def call(scheduler: Scheduler, method: str, *args: Any, token: Any = None) -> Any:
    """A call as it comes over SGLang's socket."""
    sent = ResharderReqInput(method=method, args=json.dumps(args), token=json.dumps(token) if token else "")
    answer = module.handle(scheduler, msgpack_decode(msgpack_encode(sent)))
    received = msgpack_decode(msgpack_encode(answer))
    assert type(received) is ResharderReqOutput
    return json.loads(received.answers)


def test_a_pause_holds_until_an_order_ends_it(rig: tuple[Scheduler, Agent]) -> None:
    scheduler, _ = rig
    assert call(scheduler, "pause")[0]["ok"]
    assert call(scheduler, "state")[0]["paused"]
    assert call(scheduler, "resume", True)[0]["ok"]
    assert call(scheduler, "state")[0]["paused"], "by a program, which goes on by itself"
    assert call(scheduler, "resume", False)[0]["ok"]
    assert not call(scheduler, "state")[0]["paused"]


def test_an_install_labels_the_tokens_that_follow(rig: tuple[Scheduler, Agent]) -> None:
    scheduler, agent = rig
    assert call(scheduler, "state")[0]["ok"]
    assert scheduler.label == 0
    assert call(scheduler, "resharder_apply", "i-1")[0]["version"] == 7
    assert agent.applied == ["i-1"]
    assert scheduler.label == 7


def test_a_loader_that_raises_is_an_answer_and_a_report_and_does_not_end_the_process(rig: tuple[Scheduler, Agent]) -> None:
    scheduler, agent = rig
    (answer,) = call(scheduler, "resharder_apply", "torn")
    assert (answer["ok"], answer["error"]) == (False, "RuntimeError: the loader raises")
    assert agent.reported == ["torn: RuntimeError: the loader raises"]
    (unknown,) = call(scheduler, "no such call")
    assert not unknown["ok"]


def test_requests_that_wait_for_their_grammar_do_not_keep_the_cache(rig: tuple[Scheduler, Agent]) -> None:
    scheduler, _ = rig
    assert call(scheduler, "reset")[0]["reset"]
    assert scheduler.grammar_manager.grammar_queue == ["waits"]
    scheduler.idle = False
    assert not call(scheduler, "reset")[0]["reset"]


def test_only_the_newest_leader_is_obeyed_and_only_while_its_lease_lasts(rig: tuple[Scheduler, Agent]) -> None:
    scheduler, agent = rig
    assert call(scheduler, "resharder_apply", "a", token=[2, None, ""])[0]["ok"]
    refused, reason, term = call(scheduler, "resharder_apply", "b", token=[1, None, ""])
    assert (refused, term) == ("resharder: refused", 2)
    assert "another control side leads" in reason
    _, reason, _ = call(scheduler, "resharder_apply", "c", token=[2, 0.0, clock_id()])
    assert "the lease of the order ended" in reason
    assert agent.applied == ["a"]


def test_spans_are_read_for_the_tokens_that_are_new() -> None:
    found = [Span(3, 0, 4), Span(0, 4, 6), Span(4, 6, 9)]
    assert list(new_versions(found, 0, 9)) == [3, 0, 4]
    assert list(new_versions(found, 4, 6)) == [0]
    assert list(new_versions(found, 7, 9)) == [4]
    assert list(new_versions(found, 9, 9)) == []
    assert [number_of(text) for text in ("12", "none", "default", "")] == [12, 0, 0, 0]


def test_spans_follow_from_the_versions_before_each_change() -> None:
    changes = [(3, 4), (0, 4), (5, 7)]
    assert spans_of(changes, 6, 9) == [Span(3, 0, 4), Span(5, 4, 7), Span(6, 7, 9)]
    assert spans_of(changes, 6, 7) == [Span(3, 0, 4), Span(5, 4, 7)], "no token of the newest yet"
    assert spans_of(changes, 6, 3) == [Span(3, 0, 3)], "an answer that a stop string cut"
    assert spans_of([], 6, 2) == [Span(6, 0, 2)]
