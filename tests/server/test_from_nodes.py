"""A daemon goes on in an empty folder with what nodes return of the registry: real processes, on one host."""

import re
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from resharder.client.errors import DaemonUnreachable
from resharder.client.operator import Operator
from resharder.client.operator.answers import VersionTarget
from resharder.converters.geometry.layout import TensorSpec
from resharder.v1 import resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, nodes, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, read_folder, whole

SPECS = [TensorSpec("big", "BF16", (20 << 10, 1024)), TensorSpec("norm", "F32", (40,))]
READY, RETIRED = resources_pb2.Version.READY, resources_pb2.Version.RETIRED
LEASE_SECONDS = 4


def wait_kept(daemon: Daemon, count: int) -> None:
    """Wait until so many nodes keep the newest snapshot, after a look of the daemon at what has changed."""
    time.sleep(2.5)
    pattern = re.compile(rf'^resharder_registry_copies{{model="policy"}} {count}', re.MULTILINE)
    url = f"http://{daemon.options['web_listen']}/metrics"
    wait_until(lambda: bool(pattern.search(urllib.request.urlopen(url).read().decode())))


class Pair:
    """A daemon with nodes, and the one that goes on in its place, at another address."""

    def __init__(self, stack: ExitStack, names: str = "abc", **options: object) -> None:
        given = {"replicas": 2, "lease_seconds": LEASE_SECONDS, "data_listen": "127.0.0.1:0"} | options
        self.first = stack.enter_context(closing(Daemon(web_listen=f"127.0.0.1:{free_port()}", **given)))
        self.second = stack.enter_context(closing(Daemon(port=free_port(), **given, from_nodes=True)))
        self.endpoint = f"{self.second.endpoint},{self.first.endpoint}"
        self.first.start()
        self.nodes = {name: stack.enter_context(Node(self.endpoint, name)) for name in names}
        wait_live(self.first, *names)

    def keep(self) -> None:
        """Wait until all nodes keep the newest snapshots of the first daemon."""
        wait_kept(self.first, len(self.nodes))

    def lose_first(self) -> None:
        """End the first daemon for good, with its folder."""
        self.first.kill()
        shutil.rmtree(self.first.store)

    def publish(self, daemon: Daemon, step: int) -> resources_pb2.Version:
        return Job(daemon.channel, SPECS, [whole(SPECS)]).connect().publish(step, random_weights(SPECS, step))

    def check(self, folder: Path, number: int, step: int) -> None:
        """Check a version's bytes, read from the second daemon."""
        with Operator(self.second.endpoint) as operator:
            operator.export(number, folder)
        found, wanted = read_folder(str(folder)), random_weights(SPECS, step)
        assert found.keys() == wanted.keys()
        assert all((found[name] == wanted[name]).all() for name in wanted)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_no_ready_version_is_lost_with_the_daemon_and_its_folder(stack: ExitStack, tmp_path: Path) -> None:
    pair = Pair(stack)
    for step in (1, 2, 3):
        assert pair.publish(pair.first, step).state == READY
    with Operator(pair.first.endpoint) as operator:
        operator.set_fleet("pinned", model="policy", target=VersionTarget(VersionTarget.Kind.NUMBER, 2))
        operator.drain_node("c")
    pair.keep()
    pair.lose_first()
    pair.second.start()
    wait_live(pair.second, "a", "b")
    with Operator(pair.second.endpoint) as operator:
        assert operator.fleet("pinned").target == VersionTarget(VersionTarget.Kind.NUMBER, 2)
        (restored,) = [event for event in operator.events() if event.what == "restored"]
        assert restored.reason == (
            "of what nodes/a, nodes/b, nodes/c kept; versions: "
            "models/policy/versions/1, models/policy/versions/2, models/policy/versions/3"
        )
    wait_until(lambda: nodes(pair.second)["nodes/c"].state == resources_pb2.Node.DRAINED)
    for step in (1, 2, 3):
        pair.check(tmp_path / f"{step}", step, step)
    after = pair.publish(pair.second, 4)
    assert (after.state, after.number) == (READY, 104)
    pair.check(tmp_path / "4", after.number, 4)
    pair.second.stop()
    pair.second.options["from_nodes"] = False
    pair.second.start()
    pair.check(tmp_path / "again", 3, 3)


