"""Members of a group that is over hear of it from the daemon, not by waiting for each other."""

import threading

from resharder.client.direct.links import until_over
from resharder.client.rpc.channel import Channel

from tests.support.daemon import Daemon

LONG = 60.0  # seconds


def test_who_transfers_hears_that_the_group_is_over() -> None:
    with Daemon() as daemon, Channel(daemon.endpoint) as channel:
        reasons, called = list[str](), threading.Event()

        def over(why: str) -> None:
            reasons.append(why)
            called.set()

        with until_over(channel, "g-1", LONG, over):
            assert called.wait(LONG)
        assert "group g-1 is over" in reasons[0]


def test_a_daemon_that_is_away_ends_nothing() -> None:
    reasons, answered = list[str](), threading.Event()
    with Channel("127.0.0.1:1") as channel:
        found = channel.error

        def error(*arguments: object) -> object:
            answered.set()
            return found(*arguments)  # type: ignore[arg-type]

        channel.error = error  # type: ignore[method-assign,assignment]
        with until_over(channel, "g-1", 5.0, reasons.append):
            assert answered.wait(LONG)
    assert not reasons
