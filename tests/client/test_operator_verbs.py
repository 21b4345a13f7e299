"""The verbs of `Operator` are the command's, and each sends one request."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from resharder.client import NotFound, Operator, Power, UsageError, WaitTimeout
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.fake_operator import FakeOperator

Fleet, Move, VersionTarget = resources_pb2.Fleet, resources_pb2.Move, resources_pb2.VersionTarget


@pytest.fixture
def fake() -> Iterator[FakeOperator]:
    fleet = Fleet(
        name="policy", model="policy", settled_version=3, target=VersionTarget(kind=VersionTarget.LATEST, every_seconds=9)
    )
    server = resources_pb2.Server(name="servers/a", fleet="policy", state=resources_pb2.Server.SERVING, version=3)
    with FakeOperator(fleet, servers=[server]) as running:
        yield running


@pytest.fixture
def operator(fake: FakeOperator) -> Iterator[Operator]:
    with Operator(fake.endpoint) as operator:
        yield operator


@pytest.mark.parametrize(
    ("call", "sent"),
    [
        (lambda o: o.sleep("policy"), {"power": resources_pb2.ASLEEP_1, "server": ""}),
        (lambda o: o.sleep("policy", "a", level=2), {"power": resources_pb2.ASLEEP_2, "server": "servers/a"}),
        (lambda o: o.wake("policy"), {"power": resources_pb2.AWAKE}),
        (lambda o: o.wake("policy", tag="weights"), {"power": resources_pb2.WEIGHTS_AWAKE}),
        (lambda o: o.drain("policy", "a"), {"drained": True, "server": "servers/a"}),
        (lambda o: o.resume("policy"), {"drained": False, "server": ""}),
        (lambda o: o.rollback("policy", 2, reason="worse"), {"version": 2, "reason": "worse"}),
        (lambda o: o.rollback(), {"version": 0, "fleet": "policy"}),
        (lambda o: o.gc([1, 2], dry_run=True), {"model": "policy", "versions": [1, 2], "keep": 0, "dry_run": True}),
    ],
)
def test_a_verb_sends_its_request(
    fake: FakeOperator, operator: Operator, call: Callable[[Operator], object], sent: dict[str, Any]
) -> None:
    call(operator)
    assert {name: getattr(fake.asked[-1], name) for name in sent} == sent


def test_update_and_pin_name_a_version_by_its_number(fake: FakeOperator, operator: Operator) -> None:
    def target() -> resources_pb2.VersionTarget:
        request = fake.asked[-1]
        assert isinstance(request, operator_pb2.UpdateFleetRequest)
        assert request.update_mask.paths == ["target"]
        return request.fleet.target

    operator.update()
    assert target() == VersionTarget(kind=VersionTarget.LATEST, every_seconds=9), "the pace stays"
    operator.update("policy", 5)
    assert target() == VersionTarget(kind=VersionTarget.NUMBER, version=5)
    operator.pin("policy")
    assert target() == VersionTarget(kind=VersionTarget.NUMBER, version=3), "the version that it serves"
    fake.fleet.settled_version = 0
    with pytest.raises(UsageError, match="serves no version yet"):
        operator.pin("policy")


def test_approve_and_back_decide_the_current_move(fake: FakeOperator, operator: Operator) -> None:
    with pytest.raises(NotFound, match="has made no move yet"):
        operator.approve("policy")
    fake.fleet.move.CopyFrom(Move(id=7, state=Move.HOLDING))
    operator.approve("policy", reason="good")
    assert fake.asked[-1] == operator_pb2.DecideMoveRequest(fleet="policy", move=7, go_on=True, reason="good")
    operator.back("policy", move=6)
    assert fake.asked[-1] == operator_pb2.DecideMoveRequest(fleet="policy", move=6, go_on=False)


def test_a_wait_without_a_timeout_has_no_bound_and_with_0_looks_once(fake: FakeOperator, operator: Operator) -> None:
    with pytest.raises(WaitTimeout, match="its servers are not ASLEEP_2 after 0 s"):
        operator.wait_power("policy", Power.ASLEEP_2, timeout=0)

    def asleep() -> None:
        fake.servers[0].power = resources_pb2.ASLEEP_2

    fake.later(lambda: None, lambda: None, asleep)
    assert operator.wait_power("policy", Power.ASLEEP_2).name == "policy"


def test_a_sleep_level_that_vllm_lacks_is_a_usage_error(operator: Operator) -> None:
    with pytest.raises(UsageError, match="expected sleep level 1 or 2, got 3"):
        operator.sleep("policy", level=3)
