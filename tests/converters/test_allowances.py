"""RESHARDER_ALLOW: what is refused, allowed, collected and unknown."""

from pathlib import Path

import pytest
from resharder.converters import allowances
from resharder.converters.allowances import REFUSALS, collecting, refuse, unknown_names

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowances, "REFUSALS", {"one": "the first", "other": "the second"})
    monkeypatch.delenv(allowances.VARIABLE, raising=False)


def test_a_refusal_that_is_allowed_is_collected_and_another_one_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allowances.VARIABLE, "other, one,")
    with collecting() as texts:
        refuse("one", ValueError("1.0 and 2.0 differ"))
    assert texts == ["allowed by RESHARDER_ALLOW=one: 1.0 and 2.0 differ"]
    monkeypatch.setenv(allowances.VARIABLE, "other")
    with pytest.raises(ValueError, match="differ"):
        refuse("one", ValueError("1.0 and 2.0 differ"))


@pytest.mark.parametrize(("value", "unknown"), [("", ""), ("one", ""), (" one , other ,", ""), ("one,onee,all", "onee, all")])
def test_names_that_no_refusal_has_are_named(value: str, unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allowances.VARIABLE, value)
    found = unknown_names()
    assert bool(found) == bool(unknown)
    assert unknown in found


def test_the_page_has_every_refusal() -> None:
    text = PAGE.read_text()
    assert not [name for name in REFUSALS if f"| `{name}` |" not in text]
