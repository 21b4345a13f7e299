"""Files that a rank has written are closed on a thread, in order, whether or not the daemon hears of it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.file_releases import FileReleases
from resharder.v1 import resources_pb2

VERSION = resources_pb2.Version(name="models/policy/versions/3", epoch=2)


@pytest.fixture
def channel() -> Iterator[Channel]:
    """Nothing listens there."""
    with Channel("127.0.0.1:1") as made:
        yield made


def released(channel: Channel, names: list[str]) -> list[str]:
    """Return the files in the order in which they were closed."""
    closed: list[str] = []
    with FileReleases(channel, VERSION, 1) as releases:
        for name in names:
            releases.release(name, partial(closed.append, name))
    releases._thread.shutdown(wait=True)
    return closed


def test_each_file_is_closed_before_it_is_reported(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(channel, "call", lambda method, request, **named: reported.append(request))
    assert released(channel, ["a", "b"]) == ["a", "b"]
    assert [(r.version, r.epoch, r.rank, list(r.files)) for r in reported] == [(VERSION.name, 2, 1, [f]) for f in ("a", "b")]


def test_files_are_closed_also_if_the_daemon_does_not_answer_and_it_is_asked_once(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, call = list[Any](), channel.call
    monkeypatch.setattr(channel, "call", lambda method, request, **named: (asked.append(request), call(method, request, **named)))
    assert released(channel, ["a", "b", "c"]) == ["a", "b", "c"]
    assert len(asked) == 1
