"""A read over NIXL between two hosts that fails on the way: what it leaves to the memory that it wrote to."""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.client.direct import nixl_agent

from tests.support.namespaces import Hosts, unavailable
from tests.support.nixl_member import NixlMember
from tests.support.observing import wait_until
from tests.support.remote import Remote

REASON = unavailable() or nixl_agent.unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
SIZE, SECONDS = 10_000_000, 4.0  # bytes that take 1.6 s, and a bound on them


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Hosts, list[Remote]]]:
    environment = {"UCX_TLS": "tcp"}  # UCX would find out that the hosts are one
    with Hosts(2, rate="50mbit") as hosts:
        members = [
            Remote(NixlMember, str(tmp_path / "store"), rank, SIZE, environment=environment, namespace=hosts.namespace(rank))
            for rank in (0, 1)
        ]
        yield hosts, members
        for member in members:
            member.close()


def broken(site: tuple[Hosts, list[Remote]], end: Callable[[], None]) -> tuple[str, float]:
    """Return the worker's error and its seconds after `end`, which is called while the worker reads."""
    hosts, (rank, worker) = site
    before = hosts.sent_bytes(0)
    with ThreadPoolExecutor(2) as threads:
        threads.submit(rank.call, "transfer", SECONDS)
        reads = threads.submit(worker.call, "transfer", SECONDS)
        wait_until(lambda: hosts.sent_bytes(0) > before + SIZE // 8, "the read has begun")
        end()
        began = time.monotonic()
        return str(reads.result()), time.monotonic() - began


@pytest.mark.full
def test_after_an_error_nothing_more_is_written_although_the_network_is_there_again(site: tuple[Hosts, list[Remote]]) -> None:
    hosts, (_, worker) = site
    error, _ = broken(site, lambda: hosts.cut(0, 1))
    assert "did not end in time" in error
    arrived = worker.call("arrived")
    assert arrived < SIZE
    hosts.mend(0, 1)
    time.sleep(3.0)
    assert worker.call("arrived") == arrived


@pytest.mark.full
def test_a_worker_hears_at_once_that_the_rank_is_gone(site: tuple[Hosts, list[Remote]]) -> None:
    error, seconds = broken(site, lambda: site[1][0].send_signal(signal.SIGKILL))
    assert error
    assert "did not end in time" not in error
    assert seconds < SECONDS / 2


@pytest.mark.full
def test_a_rank_hears_soon_that_the_worker_is_gone(site: tuple[Hosts, list[Remote]]) -> None:
    hosts, (rank, worker) = site
    before = hosts.sent_bytes(0)
    with ThreadPoolExecutor(2) as threads:
        sends = threads.submit(rank.call, "transfer", 60.0)
        threads.submit(worker.call, "transfer", 60.0)
        wait_until(lambda: hosts.sent_bytes(0) > before + SIZE // 8, "the read has begun")
        worker.send_signal(signal.SIGKILL)
        began = time.monotonic()
        assert sends.result()
        assert time.monotonic() - began < SECONDS
