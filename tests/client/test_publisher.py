"""Publishing when something goes wrong: connections, daemons, other jobs, other ranks."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.errors import (
    LayoutRejected,
    NotFound,
    OutOfRoom,
    StaleEpoch,
    UsageError,
    VersionAborted,
    WaitTimeout,
)
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.connect import DeclaredTensor, connect
from resharder.client.transport import chunks, shared_memory
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.shared_memory import SharedMemory
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

from tests.client.models import CONFIG, SHAPES, connected, equal, exported, parts, publish_all, spread, together, weights
from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.observing import versions, wait_until
from tests.support.released import ImmediateReleases
from tests.support.remote import Remote
from tests.support.variants import sampled


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def one_large(megabytes: int) -> tuple[list[DeclaredTensor], torch.Tensor]:
    tensor = torch.arange(megabytes << 18, dtype=torch.int32).view(-1, 1024)
    return [DeclaredTensor("large", "I32", tuple(tensor.shape))], tensor


def test_after_a_cut_connection_only_missing_chunks_go_again(daemon: Daemon, tmp_path: Path) -> None:
    held, tensor = one_large(96)
    proxy = Proxy(daemon.endpoint, cut_after=40 << 20)
    with connect(proxy.endpoint, model="policy", job="cut", config=CONFIG, transport="grpc") as publisher:
        publisher.attach_tensors(held)
        handle = publisher.publish_tensors(1, [("large", tensor)])
        handle.wait_ready(60)
    assert proxy.cuts == 1
    # All 96 MiB once, and at most the window in flight twice.
    assert 96 << 20 < proxy.forwarded < (96 + 34) << 20
    assert torch.equal(exported(daemon.endpoint, "1", tmp_path / "out")["large"], tensor)


@pytest.mark.parametrize("transport", ["grpc", "shared-memory"])
def test_a_daemon_killed_while_a_rank_delivers_gets_the_whole_version_when_it_is_back(
    daemon: Daemon, transport: str, tmp_path: Path
) -> None:
    full, killed = weights(1), []
    (publisher,) = connected(daemon.endpoint, 1, "restart", transport=transport)

    def items() -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        for number, item in enumerate(parts(full, spread(1)[0])):
            if number == 4 and not killed:
                killed.append(daemon.kill())
                daemon.start()
            yield item

    handle = publisher.publish_tensors(1, items)
    handle.wait_ready(60)
    assert killed
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "out"), full)


def test_after_a_daemon_restart_all_ranks_publish_the_next_step(daemon: Daemon, tmp_path: Path) -> None:
    publishers = connected(daemon.endpoint, 2, "restart")
    publish_all(publishers, 1, weights(1))[0].wait_ready(60)
    daemon.kill()
    daemon.start()
    handle = publish_all(publishers, 2, weights(2))[1]
    handle.wait_ready(60)
    assert handle.version > 1
    assert equal(exported(daemon.endpoint, "1", tmp_path / "one"), weights(1))
    assert equal(exported(daemon.endpoint, str(handle.version), tmp_path / "two"), weights(2))


@pytest.mark.full
def test_a_step_that_one_rank_delivered_to_a_dead_daemon_holds_nobody_up(tmp_path: Path) -> None:
    with Daemon(lease_seconds=9) as daemon:  # a rank learns of the restart when it renews its lease
        publishers = connected(daemon.endpoint, 2, "half")
        publishers[0].publish_tensors(1, parts(weights(1), spread(2)[0]))
        daemon.kill()
        daemon.start()
        with pytest.raises(VersionAborted):
            publishers[1].publish_tensors(1, list(parts(weights(1), spread(2)[1]))).wait_ready(60)
        publish_all(publishers, 2, weights(2))[0].wait_ready(60)
        assert equal(exported(daemon.endpoint, "latest", tmp_path / "out"), weights(2))


@pytest.mark.parametrize("transport", sampled(["grpc", "shared-memory"], ["shared-memory"]))
def test_a_later_job_ends_an_earlier_one(daemon: Daemon, transport: str) -> None:
    (old,) = connected(daemon.endpoint, 1, "old", transport=transport)
    publish_all([old], 1, weights(1))[0].wait_ready(60)
    (new,) = connected(daemon.endpoint, 1, "new", transport=transport)
    with pytest.raises(StaleEpoch, match="job 'new' has taken over model 'policy'; to take it back"):
        publish_all([old], 2, weights(2))
    handle = publish_all([new], 1, weights(3))[0]
    handle.wait_ready(60)
    with Operator(daemon.endpoint) as operator:
        assert [v.step for v in operator.versions("policy") if v.number == handle.version] == [1]


def test_a_job_that_is_refused_does_not_end_the_one_that_publishes(daemon: Daemon) -> None:
    (running,) = connected(daemon.endpoint, 1, "running")
    publish_all([running], 1, weights(1))[0].wait_ready(60)
    wrong = connect(daemon.endpoint, model="policy", job="wrong", rank=0, world_size=1, config=CONFIG)
    with pytest.raises(LayoutRejected, match="is held by no rank"):
        wrong.attach_tensors([DeclaredTensor(name, *SHAPES[name], index) for name, index in spread(2)[0]])
    publish_all([running], 2, weights(2))[0].wait_ready(60)
    with Operator(daemon.endpoint) as operator:
        shown = {publisher.job: publisher.state.name for publisher in operator.daemon().publishers}
    assert shown == {"running": "ACTIVE", "wrong": "REJECTED"}


def test_a_publish_that_fails_leaves_no_version_behind(daemon: Daemon) -> None:
    (publisher,) = connected(daemon.endpoint, 1, "fails")

    def items() -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        yield from list(parts(weights(1), spread(1)[0]))[:3]
        raise ZeroDivisionError("the trainer's own mistake")

    with pytest.raises(ZeroDivisionError):
        publisher.publish_tensors(1, items())
    with Operator(daemon.endpoint) as operator:
        (version,) = operator.versions("policy")
    assert version.state == Version.State.ABORTED
    assert "ZeroDivisionError" in version.reason
    publish_all([publisher], 1, weights(1))[0].wait_ready(60)


class Copying:
    """A rank that stops in the middle of a tensor."""

    def __init__(self, endpoint: str, transport: str) -> None:
        self._publisher = connect(endpoint, model="policy", job="killed", config=CONFIG, transport=transport)
        self._half_way = threading.Event()

    def publish(self) -> None:
        """Return half-way."""
        tensor = torch.full((32 << 10, 1024), 0x07070707, dtype=torch.int32)
        host_parts, host_batches = chunks.host_parts, shared_memory.host_batches

        def half(*given: Any) -> Iterator[Any]:
            left = tensor.nbytes // 2
            for part in host_parts(*given):
                yield part
                left -= part.array.nbytes
                if left <= 0:
                    self._stop()

        def half_a_batch(*given: Any, **options: Any) -> Iterator[Any]:
            for batch in host_batches(*given, **options):
                yield batch[: len(batch) // 2]
                self._stop()

        chunks.host_parts, shared_memory.host_batches = half, half_a_batch
        self._publisher.attach_tensors([DeclaredTensor("large", tensor.dtype, tuple(tensor.shape))])
        threading.Thread(target=self._publisher.publish_tensors, args=(1, [("large", tensor)]), daemon=True).start()
        self._half_way.wait()

    def _stop(self) -> None:
        self._half_way.set()
        threading.Event().wait()


@pytest.mark.parametrize("transport", sampled(["grpc", "shared-memory"], ["shared-memory"]))
def test_a_trainer_killed_in_the_middle_of_a_tensor_leaves_nothing_and_the_next_one_publishes(
    transport: str, tmp_path: Path
) -> None:
    held, tensor = one_large(32)
    with Daemon(lease_seconds=7, keep_count=1) as daemon:
        with Remote(Copying, daemon.endpoint, transport) as trainer:
            trainer.call("publish")
            assert half_written(daemon.store / "models/policy/staging/00000001/model.safetensors")
        seen = set()
        wait_until(lambda: seen.add(versions(daemon)[1]) or "ABORTED" in seen, "the lease ends")  # type: ignore[func-returns-value]
        assert seen <= {"UPLOADING", "ABORTED"}
        assert not list(daemon.store.glob("models/policy/versions/*"))
        with connect(daemon.endpoint, model="policy", job="next", config=CONFIG, transport=transport) as publisher:
            publisher.attach_tensors(held)
            publisher.publish_tensors(1, [("large", tensor)]).wait_ready(60)
        assert versions(daemon) == {1: "ABORTED", 2: "READY"}
        assert torch.equal(exported(daemon.endpoint, "2", tmp_path / "out")["large"], tensor)


def half_written(path: Path) -> bool:
    """Whether the trainer's bytes are at the start of the file's tensor and not at its end."""
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        start, end = os.pread(file.fileno(), 16, size // 8), os.pread(file.fileno(), 16, size - 16)
    return start == bytes([7]) * 16 and end == bytes(16)


COMPILING = """
import sys, torch
from numba.core import event
from resharder.client.trainer.connect import connect
endpoint = sys.argv[1]
full = {
    "matrix": torch.randn(300, 512).bfloat16(), "square": torch.randn(64, 64).t(), "experts": torch.randn(4, 30, 50).half(),
    "double": torch.randn(9, 40).double(), "bytes": torch.arange(250, dtype=torch.uint8).view(5, 50), "scalar": torch.tensor(2.0),
}
with event.install_recorder("numba:compile") as recorder:
    for transport in ("shared-memory", "grpc"):
        publisher = connect(endpoint, model=transport, job="a", config={"architectures": ["None"]}, transport=transport)
        publisher.attach_tensors([(n, t.dtype, tuple(t.shape)) for n, t in full.items()])
        before = len(recorder.buffer)
        for step in (1, 2):
            publisher.publish_tensors(step, full.items()).wait_ready(60)
            publisher.publish_tensors(step, full.items()).wait_ready(60)
        print(transport, before > 0, len(recorder.buffer) - before)
        publisher.close()
