"""The calls of vLLM's weight transfer API on a server that follows the daemon: what they accept, wait for and refuse."""

import asyncio
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
from resharder.client.errors import NotServed, UsageError
from resharder.client.inference.control.gate import Gate
from resharder.client.inference.control.weight_update import WeightUpdates
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2

from tests.support.fake_operator import FakeOperator

Fleet, Move, Server, Version = resources_pb2.Fleet, resources_pb2.Move, resources_pb2.Server, resources_pb2.Version
NAME = "models/policy/versions/7"
LATEST = resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.LATEST)


@pytest.fixture
def daemon() -> Iterator[FakeOperator]:
    fleet = Fleet(name="policy", model="policy", target=LATEST, reason="from version 6 to 7, 0 of 1 servers there")
    server = Server(name="servers/a", fleet="policy", model="policy", state=Server.STAGING, version=6, reason="staging version 7")
    with FakeOperator(fleet, servers=[server]) as fake:
        fake.versions = [Version(name=NAME, model="policy", number=7, state=Version.READY, fingerprint="abc")]
        yield fake


def updates(daemon: FakeOperator, gate: Gate | None = None, *, model: str = "policy", timeout: float = 120.0) -> WeightUpdates:
    return WeightUpdates(gate or Gate(), "a", lambda: model, lambda: Operator(daemon.endpoint), timeout=timeout)


def run(call: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await call

    return asyncio.run(main())


def serving(version: int) -> Gate:
    gate = Gate()
    gate.open(version)
    return gate


def test_a_trainer_of_the_servers_model_is_accepted_and_another_one_is_not(daemon: FakeOperator) -> None:
    run(updates(daemon).init({"model": "policy"}))
    with pytest.raises(UsageError, match="this server follows model 'policy', and the trainer publishes model 'x'"):
        run(updates(daemon).init({"model": "x"}))


@pytest.mark.parametrize("info", [{}, {"master_address": "127.0.0.1", "master_port": 1}, [{"model": "policy"}], {"model": 3}])
def test_the_init_info_of_another_backend_is_refused(daemon: FakeOperator, info: Any) -> None:
    with pytest.raises(UsageError, match="init_info"):
        run(updates(daemon).init(info))


@pytest.mark.parametrize(
    "info", [{"names": ["a"]}, {"version": "7", "fingerprint": "abc"}, {"version": True, "fingerprint": "a"}, []]
)
def test_the_update_info_of_another_backend_is_refused(daemon: FakeOperator, info: Any) -> None:
    with pytest.raises(UsageError, match="update_info"):
        run(updates(daemon).update(info))


def test_a_version_that_this_servers_daemon_does_not_have_is_refused_with_both_sides(daemon: FakeOperator) -> None:
    run(updates(daemon).update({"version": 7, "fingerprint": "abc"}))
    with pytest.raises(NotServed, match="with fingerprint xyz, got abc: trainer and server use different daemons"):
        run(updates(daemon).update({"version": 7, "fingerprint": "xyz"}))
    daemon.versions[0].state, daemon.versions[0].reason = Version.ABORTED, "a rank is gone"
    with pytest.raises(NotServed, match=f"{NAME} is not READY: it is ABORTED: a rank is gone"):
        run(updates(daemon).update({"version": 7, "fingerprint": "abc"}))


def test_finish_returns_when_this_server_serves_the_version(daemon: FakeOperator) -> None:
    async def main() -> None:
        gate = serving(6)
        waiting = asyncio.create_task(updates(daemon, gate).finish("7"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        gate.hold("installs")
        await asyncio.sleep(0.1)
        assert not waiting.done()
        gate.open(7)
        assert await asyncio.wait_for(waiting, 60) == 7

    asyncio.run(main())


def test_finish_without_a_label_waits_for_the_version_of_the_last_update(daemon: FakeOperator) -> None:
    async def main() -> None:
        both = updates(daemon, serving(7))
        with pytest.raises(UsageError, match="finish_weight_update was called before update_weights"):
            await both.finish(None)
        await both.update({"version": 7, "fingerprint": "abc"})
        assert await both.finish(None) == 7
        with pytest.raises(UsageError, match="expected the number of a version as weight version, got 'step-3'"):
            await both.finish("step-3")

    asyncio.run(main())


def test_a_newer_version_in_service_ends_the_wait(daemon: FakeOperator) -> None:
    assert run(updates(daemon, serving(8)).finish("7")) == 8


PINNED = resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.NUMBER, version=6)
NONE = resources_pb2.VersionTarget(kind=resources_pb2.VersionTarget.NONE)
OBSTACLES: dict[str, dict[str, Any]] = {
    "fleet policy refuses it: too talkative": {"refused": [resources_pb2.Refusal(version=7, reason="too talkative")]},
    "its install failed: half-way": {"move": Move(id=1, state=Move.DONE, to_version=7, failed={"a": "half-way"})},
    "the update of fleet policy is STOPPED: 1 of 1 failed": {
        "move": Move(id=1, state=Move.STOPPED, to_version=7, reason="1 of 1 failed")
    },
    "the update of fleet policy is FAILED: check": {"move": Move(id=1, state=Move.FAILED, to_version=7, reason="check")},
    "fleet policy is pinned to version 6": {"target": PINNED},
    "fleet policy has no target": {"target": NONE},
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_a_version_that_will_not_be_served_is_one_error_at_once(daemon: FakeOperator, reason: str) -> None:
    daemon.fleet.MergeFrom(Fleet(**{name: value for name, value in OBSTACLES[reason].items() if name != "target"}))
    if "target" in OBSTACLES[reason]:
        daemon.fleet.target.CopyFrom(OBSTACLES[reason]["target"])
    with pytest.raises(NotServed) as error:
        run(updates(daemon, serving(6)).finish("7"))
    assert str(error.value) == f"expected version 7 to be served, got version 6: {reason}"


def test_a_drained_server_is_one_error_at_once(daemon: FakeOperator) -> None:
    daemon.servers[0].drained = True
    with pytest.raises(NotServed, match="got none: servers/a is drained"):
        run(updates(daemon).finish("7"))


def test_a_server_whose_earlier_move_failed_is_waited_for(daemon: FakeOperator) -> None:
    daemon.fleet.move.CopyFrom(Move(id=1, state=Move.FAILED, to_version=6, failed={"a": "half-way"}))
    with pytest.raises(NotServed) as error:
        run(updates(daemon, serving(5), timeout=0.1).finish("7"))
    expected = "expected version 7 to be served within 0.1 s, got version 5: from version 6 to 7, 0 of 1 servers there; "
    assert str(error.value) == expected + "servers/a: staging version 7"


def test_a_daemon_that_has_not_seen_the_server_yet_is_waited_for(daemon: FakeOperator) -> None:
    daemon.servers.clear()
    with pytest.raises(NotServed, match=r"within 0.1 s, got the engine's own weights: .*servers/a"):
        run(updates(daemon, Gate(prefer=True), timeout=0.1).finish("7"))
