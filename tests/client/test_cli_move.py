"""`fleet show` draws a move in progress, and `--watch` follows it."""

import signal
import subprocess
from collections.abc import Iterator

import pytest
from resharder.v1 import resources_pb2
from resharder.v1.resources_pb2 import Move, Server, UpdateStrategy

from tests.support.command import resharder, running
from tests.support.fake_operator import FakeOperator

HOLDING = """
move 5  2 → 3  HOLDING  ██████████··········  1 of 2 on version 3
left   canary  ████████████  3  SERVING
right  later   ············  2  SERVING
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOperator]:
    """A fleet whose canary serves version 3."""
    strategy = UpdateStrategy(kind=UpdateStrategy.CANARY, canaries=1, approval=True)
    move = Move(id=5, state=Move.HOLDING, from_version=2, to_version=3, strategy=strategy, servers=["left"])
    fleet = resources_pb2.Fleet(name="policy", model="policy", wanted_version=3, settled_version=2, move=move)
    servers = [Server(name=f"servers/{id}", fleet="policy", state=Server.SERVING, version=2) for id in ("right", "left")]
    servers[1].version = 3
    with FakeOperator(fleet, servers=servers) as running:
        monkeypatch.setenv("RESHARDER_ENDPOINT", running.endpoint)
        yield running


def end(fake: FakeOperator) -> None:
    fake.fleet.move.state = Move.DONE
    fake.servers[0].version = 3


def test_a_move_in_progress_is_drawn_between_the_facts_and_the_servers(fake: FakeOperator) -> None:
    assert f"\n{HOLDING}\nserver " in resharder("fleet", "show").out
    end(fake)
    assert "█" not in resharder("fleet", "show").out


def test_watch_draws_each_change_until_ctrl_c(fake: FakeOperator) -> None:
    fake.later(lambda: None, lambda: None, lambda: end(fake))
    arguments = ["fleet", "show", "--watch", "--endpoint", fake.endpoint]
    with running(arguments, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        seen = ""
        for line in watching.stdout:
            seen += line
            if seen.count("right ") == 2:
                break
        assert HOLDING in seen
        assert "move 5  2 → 3  DONE  ████████████████████  2 of 2 on version 3\n" in seen
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