@pytest.mark.full
def test_a_version_of_which_nodes_keep_the_registry_is_ready_after_a_kill_before_ready(stack: ExitStack, tmp_path: Path) -> None:
    pair = Pair(stack, "ab")
    pair.first.stop()
    pair.first.start(failpoint="snapshot.kept=kill")
    wait_live(pair.first, "a", "b")
    weights = random_weights(SPECS, 1)
    job = Job(pair.first.channel, SPECS, [whole(SPECS)]).connect()
    version = job.begin(1)
    job.upload(version.number, 0, weights)
    job.seal(version.name, 0, weights)
    assert pair.first.wait() == -signal.SIGKILL
    shutil.rmtree(pair.first.store)
    pair.second.start()
    wait_live(pair.second, "a", "b")
    pair.check(tmp_path / "one", version.number, 1)
    again = pair.publish(pair.second, 1)
    assert (again.number, again.state) == (version.number, READY), "the same step of the same job is the same version"


@pytest.mark.full
def test_with_one_replica_the_registry_comes_back_and_what_no_node_holds_is_lost_with_the_reason(stack: ExitStack) -> None:
    pair = Pair(stack, "a", replicas=1)
    version = pair.publish(pair.first, 1)
    pair.keep()
    pair.lose_first()
    pair.second.start()
    with Operator(pair.second.endpoint) as operator:
        wait_until(lambda: operator.version(version.number).state.name == "RETIRED")
        assert operator.version(version.number).reason == "LOST: neither the daemon nor a node holds 3 of 3 pieces"
    assert pair.publish(pair.second, 2).state == READY


def test_a_daemon_that_waits_says_so_and_ends_at_sigterm(stack: ExitStack) -> None:
    web = f"127.0.0.1:{free_port()}"
    daemon = stack.enter_context(closing(Daemon(from_nodes=True, web_listen=web)))
    daemon.launch()
    wait_until(lambda: "it waits for nodes to return the registry" in daemon.log.read_text(), timeout=60)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{web}/readyz")
    assert (refused.value.code, b"it waits for nodes to return the registry" in refused.value.read()) == (503, True)
    with pytest.raises(DaemonUnreachable, match="waits for nodes to return its registry"), Operator(daemon.endpoint) as operator:
        operator.versions("policy")
    assert daemon.stop() == 0
    daemon.options["from_nodes"] = False
    with daemon:
        assert daemon.process is not None


def test_a_folder_that_is_not_empty_is_refused(stack: ExitStack) -> None:
    daemon = stack.enter_context(Daemon())
    daemon.stop()
    daemon.options["from_nodes"] = True
    daemon.launch()
    assert daemon.wait(60) == 2
    assert f"resharderd: --from-nodes: {daemon.store} is not empty, it has " in daemon.log.read_text()


def test_a_folder_that_was_not_restored_to_the_end_is_refused_without_nodes(stack: ExitStack) -> None:
    daemon = stack.enter_context(closing(Daemon()))
    (daemon.store / "from-nodes.part").mkdir(parents=True)
    daemon.launch()
    assert daemon.wait(60) == 2
    assert (
        f"resharderd: --store: an earlier start has not finished to restore {daemon.store} from nodes" in daemon.log.read_text()
    )


@pytest.mark.full
def test_nodes_of_two_registries_are_refused_by_name(stack: ExitStack) -> None:
    pair = Pair(stack, "a", replicas=1)
    pair.publish(pair.first, 1)
    pair.keep()
    with (
        Daemon(web_listen=f"127.0.0.1:{free_port()}") as foreign,
        Node(f"{pair.second.endpoint},{foreign.endpoint}", "foreign"),
    ):
        wait_live(foreign, "foreign")
        pair.publish(foreign, 1)
        wait_kept(foreign, 1)
        foreign.kill()
        pair.lose_first()
        pair.second.launch()
        assert pair.second.wait(120) == 2
    log = pair.second.log.read_text()
    assert "resharderd: --from-nodes: nodes/" in log
    assert all(part in log for part in (" keeps registry ", ", and nodes/", " registry ", ": stop the nodes of the one"))
    assert not [path for path in pair.second.store.iterdir() if path.name not in ("lock", "nonce")]
