"""A daemon that takes its time to answer a new connection: on a stalled host, or at the far end of a long way."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from resharder.client import Operator

from tests.client.proxy import Proxy
from tests.support.daemon import Daemon

SECONDS = 3.0  # longer than any pause between attempts


class Slow(Proxy):
    """The daemon's first bytes on each connection come after SECONDS."""

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        if not counted:
            time.sleep(SECONDS)
        super()._pump(source, target, counted)


@contextmanager
def slow(daemon: Daemon) -> Iterator[str]:
    proxy = Slow(daemon.endpoint)
    try:
        yield proxy.endpoint
    finally:
        proxy.close()


def test_a_daemon_that_is_slow_to_answer_is_waited_for() -> None:
    with Daemon() as daemon, slow(daemon) as endpoint, Operator(endpoint, connect_timeout=60, timeout=60) as operator:
        assert operator.daemon().release
