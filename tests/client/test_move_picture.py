"""The picture of a fleet's move, exactly as `fleet show` prints it."""

from collections.abc import Mapping
from typing import Any

import pytest
from resharder.client.cli.format import move_lines
from resharder.client.operator import answers
from resharder.client.operator.convert import answer as converted
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Install, Move, Server, UpdateStrategy, Worker

CANARY = UpdateStrategy(kind=UpdateStrategy.CANARY, canaries=1, approval=True)
ROLLING = UpdateStrategy(kind=UpdateStrategy.ROLLING, at_a_time=2)


def picture(
    strategy: UpdateStrategy, state: int, admitted: str, servers: list[Server], failed: Mapping[str, str] = {}, width: int = 80
) -> str:
    move = Move(id=5, state=state, from_version=2, to_version=3, strategy=strategy, servers=admitted.split(), failed=failed)
    fleet = resources_pb2.Fleet(name="policy", model="policy", wanted_version=3, settled_version=2, move=move)
    shown = [converted(answers.Server, server) for server in servers]
    return "\n".join(move_lines(converted(answers.Fleet, fleet), shown, width))


def server(name: str, version: int, state: int = Server.SERVING, workers: str = "", **more: Any) -> Server:
    """`workers`: for each worker S, A or another letter: staged, applied or neither, of the install of version 3."""
    states = {"S": Worker.STAGED, "A": Worker.APPLIED}
    found = [Worker(rank=rank, state=states.get(each, Worker.BOOTED), install="7") for rank, each in enumerate(workers)]
    install = Install(id="7", version=3) if workers else None
    return Server(
        name=f"servers/{name}", version=version, state=state, workers=found, world_size=len(found) or 1, install=install, **more
    )


def test_a_canary_is_drawn_from_its_trial_to_the_other_servers() -> None:
    trying = picture(CANARY, Move.TRYING, "left", [server("right", 2), server("left", 2, Server.STAGING, "SB")])
    assert trying == (
        "move 5  2 → 3  TRYING  ██··················  0 of 2 on version 3\n"
        "left   canary  ███·········  2  STAGING\n"
        "right  later   ············  2  SERVING"
    )
    holding = picture(CANARY, Move.HOLDING, "left", [server("left", 3), server("right", 2)])
    assert holding == (
        "move 5  2 → 3  HOLDING  ██████████··········  1 of 2 on version 3\n"
        "left   canary  ████████████  3  SERVING\n"
        "right  later   ············  2  SERVING"
    )
    moving = picture(CANARY, Move.MOVING, "left right", [server("left", 3), server("right", 2, Server.APPLYING, "SS")])
    assert moving == (
        "move 5  2 → 3  MOVING  ███████████████·····  1 of 2 on version 3\n"
        "left   canary  ████████████  3  SERVING\n"
        "right  2       ██████······  2  APPLYING"
    )


def test_a_rolling_move_is_drawn_in_waves_with_the_servers_that_failed() -> None:
    servers = [
        server("a", 3),
        server("b", 2, Server.FAILED, "AF"),
        server("c", 2, Server.APPLYING, "AS"),
        server("d", 2),
        server("e", 0, Server.LOST),
    ]
    assert picture(ROLLING, Move.MOVING, "a b c", servers, {"b": "CHECKSUM: model.norm.weight"}) == (
        "move 5  2 → 3  MOVING  ███████████·········  1 of 4 on version 3\n"
        "a  1      ████████████  3  SERVING\n"
        "b  1      ██████······  2  FAILED, CHECKSUM: model.norm.weight\n"
        "c  2      █████████···  2  APPLYING\n"
        "d  later  ············  2  SERVING\n"
        "e  later  ············  –  LOST"
    )


def test_a_move_that_returns_is_drawn_towards_the_previous_version() -> None:
    assert picture(CANARY, Move.BACK, "left", [server("left", 3), server("right", 2)]) == (
        "move 5  2 → 3  BACK  ██████████··········  1 of 2 on version 2\n"
        "left   canary  ············  3  SERVING\n"
        "right  later   ████████████  2  SERVING"
    )


@pytest.mark.parametrize("strategy", [UpdateStrategy(kind=UpdateStrategy.ALL_AT_ONCE), CANARY, ROLLING], ids=repr)
def test_lines_take_the_width_of_the_terminal_and_no_more(strategy: UpdateStrategy) -> None:
    servers = [server(letter * 64, 123456, Server.FAILED, "SA") for letter in "ab"]
    for width in (80, 140):
        drawn = picture(strategy, Move.STOPPED, "a" * 64, servers, {"a" * 64: "an error that is too long for a line " * 9}, width)
        assert max(map(len, drawn.splitlines())) == width
        assert "aaa…  " in drawn


def test_a_fleet_without_a_move_has_no_picture() -> None:
    assert move_lines(converted(answers.Fleet, resources_pb2.Fleet(name="policy")), [], 80) == []
