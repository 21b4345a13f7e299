"""Command-line options as a fleet's target and update strategy. Pure; raises UsageError for contradictions."""

from dataclasses import dataclass

from resharder.client.errors import UsageError
from resharder.client.operator.answers import StrategyKind, TargetKind, UpdateStrategy, VersionTarget


@dataclass(frozen=True)
class StrategyOptions:
    """Options about the update strategy, as given; None and False if absent."""

    all_at_once: bool = False
    rolling: int | None = None
    canary: int | None = None
    atomic: bool = False
    max_failures: int | None = None
    hold: float | None = None
    approve: bool = False
    check: str = ""


def target_of(text: str, every: float | None = None) -> VersionTarget:
    """Return the target for `latest`, a version's number, or `none`. `every` is the least interval between moves in seconds."""
    if every is not None and text != "latest":
        raise UsageError(f"expected --every with `latest` alone, got it with {text!r}")
    if text.isdigit() and int(text):
        return VersionTarget(TargetKind.NUMBER, int(text))
    kinds = {"latest": TargetKind.LATEST, "none": TargetKind.NONE}
    if text not in kinds:
        raise UsageError(f"expected `latest`, a version's number or `none`, got {text!r}")
    return VersionTarget(kinds[text], every_seconds=every or 0.0)


def strategy_of(options: StrategyOptions) -> UpdateStrategy | None:
    """Return the update strategy; None without an option about it."""
    o = options
    ways = [o.all_at_once, o.rolling is not None or o.canary is not None, o.atomic]
    if sum(ways) > 1:
        raise UsageError(
            "expected one of --all-at-once, --rolling N, --canary K and --atomic (--canary K --rolling N go together)"
        )
    if o.canary is None and (o.hold is not None or o.approve or o.check):
        raise UsageError("expected --hold, --approve and --check with --canary K: they say when the rest follows it")
    if o.max_failures is not None and not ways[1]:
        raise UsageError("expected --max-failures with --rolling N or --canary K")
    if not any(ways):
        return None
    if o.canary is not None:
        return UpdateStrategy(
            StrategyKind.CANARY, canaries=o.canary, at_a_time=o.rolling or 0, max_failures=o.max_failures or 0,
            hold_seconds=o.hold or 0, approval=o.approve, check=o.check,
        )  # fmt: skip
    if o.rolling is not None:
        return UpdateStrategy(StrategyKind.ROLLING, at_a_time=o.rolling, max_failures=o.max_failures or 0)
    return UpdateStrategy(StrategyKind.ATOMIC if o.atomic else StrategyKind.ALL_AT_ONCE)
