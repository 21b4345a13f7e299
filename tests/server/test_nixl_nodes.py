"""Pieces between real nodes by NIXL over TCP. Needs its wheel: `make test-nixl`."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.holding.memory import EngineFailed, VersionMemory
from resharder.server.node.nixl import NixlEngine
from resharder.v1 import node_pb2, node_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.engine_port import EnginePort
from tests.support.node import Node, holds, nodes, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, whole

pytest.importorskip("nixl._bindings", exc_type=ImportError)

SPECS = [TensorSpec("big", "BF16", (40 << 10, 1024)), TensorSpec("small", "F32", (7,))]
NIXL = {"transfer": "nixl", "insecure": True}


@pytest.fixture(autouse=True, scope="module")
def _over_tcp() -> Iterator[None]:
    """Between processes of one host, UCX would read by the kernel, also from one that is stopped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", keep_count=2, lease_seconds=15) as running:
        yield running


def publish(daemon: Daemon, step: int) -> str:
    return Job(daemon.channel, SPECS, [whole(SPECS)], job="job").connect().publish(step, random_weights(SPECS, step)).name


def want(daemon: Daemon, node: Node, version: str) -> None:
    """Ask for a version on a node's host, as a worker there does."""
    path = node.folder / "nonce"
    readable = [resources_pb2.StoreAccess(nonce_file=str(path), nonce=path.read_bytes())]
    request = node_pb2.GetHostVersionRequest(version=version, server="servers/s", readable=readable)
    node_pb2_grpc.NodeServiceStub(daemon.channel).GetHostVersion(request)


def bring(daemon: Daemon, node: Node, version: str) -> None:
    """Bring a version to a node, and compare every file with the store's."""

    def arrived() -> bool:
        want(daemon, node, version)  # again, as a worker does: the daemon may not have heard of a restarted node
        return holds(daemon, node.name, version)

    wait_until(arrived)
    assert node.files(version) == stored_files(daemon, version)


def by_engine(daemon: Daemon, node: Node) -> int:
    return nodes(daemon)[f"nodes/{node.name}"].received_engine_bytes


def test_a_node_reads_pieces_from_the_memory_of_another_which_survives_the_retirement_of_versions(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "one", **NIXL) as one, Node(daemon.endpoint, "two", **NIXL) as two:
        wait_live(daemon, "one", "two")
        for step in range(1, 5):
            version = publish(daemon, step)
            before = by_engine(daemon, two)
            bring(daemon, one, version)
            bring(daemon, two, version)
            wait_until(lambda before=before: by_engine(daemon, two) > before)
        wait_until(lambda: len(list(one.folder.glob("versions/*/*"))) == 2 == len(list(two.folder.glob("versions/*/*"))))
        assert (one.stop(), two.stop()) == (0, 0)
        assert "session_suspended" not in one.log.read_text() + two.log.read_text()


def test_nodes_with_and_without_the_engine_exchange_pieces_by_http(daemon: Daemon) -> None:
    version = publish(daemon, 5)
    with Node(daemon.endpoint, "nixl", **NIXL) as with_nixl, Node(daemon.endpoint, "plain") as plain:
        wait_live(daemon, "nixl", "plain")
        bring(daemon, with_nixl, version)
        bring(daemon, plain, version)
        version = publish(daemon, 6)
        bring(daemon, plain, version)
        bring(daemon, with_nixl, version)
        for node in (with_nixl, plain):
            wait_until(lambda node=node: nodes(daemon)[f"nodes/{node.name}"].received_peer_bytes > 0)
            assert by_engine(daemon, node) == 0


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_version_arrives_though_the_node_that_it_comes_from_dies_or_hangs(daemon: Daemon, sign: signal.Signals) -> None:
    version = publish(daemon, 7 if sign is signal.SIGKILL else 8)
    name = sign.name.lower()
    with Node(daemon.endpoint, f"a-{name}", **NIXL) as source, Node(daemon.endpoint, f"b-{name}", **NIXL) as reader:
        wait_live(daemon, source.name, reader.name)
        bring(daemon, source, version)
        assert source.process is not None
        source.process.send_signal(sign)  # the daemon offers its session for the seconds of its lease
        bring(daemon, reader, version)
        assert by_engine(daemon, reader) == 0


def test_a_restarted_node_is_read_by_its_new_session(daemon: Daemon) -> None:
    version = publish(daemon, 9)
    with Node(daemon.endpoint, "c", **NIXL) as source, Node(daemon.endpoint, "d", **NIXL) as reader:
        wait_live(daemon, "c", "d")
        bring(daemon, source, version)
        bring(daemon, reader, version)
        source.kill()
        source.start()
        wait_until(lambda: holds(daemon, "c", version))
        before, version = by_engine(daemon, reader), publish(daemon, 10)
        bring(daemon, source, version)
        bring(daemon, reader, version)
        wait_until(lambda: by_engine(daemon, reader) > before)


