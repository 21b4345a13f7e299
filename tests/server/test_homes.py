"""Ranks hand over to the node of their host, with two replicas: real processes, which read no other host's folder."""

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from resharder.converters.storage.files import read_layout
from resharder.v1 import resources_pb2

from tests.support.home_site import SPLIT, Site
from tests.support.namespaces import unavailable
from tests.support.node import nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.variants import sampled

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
ABORTED = resources_pb2.Version.ABORTED
ARRIVED = {"verified": True, "transport": "node", "reason": ""}
STEPS = itertools.count(10)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack, replicas=2)


def files_of(site: Site, host: str, version: resources_pb2.Version) -> dict[str, bytes]:
    """The files on a node into which its ranks have written."""
    own = {file.path for file in read_layout(site.daemon.store / f"models/policy/versions/{version.number:08}")
           if any(name.startswith(f"{host}.") for name in file.by_name)}  # fmt: skip
    return {name: content for name, content in site.nodes[host].files(version.name).items() if name in own}


def received(site: Site) -> dict[str, int]:
    """The bytes that each node has received."""
    return {name: node.received_daemon_bytes + node.received_peer_bytes for name, node in nodes(site.daemon).items()}


def test_ranks_write_into_the_files_of_their_hosts_node_which_holds_them_from_ready_on(site: Site) -> None:
    site.attach("first")
    before = received(site)
    for step in (1, 2, 3):
        version, found = site.publish(step, once=step == 2)
        assert [transport for _, transport, _ in found] == ["node"] * 4, found
        site.check(version)
    whole = stored_files(site.daemon, version.name)
    for host in "ab":
        wait_until(
            lambda host=host: version.name in {c.version for c in nodes(site.daemon)[f"nodes/{host}"].copies if c.held_pieces}
        )
        held = files_of(site, host, version)
        assert held
        assert held == {name: whole[name] for name in held}
    fetched = sum(received(site).values()) - sum(before.values())
    assert fetched == 3 * SPLIT[0] * SPLIT[1], "nothing but the half of `split` that the other host's rank has written"


def test_a_hosts_worker_maps_what_its_ranks_have_written_and_fetches_the_rest(site: Site) -> None:
    site.attach("second")
    version, _ = site.publish(1)
    before = received(site)["nodes/a"]
    assert site.ranks["a"].call("stage", site.daemon.endpoint, version.name) == ARRIVED
    own = sum(len(content) for content in files_of(site, "a", version).values())
    assert received(site)["nodes/a"] - before <= version.size_bytes - own + (1 << 20)
    assert site.nodes["a"].files(version.name) == stored_files(site.daemon, version.name)


def test_wrong_bytes_in_a_nodes_file_abort_the_version(site: Site) -> None:
    site.attach("third")
    site.publish(1)
    assert "b.up" in site.publish_wrongly(2).reason
    version, found = site.publish(2)
    site.check(version)
    assert found[3][1] == "node"


@pytest.mark.full
@pytest.mark.parametrize("point", sampled(["node.verify", "node.adopt", "while-writing"], ["while-writing"]))
def test_the_death_of_a_home_costs_one_version_at_most(site: Site, point: str) -> None:
    """Before READY the version is aborted with the reason; ranks then send to the daemon until they have read the new nonce."""
    node = site.nodes["b"]
    node.stop()
    node.start(failpoint=f"{point}=kill" if point != "while-writing" else "")
    wait_live(site.daemon, "b")
    site.attach(f"dies in {point}")
    version = site.begin_and_kill(1) if point == "while-writing" else site.publish(1)[0]
    lost = ("nodes/b, into whose files ranks wrote, ", "nodes/a: nodes/b does not deliver boxes: ", "nodes/b: model-")
    assert (version.state, any(why in version.reason for why in lost)) == (ABORTED, True), version.reason
    if point != "while-writing":
        node.wait()
    wait_until(lambda: nodes(site.daemon)["nodes/b"].state == resources_pb2.Node.LOST)
    for step in (2, 3):
        version, found = site.publish(step)
        site.check(version)
        assert [transport for _, transport, _ in found] == ["node", "node", "http", "http"]
    node.start()
    wait_live(site.daemon, "b")
    wait_until(lambda: [transport for _, transport, _ in site.publish(next(STEPS))[1]] == ["node"] * 4)


@pytest.mark.full
@pytest.mark.parametrize("ends", sampled(["killed", "stopped"], ["killed"]))
def test_a_node_that_was_gone_before_a_restart_of_the_daemon_delays_no_rank(site: Site, ends: str) -> None:
    site.attach(f"after a node was {ends}")
    site.check(site.publish(1)[0])
    site.nodes["b"].kill() if ends == "killed" else site.nodes["b"].stop()
    wait_until(lambda: "nodes/b" not in (found := nodes(site.daemon)) or found["nodes/b"].state == resources_pb2.Node.LOST)
    site.daemon.stop()
    site.daemon.start()
    began = time.monotonic()
    with site.waiting_for_nodes(300):
        version, used = site.publish(2)
    assert time.monotonic() - began < 200, "ranks waited for a node that will not report"
    assert [transport for _, transport, _ in used] == ["node", "node", "http", "http"]
    site.check(version)
    site.nodes["b"].start()
    wait_live(site.daemon, "b")
    site.daemon.kill()
    site.daemon.start()
    with site.waiting_for_nodes(300):
        version, used = site.publish(3)
    assert [transport for _, transport, _ in used] == ["node"] * 4, "a node that has come back is waited for"
    site.check(version)


def test_ranks_are_at_home_again_after_a_restart_of_the_daemon_that_a_node_notices_late(site: Site) -> None:
    site.attach("outlives the daemon")
    assert [transport for _, transport, _ in site.publish(1)[1]] == ["node"] * 4
    site.nodes["b"].send_signal(signal.SIGSTOP)
    site.daemon.kill()
    site.daemon.start()
    later = threading.Timer(4.0, site.nodes["b"].send_signal, [signal.SIGCONT])  # after ranks register: a third of a lease
    later.start()
    with site.waiting_for_nodes(300):
        version, found = site.publish(2)
    later.join()
    site.check(version)
    assert [transport for _, transport, _ in found] == ["node"] * 4, found
