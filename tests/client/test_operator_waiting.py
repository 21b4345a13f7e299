"""When a command on a fleet has come to its end."""

from dataclasses import replace

import pytest
from resharder.client.operator import answers, waiting
from resharder.client.operator.convert import answer
from resharder.v1 import resources_pb2

Fleet, Move, Server = resources_pb2.Fleet, resources_pb2.Move, resources_pb2.Server


def fleet(move: int, state: int, *, wanted: int = 2, settled: int = 1, failed: dict[str, str] | None = None) -> answers.Fleet:
    moves = Move(id=move, state=state, from_version=1, to_version=2, failed=failed)
    return answer(answers.Fleet, Fleet(name="f", wanted_version=wanted, settled_version=settled, move=moves))


def server(version: int, state: int = Server.SERVING, name: str = "servers/a", **fields: object) -> answers.Server:
    return answer(answers.Server, Server(name=name, state=state, version=version, **fields))


def test_a_move_has_ended_when_it_is_done_and_every_server_in_service_is_there() -> None:
    ended = waiting.moved(fleet(1, Move.MOVING))
    assert not ended(fleet(1, Move.MOVING), [server(1)])
    assert not ended(fleet(1, Move.DONE, settled=2), [server(1)])
    assert not ended(fleet(1, Move.DONE, settled=2), [server(2, Server.APPLYING)])
    away = [server(1, state) for state in (Server.LOST, Server.ASLEEP, Server.DRAINED)]
    assert ended(fleet(1, Move.DONE, settled=2), [server(2), *away])


@pytest.mark.parametrize("state", [Move.FAILED, Move.STOPPED])
def test_a_move_that_went_wrong_has_ended_and_is_told_from_one_before(state: int) -> None:
    began, now = fleet(2, Move.MOVING), fleet(2, state, wanted=1)
    assert waiting.moved(began)(now, [server(1)])
    assert not waiting.went_well(began, now)
    before = fleet(2, state, wanted=3)
    assert not waiting.moved(before)(fleet(2, state, wanted=3), [server(1)]), "what ended before the command is not its end"
    assert not waiting.moved(before)(fleet(3, Move.MOVING, wanted=3), [server(1)])
    assert not waiting.went_well(before, fleet(3, state, wanted=3))


def test_a_command_does_not_wait_for_a_move_to_its_target_that_has_stopped() -> None:
    stopped, failed = fleet(2, Move.STOPPED), fleet(2, Move.FAILED)
    assert waiting.moved(stopped)(stopped, [server(1)])
    assert not waiting.went_well(stopped, stopped)
    assert not waiting.moved(failed)(failed, [server(1)]), "it is tried again"


def test_servers_that_failed_are_not_waited_for_but_it_did_not_go_well() -> None:
    began, now = fleet(1, Move.MOVING), fleet(1, Move.DONE, settled=2, failed={"b": "no room"})
    assert waiting.moved(began)(now, [server(2), server(1, name="servers/b")])
    assert not waiting.went_well(began, now)
    assert not waiting.moved(now)(now, [server(2), server(1, name="servers/b")]), "asked again, they try again"


def test_a_fleet_that_is_there_already_or_has_nothing_to_want_is_not_waited_for() -> None:
    there = fleet(1, Move.DONE, settled=2)
    assert waiting.moved(there)(there, [server(2)])
    assert waiting.went_well(there, there)
    nothing = answer(answers.Fleet, Fleet(name="f"))
    assert waiting.moved(nothing)(nothing, [server(0, Server.BOOTING)])


def test_no_wait_for_all_servers_ends_while_a_restarted_daemon_awaits_one() -> None:
    back = server(2, power=resources_pb2.AWAKE)
    there = replace(fleet(1, Move.DONE, settled=2), returning=("servers/b",))
    conditions = waiting.moved(fleet(1, Move.MOVING)), waiting.powered(answers.Power.AWAKE), waiting.drained(), waiting.serving()
    assert [condition(there, [back]) for condition in conditions] == [False] * 4
    assert [condition(replace(there, returning=()), [back]) for condition in conditions] == [True] * 4
    assert waiting.powered(answers.Power.AWAKE, "servers/a")(there, [back])
    assert not waiting.powered(answers.Power.AWAKE, "servers/b")(there, [back])


def test_awake_means_serving_and_drained_means_that_the_last_answer_is_given() -> None:
    none = answer(answers.Fleet, Fleet())
    awake = waiting.powered(answers.Power.AWAKE)
    assert not awake(none, [server(1, power=resources_pb2.ASLEEP_2)])
    assert not awake(none, [server(1, Server.APPLYING, power=resources_pb2.AWAKE)])
    assert awake(none, [server(1, power=resources_pb2.AWAKE), server(1, Server.LOST)])
    busy = server(1, Server.DRAINED, drained=True, in_flight=3)
    other = server(1, name="servers/b")
    assert not waiting.drained()(none, [busy])
    assert not waiting.drained("servers/b")(none, [other]), "its own gate is open still"
    busy = replace(busy, in_flight=0)
    assert waiting.drained()(none, [busy, other])
    assert not waiting.serving()(none, [busy, other])
    assert waiting.serving("servers/b")(none, [busy, other])