"""


@pytest.mark.full
@pytest.mark.parametrize("cache", ["empty", "none"])
def test_kernels_are_compiled_when_a_model_is_attached_and_never_in_a_publish(daemon: Daemon, cache: str, tmp_path: Path) -> None:
    """numba itself says what it compiles, in a process of its own, with no cache to find the kernels in."""
    no_cache = "from numba.core import caching; caching.CacheImpl._locator_classes = []\n" if cache == "none" else ""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", no_cache + COMPILING, daemon.endpoint],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.stdout.splitlines() == ["shared-memory True 0", "grpc True 0"], done.stderr
    assert bool(list(tmp_path.rglob("*.nbi"))) == (cache == "empty")


@pytest.mark.full
def test_the_lease_outlives_a_step_that_takes_longer() -> None:
    lease = 8.0  # longer than a busy machine keeps ranks from renewing theirs
    with Daemon(lease_seconds=lease) as daemon:
        publishers = connected(daemon.endpoint, 2, "slow", transport="shared-memory")

        def publish(rank: int) -> object:
            time.sleep((lease + 1) * rank)
            return publishers[rank].publish_tensors(1, parts(weights(1), spread(2)[rank]))

        together(publish, 2)[0].wait_ready(60)


def test_a_third_staging_version_waits_for_the_first(daemon: Daemon) -> None:
    publishers, full = connected(daemon.endpoint, 2, "ahead"), weights(1)
    ahead = threading.Semaphore(0)

    def publish(rank: int, step: int) -> Any:
        return publishers[rank].publish_tensors(step, parts(full, spread(2)[rank]))

    def run_ahead() -> Any:
        handles = []
        for step in (1, 2, 3):
            handles.append(publish(0, step))
            ahead.release()
        return handles[-1]

    with ThreadPoolExecutor(1) as pool:
        third = pool.submit(run_ahead)
        assert all(ahead.acquire(timeout=60) for _ in range(2))
        assert not ahead.acquire(timeout=1), "a third version is UPLOADING beside two others"
        assert versions(daemon) == {1: "UPLOADING", 2: "UPLOADING"}
        publish(1, 1).wait_ready(60)
        handle = third.result(60)
        for step in (2, 3):
            publish(1, step)
        handle.wait_ready(60)


def test_a_trainer_too_far_ahead_of_staging_is_told_so_in_bounded_time(daemon: Daemon) -> None:
    publishers = connected(daemon.endpoint, 2, "bound", staging_timeout=1.0)
    for step in (1, 2):
        publishers[0].publish_tensors(step, parts(weights(1), spread(2)[0]))
    with pytest.raises(OutOfRoom) as refusal:
        publishers[0].publish_tensors(3, parts(weights(1), spread(2)[0]))
    assert refusal.value.reason == "TOO_MANY_UPLOADING"


def test_a_bound_on_how_far_ahead_makes_publish_wait(daemon: Daemon) -> None:
    publishers = connected(daemon.endpoint, 2, "one", max_ahead=1, staging_timeout=1.0)
    publishers[0].publish_tensors(1, parts(weights(1), spread(2)[0]))
    with pytest.raises(WaitTimeout, match="1 of 2 slots sealed"):
        publishers[0].publish_tensors(2, parts(weights(1), spread(2)[0]))


def test_replicas_are_sent_once_and_evenly() -> None:
    from resharder.client.rpc.channel import Channel
    from resharder.client.trainer.identity import RankIdentity
    from resharder.client.trainer.model_files import config_file
    from resharder.client.trainer.rank_layout import RankBox, RankLayout
    from resharder.client.trainer.registration import register
    from resharder.converters.geometry.layout import TensorSpec, box_size, full_box

    specs = {f"t{i}": TensorSpec(f"t{i}", "BF16", (256, 64 + i)) for i in range(16)}
    with Daemon() as daemon, Channel(daemon.endpoint) as channel:
        registered = []
        for rank in range(4):
            rank_layout = RankLayout(specs, tuple(RankBox(name, full_box(spec.shape), rank > 0) for name, spec in specs.items()))
            registered.append(register(channel, "policy", [config_file(CONFIG)], RankIdentity("even", rank, 4), rank_layout))
        slots = [registration.assignment(60)[0] for registration in registered]
    sent = [sum(box_size(box) for box in slot.boxes) for slot in slots]
    assert sum(sent) == sum(256 * (64 + i) for i in range(16))
    assert max(sent) < 1.1 * min(sent)


def test_that_there_is_no_version_yet_is_an_answer_and_not_asked_for_again(daemon: Daemon) -> None:
    request, asked = server_pb2.ClaimServerRequest(server="s", model="policy", boot=True, wait_seconds=0.2), []
    with Channel(daemon.endpoint) as channel:

        def claim(request: server_pb2.ClaimServerRequest, timeout: float) -> server_pb2.Claim:
            asked.append(request)
            return server_pb2_grpc.ServerServiceStub(channel.grpc).ClaimServer(request, timeout=timeout)

        with pytest.raises(WaitTimeout, match=r"no READY version after 0\.2 s") as refusal:
            channel.call(claim, request)
    assert (refusal.value.reason, len(asked)) == ("NO_VERSION", 1)


def test_a_timeout_of_none_is_no_bound(daemon: Daemon) -> None:
    unbounded = {"connect_timeout": None, "staging_timeout": None, "register_timeout": None}
    publishers = connected(daemon.endpoint, 2, "unbounded", **unbounded)
    handles = publish_all(publishers, 1, weights(1))
    handles[0].wait_ready(None)
    handles[1].wait_serving(None)
    for publisher in publishers:
        publisher.close()


@pytest.mark.full
def test_a_closed_publisher_renews_no_lease_and_refuses_further_calls() -> None:
    with Daemon(lease_seconds=6) as daemon:
        open_, closed = connected(daemon.endpoint, 2, "closed")
        publish_all([open_, closed], 1, weights(1))[0].wait_ready(60)
        lease = closed._session._lease
        assert lease is not None
        handle = open_.publish_tensors(2, parts(weights(2), spread(2)[0]))
        for _ in range(2):
            closed.close()
        lease._thread.join(60)
        assert not lease._thread.is_alive()
        with pytest.raises(VersionAborted, match="rank 1"):
            handle.wait_ready(60)
        for call in (
            lambda: closed.publish_tensors(3, parts(weights(3), spread(2)[1])),
            lambda: closed.attach_tensors(one_large(1)[0]),
        ):
            with pytest.raises(UsageError, match=r"the connection to .* was closed"):
                call()
        closed.abort()
        open_.close()


def test_files_that_a_restarted_daemon_has_removed_are_a_version_not_found(tmp_path: Path) -> None:
    spec = TensorSpec("a", "F32", (4, 4))
    version = resources_pb2.Version(name="models/policy/versions/1", folder=str(tmp_path / "gone"))
    slot = AssignedSlot(0, (full_box(spec.shape),), (spec,), 1 << 20)
    with pytest.raises(NotFound, match=r"its files in .*gone cannot be opened"):
        SharedMemory(1).deliver(version, slot, iter(()), ImmediateReleases())
