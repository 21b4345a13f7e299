"""What a control side and a worker say of how long their parts of an install took."""

from collections.abc import Iterator

import pytest
from resharder.client.inference.control.lease import _outcome_to_proto
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.vllm.host import VLLMHost
from resharder.v1 import resources_pb2
from resharder.v1.server_pb2 import Order

from tests.support.control_side import Side
from tests.support.daemon import Daemon
from tests.support.observing import servers, wait_until
from tests.support.worker_agents import booted, publish

pytestmark = pytest.mark.usefixtures("own_page")
Worker = resources_pb2.Worker


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setattr(VLLMHost, "refusal", lambda host: "")  # the agents here have no vLLM around them
    with Daemon() as running:
        yield running


def phases(outcome: Outcome | None) -> list[str]:
    assert outcome is not None
    return [timing.phase for timing in _outcome_to_proto(outcome).timings]


def test_a_control_side_says_how_long_it_paused_reset_caches_and_resumed() -> None:
    side = Side()
    assert phases(side.do(ControlOrder(Order.APPLY, "i", 2))) == ["pause", "workers", "reset"]
    assert phases(side.do(ControlOrder(Order.RESUME, "i", 2))) == ["resume"]


def test_a_control_side_that_need_not_pause_or_resume_says_nothing_of_it() -> None:
    side = Side()
    assert phases(side.do(ControlOrder(Order.RESUME, "i", 1))) == []


def reported_phases(daemon: Daemon, state: int) -> list[str]:
    """The phases that the daemon knows of the worker, once it is in this state."""

    def now() -> list[Worker]:
        return [worker for server in servers(daemon) for worker in server.workers if worker.state == state]

    wait_until(lambda: bool(now()), f"the worker is {Worker.State.Name(state)}")
    return [timing.phase for timing in now()[0].timings]


def test_a_worker_says_how_long_it_staged_and_applied(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = booted(daemon)
    version = publish(daemon, 2)
    agent.stage({}, "an-install", version)
    assert reported_phases(daemon, Worker.STAGED) == ["stage"]
    monkeypatch.setattr(agent, "_install", lambda *given: None)
    agent.apply({}, "an-install")
    assert reported_phases(daemon, Worker.APPLIED) == ["stage", "apply"]


def test_a_worker_that_fails_says_how_far_it_came(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = booted(daemon)
    agent.stage({}, "an-install", publish(daemon, 2))
    assert reported_phases(daemon, Worker.STAGED) == ["stage"]

    def fail(*given: object) -> None:
        raise ValueError("no such box")

    monkeypatch.setattr(agent, "_install", fail)
    with pytest.raises(ValueError, match="no such box"):
        agent.apply({}, "an-install")
    agent.failed("an-install", "no such box")
    assert reported_phases(daemon, Worker.FAILED) == ["stage", "apply"]