@contextmanager
def two_engines(**options: float) -> Iterator[tuple[NixlEngine, NixlEngine]]:
    """One whose memory is read, and one that reads."""
    with closing(NixlEngine()) as one, closing(NixlEngine(**options)) as two, EnginePort(one):
        yield one, two


def test_memory_is_read_once_it_is_registered_also_later_than_the_first() -> None:
    content, target = np.arange(2 << 20, dtype=np.uint32).view(np.uint8), np.zeros(1 << 20, np.uint8)
    begin, _ = byte_bounds(content)
    with two_engines() as (one, two):
        two.register(byte_bounds(target))
        one.register((begin, begin + (1 << 20)))
        two.read(one.session, begin, byte_bounds(target))
        assert (target == content[: 1 << 20]).all()
        one.register((begin + (1 << 20), begin + (2 << 20)))
        two.read(one.session, begin + (1 << 20), byte_bounds(target))
        assert (target == content[1 << 20 : 2 << 20]).all()
        with pytest.raises(EngineFailed, match="NOT_FOUND"):
            two.read(one.session, begin + (2 << 20), byte_bounds(target))
        with pytest.raises(EngineFailed, match=r"expected a session of nixl, got other/127\.0\.0\.1:1/a"):
            two.read("other/127.0.0.1:1/a", begin, byte_bounds(target))
        with pytest.raises(EngineFailed, match=r"its keys cannot be fetched: .*refused"):
            two.read("nixl/127.0.0.1:1/a", begin, byte_bounds(target))
        with pytest.raises(EngineFailed, match="another process is there"):
            two.read(f"{one.session}0", begin, byte_bounds(target))


def test_late_requests_for_memory_of_a_version_that_is_gone_find_no_file(tmp_path: Path) -> None:
    """The peer has the keys still; over TCP nobody compares them."""
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    target = np.full(1 << 20, 7, np.uint8)
    with two_engines() as (one, two):
        two.register(byte_bounds(target))
        memory = VersionMemory(one, tmp_path, {"file": 1 << 20})
        memory.register([PieceSpan("file", 0, 1 << 20)])
        (address,) = memory.addresses
        two.read(one.session, address, byte_bounds(target))
        assert (target == ord("x")).all()
        memory.close()
        two.read(one.session, address, byte_bounds(target))
        assert not target.any()
        (tmp_path / "other").write_bytes(b"y" * (1 << 20))
        again = VersionMemory(one, tmp_path, {"other": 1 << 20})
        assert again.addresses == (address,)
        again.close()


SERVING = """
import sys
import numpy as np
from numpy.lib.array_utils import byte_bounds
from tests.support.engine_port import EnginePort
from resharder.server.node.nixl import NixlEngine
content, engine = np.full(64 << 20, 5, np.uint8), NixlEngine()
engine.register(byte_bounds(content))
with EnginePort(engine):
    print(engine.session, byte_bounds(content)[0], flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_is_written_once_a_read_has_failed(sign: signal.Signals) -> None:
    """Of a process that dies or hangs amid reads; one that hangs goes on afterwards, and would send the rest."""
    target = np.zeros(64 << 20, np.uint8)
    serving = subprocess.Popen([sys.executable, "-c", SERVING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert serving.stdout is not None
        session, address = serving.stdout.readline().split()
        with closing(NixlEngine(read_seconds=1.0)) as engine, ThreadPoolExecutor(4) as pool:
            begin, end = byte_bounds(target)
            engine.register((begin, end))
            engine.read(session, int(address), (begin, begin + 1024))
            quarter = len(target) // 4
            parts = [(begin + i * quarter, begin + (i + 1) * quarter) for i in range(4)]
            serving.send_signal(sign)
            reads = [pool.submit(engine.read, session, int(address) + at - begin, (at, last)) for at, last in parts]
            for read in reads:
                with pytest.raises(EngineFailed):
                    read.result(30)
            target[:] = 9
            serving.send_signal(signal.SIGCONT)
            time.sleep(1.0)  # UCX ends that process, which has nobody to answer
            assert (target == 9).all()
            with pytest.raises(EngineFailed):
                engine.read(session, int(address), (begin, begin + 1024))
    finally:
        serving.kill()
        serving.wait()


def test_without_nixl_the_line_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'nixl'")

    monkeypatch.setattr("resharder.converters.wire.nixl.bindings", missing)
    with pytest.raises(EngineFailed, match=r"NIXL cannot be imported: .*'\.\[nixl\]'"):
        NixlEngine()


def test_tcp_is_taken_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("UCX_TLS")
    monkeypatch.setattr("resharder.converters.wire.nixl._RDMA", tmp_path)
    with pytest.raises(EngineFailed, match="this host has no RDMA device"):
        NixlEngine()
