"""The folder of a store or a node: who may use it, and how its user learns that it was removed or replaced."""

import http.client
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from resharder.server.state.errors import DaemonError, FailedPrecondition
from resharder.server.store.folder import StoreFolder
from resharder.server.store.store import Store
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.node import Node, wait_live
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import reason_of
from tests.support.store_versions import claim, numbers, publish


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    folder = StoreFolder(tmp_path / "store", shared=False)
    yield folder
    folder.close()


def test_a_folder_stays_locked_when_somebody_removes_the_lock_file(folder: StoreFolder) -> None:
    (folder.root / "lock").unlink()
    assert not folder.problem()
    with pytest.raises(FailedPrecondition, match="another process uses"):
        StoreFolder(folder.root, shared=False)
    assert not folder.problem()
    folder.close()
    StoreFolder(folder.root, shared=False).close()


def test_a_folder_that_was_removed_or_replaced_is_a_problem_until_it_is_back(folder: StoreFolder) -> None:
    aside = folder.root.with_name("aside")
    folder.root.rename(aside)
    assert folder.problem() == f"{folder.root} was removed under the running process: restart the process"
    StoreFolder(folder.root, shared=False).close()
    assert "was replaced under the running process" in folder.problem()
    shutil.rmtree(folder.root)
    aside.rename(folder.root)
    assert not folder.problem()
    (folder.root / "lock").unlink()
    (folder.root / "lock").touch()
    assert f"{folder.root}/lock was replaced" in folder.problem()


def test_a_folder_whose_content_was_removed_is_a_problem(folder: StoreFolder) -> None:
    for path in folder.root.iterdir():
        path.unlink()
    assert f"{folder.nonce_file} was removed" in folder.problem()


def test_a_folder_without_its_nonce_alone_can_still_be_used(folder: StoreFolder) -> None:
    folder.nonce_file.unlink()
    assert not folder.problem()


def remove(folder: Path) -> None:
    """Remove a folder in whose subfolders its user may be writing at this moment."""

    def gone() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(gone, f"{folder} is removed")


def test_nothing_is_written_where_a_store_was_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", shared=False, keep_count=2)
    epoch = claim(store)
    for step in range(2):
        publish(store, epoch, step)
    remove(store.folder.root)
    for call in (
        lambda: claim(store, "another"),
        lambda: claim(store, "job", "another"),
        lambda: store.lifecycle.begin("policy", epoch, 3, "job"),
        lambda: store.lifecycle.retire("policy", [1]),
    ):
        with pytest.raises(DaemonError, match="was removed under the running process"):
            call()
    assert numbers(store) == [1, 2]
    store.close()
    assert not store.folder.root.exists()


def ready(daemon: Daemon) -> tuple[int, str]:
    connection = http.client.HTTPConnection(str(daemon.options["web_listen"]), timeout=60)
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_daemon_whose_store_is_removed_is_not_ready_and_says_so_and_is_again_when_it_is_back() -> None:
    with Daemon(lease_seconds=2, web_listen=f"127.0.0.1:{free_port()}") as daemon:
        health, aside = health_pb2_grpc.HealthStub(daemon.channel), daemon.store.with_name("aside")

        def serves() -> bool:
            return health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING

        wait_until(serves, "the daemon serves")
        daemon.store.rename(aside)
        wait_until(lambda: not serves(), "the daemon notices")
        wait_until(lambda: "was removed under the running process" in daemon.log.read_text(), "the daemon logs why")
        code, text = ready(daemon)
        assert (code, text.startswith(f"{daemon.store} was removed under the running process")) == (503, True)
        stub = publisher_pb2_grpc.PublisherServiceStub(daemon.channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.CreatePublisher(publisher_pb2.CreatePublisherRequest(model=resources_pb2.Model(name="m"), job="j", world_size=1))
        assert reason_of(refused.value) == "STORE_FAILED"
        aside.rename(daemon.store)
        wait_until(serves, "the daemon has its store again")
        assert ready(daemon) == (200, "ready\n")


def test_a_node_whose_folder_is_removed_ends_and_says_so() -> None:
    with Daemon(lease_seconds=2) as daemon, Node(daemon.endpoint, "one") as node:
        wait_live(daemon, "one")
        remove(node.folder)
        assert node.wait() == 1
        assert f"resharder-node: --folder: {node.folder} was removed under the running process" in node.log.read_text()
