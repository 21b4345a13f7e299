"""Answers that were not compared are not passed over."""

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos.history import History
from tests.chaos.model import check
from tests.chaos.run import EXPECTED
from tests.chaos.traffic import Traffic


def test_a_run_whose_answers_are_not_all_compared_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history, may_end = History(tmp_path / "history.jsonl"), Event()
    system: Any = SimpleNamespace(adapter=None, servers={}, keepers={}, steps={})
    traffic = Traffic(system, history)

    def give_up(timeout: float) -> bool:
        may_end.set()
        return False

    monkeypatch.setattr(traffic, "_record", lambda *one: may_end.wait())
    monkeypatch.setattr(traffic, "drain", give_up)
    traffic.open()
    for answer in range(3):
        traffic._queue.put(("short", 0.0, 1.0, answer))  # type: ignore[arg-type]
    traffic.close()
    history.close()
    assert any("answers were not compared" in str(violation) for violation in check(history.events, EXPECTED))
