"""With one replica, the default, a version is READY once nodes have verified it; the daemon copies it afterwards."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from resharder.client.operator import Operator
from resharder.converters.storage.files import read_layout
from resharder.v1 import resources_pb2

from tests.support.home_rank import change_byte
from tests.support.home_site import Site
from tests.support.namespaces import unavailable
from tests.support.node import nodes, stored_files, wait_live
from tests.support.observing import wait_until

REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
READY, RETIRED = resources_pb2.Version.READY, resources_pb2.Version.RETIRED


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(stack)


def is_whole(site: Site, name: str) -> bool:
    """Whether the daemon has a copy of all pieces, verified."""
    folder = site.daemon.store / f"models/policy/versions/{int(name.rpartition('/')[2]):08}"
    return not (folder / "held").exists() and not (folder / "pieces.json").exists()


def lacked(site: Site, name: str) -> bool:
    """Whether the version was READY before the daemon had its copy."""
    return any("version_lacks_pieces" in line and name in line for line in site.daemon.log.read_text().splitlines())


def verified_early(site: Site, host: str) -> int:
    """How often a node has begun to verify files before the last seal."""
    return site.nodes[host].log.read_text().count("verifying_closed_files")


def copies(site: Site, host: str, name: str) -> list[resources_pb2.NodeCopy]:
    """Copies of a version that a node reports."""
    return [copy for copy in nodes(site.daemon)[f"nodes/{host}"].copies if copy.version == name]


def test_the_daemon_copies_from_the_nodes_after_ready(site: Site) -> None:
    site.attach("first")
    for step in (1, 2, 3):
        version, found = site.publish(step)
        assert [transport for _, transport, _ in found] == ["node"] * 4, found
        wait_until(lambda version=version: is_whole(site, version.name))
        assert lacked(site, version.name)
        site.check(version)
    whole = stored_files(site.daemon, version.name)
    for host in "ab":
        wait_until(lambda host=host: any(copy.held_pieces for copy in copies(site, host, version.name)))
        held = site.nodes[host].files(version.name)
        assert any(held[name] == whole[name] for name in held), "the files into which ranks wrote"


def test_wrong_bytes_in_a_nodes_file_abort_the_version(site: Site) -> None:
    site.attach("second")
    site.publish(1)
    assert "b.up" in site.publish_wrongly(2).reason


def test_a_byte_that_changes_after_its_file_was_verified_aborts_the_version(site: Site) -> None:
    """The node takes the digests of a file once its ranks have closed it. A later writer waits for the node's lease to end."""
    site.attach("early")
    before = verified_early(site, "a")
    name = site.ranks["a"].call("publish", 1)[0][0]
    wait_until(lambda: verified_early(site, "a") > before)
    folder = Path(next(home.folder for home in site.version(name).homes if home.node == "nodes/a"))
    (file,) = (file for file in read_layout(folder) if "a.up" in file.by_name)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(change_byte, str(folder / file.path), file.by_name["a.up"].offset + 4096)
        time.sleep(0.2)
        assert not late.done(), "it waits"
        site.ranks["b"].call("publish", 1)
        version = site.settled(name)
        late.result(timeout=60)
    assert version.state == resources_pb2.Version.ABORTED
    assert "a.up" in version.reason or "for writing while it was verified" in version.reason, version.reason
    version, _ = site.publish(2)
    wait_until(lambda: is_whole(site, version.name))
    site.check(version)


def test_a_worker_maps_its_hosts_files_and_gets_the_rest_from_other_nodes(site: Site) -> None:
    site.attach("third")
    version, _ = site.publish(1)
    arrived = site.ranks["a"].call("stage", site.daemon.endpoint, version.name)
    assert arrived == {"verified": True, "transport": "node", "reason": ""}
    wait_until(lambda: is_whole(site, version.name))
    assert site.nodes["a"].files(version.name) == stored_files(site.daemon, version.name)


@pytest.mark.full
def test_a_daemon_that_is_killed_copies_after_its_restart(site: Site) -> None:
    site.attach("fourth")
    site.daemon.stop()
    site.daemon.start(failpoint="node.piece@3=kill")  # the first two are requests before READY
    wait_live(site.daemon, *site.nodes)
    site.attach("fifth")
    for process in site.ranks.values():
        process.call("publish", 1)
    site.daemon.wait()
    site.daemon.start()
    wait_live(site.daemon, *site.nodes)
    newest = max(int(path.name) for path in (site.daemon.store / "models/policy/versions").iterdir())
    name = f"models/policy/versions/{newest}"
    assert site.version(name).state == READY
    wait_until(lambda: is_whole(site, name))
    site.check(site.version(name))


@pytest.mark.full
def test_a_version_whose_only_holder_dies_is_lost_and_the_one_before_is_the_newest(site: Site) -> None:
    site.attach("sixth")
    before, _ = site.publish(1)
    wait_until(lambda: is_whole(site, before.name))
    site.daemon.stop()
    site.daemon.start(failpoint="node.piece@3=delay:600")  # the first two are requests before READY
    wait_live(site.daemon, *site.nodes)
    site.attach("seventh")
    version, _ = site.publish(1)
    assert version.state == READY
    site.nodes["b"].kill()
    wait_until(lambda: site.version(version.name).state == RETIRED)
    assert "LOST: neither the daemon nor a node holds" in site.version(version.name).reason
    with Operator(site.daemon.endpoint) as operator:
        assert operator.latest("policy").name == before.name
    assert site.version(before.name).state == READY
    site.check(site.version(before.name))
