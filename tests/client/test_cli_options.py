"""Options of the command become a VersionTarget and an UpdateStrategy, or one clear error."""

from typing import Any

import pytest
from resharder.client.cli import format
from resharder.client.cli.fleets import strategy_of, target_of
from resharder.client.errors import UsageError
from resharder.client.operator.answers import UpdateStrategy, VersionTarget


@pytest.mark.parametrize(
    ("text", "every", "target", "formatted"),
    [
        ("latest", None, VersionTarget(VersionTarget.Kind.LATEST), "latest"),
        ("latest", 60.0, VersionTarget(VersionTarget.Kind.LATEST, every_seconds=60), "latest, one move in 60 s"),
        ("12", None, VersionTarget(VersionTarget.Kind.NUMBER, version=12), "version 12"),
        ("none", None, VersionTarget(VersionTarget.Kind.NONE), "none"),
    ],
)
def test_a_target_is_parsed_and_formatted(text: str, every: float | None, target: VersionTarget, formatted: str) -> None:
    assert target_of(text, every) == target
    assert format.target(target) == formatted


@pytest.mark.parametrize(
    ("options", "strategy", "formatted"),
    [
        ({}, None, ""),
        ({"all_at_once": True}, UpdateStrategy(UpdateStrategy.Kind.ALL_AT_ONCE), "all at once"),
        ({"atomic": True}, UpdateStrategy(UpdateStrategy.Kind.ATOMIC), "atomically"),
        (
            {"rolling": 2, "max_failures": 3},
            UpdateStrategy(UpdateStrategy.Kind.ROLLING, at_a_time=2, max_failures=3),
            "2 at a time, stops after 3 failures",
        ),
        (
            {"canary": 1, "rolling": 4, "hold": 30, "approve": True, "check": "smoke"},
            UpdateStrategy(UpdateStrategy.Kind.CANARY, canaries=1, at_a_time=4, hold_seconds=30, approval=True, check="smoke"),
            "1 server first, held for 30 s and approval and check smoke, then 4 at a time, stops after 1 failure",
        ),
    ],
)
def test_a_strategy_is_parsed_and_formatted(options: dict[str, Any], strategy: UpdateStrategy | None, formatted: str) -> None:
    assert strategy_of(**options) == strategy
    assert strategy is None or format.strategy(strategy) == formatted


@pytest.mark.parametrize("text", ["newest", "0", "-1", "1.5", ""])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected `latest`, a version's number or `none`"):
        target_of(text)


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(UsageError, match="--every needs the target `latest`, not '3'"):
        target_of("3", 60)
    several: list[dict[str, Any]] = [{"all_at_once": True, "rolling": 1}, {"atomic": True, "canary": 1}]
    for ways in several:
        with pytest.raises(UsageError, match="pass only one of --all-at-once"):
            strategy_of(**ways)
    with pytest.raises(UsageError, match="pass --canary K too"):
        strategy_of(rolling=1, approve=True)
    with pytest.raises(UsageError, match="--max-failures needs"):
        strategy_of(all_at_once=True, max_failures=2)
