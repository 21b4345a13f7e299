"""A publisher without a live rank is shown as GONE, and as ACTIVE again when a rank returns."""

import time

import pytest
from resharder.client.operator import Operator
from resharder.client.operator.answers import PublisherStatus

from tests.client.models import connected, publish_all, weights
from tests.support.daemon import Daemon
from tests.support.observing import wait_until

LEASE_SECONDS = 6.0


def state(daemon: Daemon) -> PublisherStatus.State:
    with Operator(daemon.endpoint) as operator:
        (publisher,) = operator.daemon().publishers
        return publisher.state


@pytest.mark.full
def test_a_publisher_whose_ranks_are_gone_is_not_active() -> None:
    with Daemon(lease_seconds=LEASE_SECONDS) as daemon:
        publishers = connected(daemon.endpoint, 1, "first")
        publish_all(publishers, 1, weights(1))[0].wait_ready(60)
        time.sleep(1.5 * LEASE_SECONDS)
        assert state(daemon) == PublisherStatus.State.ACTIVE, "it renews its lease"
        publishers[0].close()
        wait_until(lambda: state(daemon) == PublisherStatus.State.GONE, "its lease ends")
        again = connected(daemon.endpoint, 1, "first")
        publish_all(again, 2, weights(2))[0].wait_ready(60)
        assert state(daemon) == PublisherStatus.State.ACTIVE
        again[0].close()
