"""The setting and the schedule are determined by their seed."""

import sys

import pytest

from tests.chaos.faults import Faults
from tests.chaos.main import main
from tests.chaos.operations import Operations
from tests.chaos.schedule import NODES, THIRD, Setting, draw, setting_of

EVERYTHING = Setting((*NODES, THIRD), 3, True, region=True)


def test_a_seed_has_one_schedule() -> None:
    assert draw("1/0", 300) == draw("1/0", 300)
    assert draw("1/0", 300) != draw("1/1", 300)


@pytest.mark.parametrize(
    ("seed", "replicas", "security", "adapters"),
    [
        (1, 1, False, True),
        (2, 2, False, True),
        (3, 1, True, True),
        (5, 3, False, True),
        (8, 2, False, False),
        (12, 2, True, False),
    ],
)
def test_a_seed_has_one_setting(seed: int, replicas: int, security: bool, adapters: bool) -> None:
    nodes = (*NODES, THIRD) if replicas > 1 else NODES
    assert setting_of(seed) == Setting(nodes, replicas, security, adapters)


def test_replicas_and_security_take_the_place_of_those_of_the_seed() -> None:
    assert setting_of(1, 3) == Setting((*NODES, THIRD), 3, False, True)
    assert setting_of(15, 1, False) == Setting(NODES, 1, False, True)
    assert setting_of(1, security=True) == Setting(NODES, 1, True, True)
    assert setting_of(1, adapters=False) == Setting(NODES, 1, False, False)
    assert setting_of(1, region=True) == Setting(NODES, 1, False, True, region=True)
    assert setting_of(1, adapters=True, sglang=True) == Setting(NODES, 1, False, False, sglang=True)


def test_a_schedule_names_the_setting_on_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--seed", "1", "--replicas", "3", "--security", "--no-adapters", "--region"]
    monkeypatch.setattr(sys, "argv", ["chaos", "--schedule", *given])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "replicas 3, with security, without adapters, nodes node, far, third, a region"
    assert lines[1:] == list(map(str, draw("1/0", 60.0, EVERYTHING)))


def test_every_drawn_action_exists() -> None:
    actions = [action for seed in range(40) for action in draw(str(seed), 120, EVERYTHING, boots=9)]
    assert len({action.name for action in actions}) == 34
    assert {action.given["node"] for action in actions if "node" in action.given} == {*NODES, THIRD}
    assert {action.given["link"] for action in actions if "link" in action.given} == set(EVERYTHING.links)
    for action in actions:
        holder, method = (
            (Faults, "_" + action.name.replace(".", "_")) if action.kind == "fault" else (Operations, "_" + action.name)
        )
        assert callable(getattr(holder, method)), action


def test_without_security_no_certificate_is_renewed_and_no_third_node_has_a_fault() -> None:
    actions = [action for seed in range(40) for action in draw(str(seed), 120, boots=9)]
    assert len({action.name for action in actions}) == 30
    assert not any(THIRD in str(value) for action in actions for value in action.given.values())


def test_a_storm_has_a_bound_on_boots() -> None:
    assert max(sum(action.name == "server.kill" for action in draw(str(seed), 300)) for seed in range(20)) == 1
