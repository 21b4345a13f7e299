"""Refusals that RESHARDER_ALLOW allows on trainer ranks, in the record of their versions."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.trainer import publisher
from resharder.client.trainer.connect import connect
from resharder.converters import allowances

from tests.client.models import CONFIG, connected, publish_all, weights
from tests.support.command import answer, resharder
from tests.support.daemon import Daemon

TEXTS = ["allowed by RESHARDER_ALLOW=made-up: 1.0 and 2.0 differ"]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def test_an_allowed_refusal_is_in_the_record_of_each_version_and_survives_restarts(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allowances, "REFUSALS", {"made-up": "a difference"})
    monkeypatch.setenv(allowances.VARIABLE, "made-up")
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)

    def differs(config: object) -> dict[str, tuple[int, ...]]:
        allowances.refuse("made-up", ValueError("1.0 and 2.0 differ"))
        return {}

    monkeypatch.setattr(publisher, "known_shapes", differs)
    publishers = connected(daemon.endpoint, 2, "warned")
    version = publish_all(publishers, 1, weights(1))[0].wait_ready(60)
    assert answer("versions")["versions"][0]["warnings"] == TEXTS
    monkeypatch.setenv("COLUMNS", "300")
    assert TEXTS[0] in resharder("versions", "--wide").out
    (manifest,) = Path(daemon.folder).rglob("resharder.json")
    assert json.loads(manifest.read_text())["version"]["warnings"] == TEXTS
    daemon.kill()
    daemon.start()
    with Operator(daemon.endpoint) as operator:
        assert list(operator.versions()[0].warnings) == TEXTS
    again = publish_all(publishers, 2, weights(2))[0]  # by ranks that register again
    again.wait_ready(60)
    assert [v["warnings"] for v in answer("versions")["versions"]] == [TEXTS, TEXTS], version


def test_an_unknown_name_is_refused_at_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(allowances.VARIABLE, "no-such-refusal")
    with pytest.raises(UsageError, match="RESHARDER_ALLOW: no refusal is called no-such-refusal"):
        connect("127.0.0.1:1", model="policy", job="job", rank=0, world_size=1, config=CONFIG)
