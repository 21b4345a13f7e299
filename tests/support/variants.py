"""Cases of a promise. `make test` runs a few that differ most from one another; `make test-all` runs the others too."""

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import pytest


def variants(cases: Mapping[str, Mapping[str, Any]], few: int) -> list[Any]:
    """Parameters: the names of the cases, all but `few` marked `full`.

    Args:
        cases: The settings of each case. One that a case leaves out is a setting too.
        few: How many are kept: one after the other, that which adds most pairs of settings.
    """
    keys = sorted({key for settings in cases.values() for key in settings})
    left = {name: _pairs((key, repr(settings.get(key))) for key in keys) for name, settings in cases.items()}
    kept, covered = set[str](), set[object]()
    for _ in range(min(few, len(cases))):
        best = max(left, key=lambda name: len(left[name] - covered))
        kept.add(best)
        covered |= left.pop(best)
    return sampled(cases, kept)


def sampled(names: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    """Parameters, marked `full` unless they are in `kept`; tuples where there are several."""
    kept = set(kept)
    return [name if name in kept else pytest.param(*_values(name), marks=pytest.mark.full) for name in names]


def _values(parameter: Any) -> tuple[Any, ...]:
    return parameter if isinstance(parameter, tuple) else (parameter,)


def selected(request: pytest.FixtureRequest, argument: str) -> list[Any]:
    """The values of a parameter in the tests of this module that are to run."""
    calls = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [call.params[argument] for call in calls if call is not None and argument in call.params]


def runs_in_full(request: pytest.FixtureRequest) -> bool:
    """Whether tests of this module that are marked `full` are to run."""
    return any(item.get_closest_marker("full") for item in request.session.items if item.path == request.path)


def _pairs(settings: Iterable[object]) -> set[object]:
    return set(combinations(settings, 2))
