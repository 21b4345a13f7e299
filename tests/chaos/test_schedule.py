"""The schedule is determined by its seed."""

from tests.chaos.faults import Faults
from tests.chaos.operations import Operations
from tests.chaos.schedule import draw


def test_a_seed_has_one_schedule() -> None:
    assert draw("1/0", 300) == draw("1/0", 300)
    assert draw("1/0", 300) != draw("1/1", 300)


def test_every_drawn_action_exists() -> None:
    actions = [action for seed in range(40) for action in draw(str(seed), 120, boots=9)]
    assert len({action.name for action in actions}) == 29
    for action in actions:
        holder, method = (
            (Faults, "_" + action.name.replace(".", "_")) if action.kind == "fault" else (Operations, "_" + action.name)
        )
        assert callable(getattr(holder, method)), action


def test_a_storm_has_a_bound_on_boots() -> None:
    assert max(sum(action.name == "server.kill" for action in draw(str(seed), 300)) for seed in range(20)) == 1
