"""`resharderd` as a process: published over the wire, killed, drained, refused."""

import itertools
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from resharder.converters.geometry.layout import Range, TensorSpec, full_box
from resharder.server import main
from resharder.server.config import Config, ConfigError, load
from resharder.v1 import operator_pb2, publisher_pb2, resources_pb2
from typer.testing import CliRunner

from tests.support.daemon import Daemon
from tests.support.forked import run
from tests.support.node import Node, wait_live
from tests.support.publishing import Held, Job, random_weights, read_folder, reason_of, whole
from tests.support.variants import sampled

SPECS = [
    TensorSpec("embed", "BF16", (96, 40)),
    TensorSpec("experts", "BF16", (4, 6, 10)),
    TensorSpec("scale", "F32", ()),
    TensorSpec("norm", "F32", (40,)),
]


def holdings() -> list[list[Held]]:
    """Two ranks: rows split, columns interleaved, a replica, a scalar."""
    lower, upper = (Range(0, 48), Range(0, 40)), (Range(48, 48), Range(0, 40))
    even, odd = ((Range(0, 4), Range(0, 6), Range(i, 5, 2)) for i in (0, 1))
    norm = full_box((40,))
    return [
        [("embed", lower, False), ("experts", even, False), ("scale", (), False), ("norm", norm, False)],
        [("embed", upper, False), ("experts", odd, False), ("norm", norm, True)],
    ]


@pytest.fixture
def unstarted() -> Iterator[Daemon]:
    with closing(Daemon(chunk_bytes=1024)) as daemon:
        yield daemon


@pytest.fixture
def daemon(unstarted: Daemon) -> Daemon:
    return unstarted.start()


def test_a_published_version_is_a_folder_with_exactly_the_ranks_bytes(daemon: Daemon) -> None:
    job = Job(daemon.channel, SPECS, holdings()).connect()
    for step in range(5):
        weights = random_weights(SPECS, step)
        version = job.publish(step, weights)
        assert version.State.Name(version.state) == "READY", version.reason
        found = read_folder(version.folder)
        assert found.keys() == weights.keys()
        assert all(np.array_equal(found[name], weights[name]) for name in weights)


def test_nothing_that_was_ready_is_sent_again_after_a_kill(daemon: Daemon) -> None:
    job = Job(daemon.channel, SPECS, holdings()).connect()
    weights = random_weights(SPECS, 1)
    ready = job.publish(1, weights)
    staging = job.begin(2)
    job.upload(staging.number, 0, weights)
    daemon.kill()
    daemon.start()
    wait_connected(daemon)
    assert reason(lambda: job.begin(2)) == "PUBLISHER_UNKNOWN"
    assert job.connect().epoch == ready.epoch
    same = job.begin(1)
    assert (same.name, same.state, same.fingerprint) == (ready.name, READY, ready.fingerprint)
    assert job.missing(same.name, 0) == []
    assert job.seal(same.name, 0, weights).state == READY
    assert reason(lambda: job.seal(same.name, 1, random_weights(SPECS, 2))) == "SLOT_DIFFERS"
    assert job.begin(2).number > staging.number
    assert job.publish(2, weights).state == READY


FAILPOINTS = {  # where the daemon dies while step 2 is published -> the steps that are READY afterwards
    "begin.after-number@2": {1},
    "begin.after-rename@2": {1},
    "seal.after-slot@3": {1},
    "commit.before-proof@2": {1},
    "commit.after-proof@2": {1},
    "commit.before-manifest@2": {1},
    "commit.after-manifest@2": {1},
    "commit.before-rename@2": {1},
    "commit.after-rename@2": {1, 2},
    "commit.after-sync@2": {1, 2},
    "commit.after-history@2": {1, 2},
    "leave.before-rename": {1, 2},
    "leave.after-rename": {2},
}


KEPT = ("begin.after-rename@2", "commit.after-proof@2", "commit.after-rename@2", "leave.before-rename")


@pytest.mark.parametrize("failpoint", sampled(FAILPOINTS, KEPT))
def test_a_daemon_that_dies_at_any_step_comes_back_with_whole_versions_only(unstarted: Daemon, failpoint: str) -> None:
    daemon = unstarted
    daemon.options["keep_count"] = 1
    daemon.start(failpoint=f"{failpoint}=kill")
    weights = {step: random_weights(SPECS, step) for step in (1, 2, 3)}
    job = Job(daemon.channel, SPECS, holdings()).connect()
    first = job.publish(1, weights[1])
    with pytest.raises(grpc.RpcError):
        job.publish(2, weights[2])
    assert daemon.wait() == -signal.SIGKILL
    daemon.start()
    wait_connected(daemon)
    found = {v.step: v for v in job.operator.ListVersions(LIST).versions if v.state == READY}
    assert found.keys() == FAILPOINTS[failpoint]
    for step, version in found.items():
        assert_holds(version.folder, weights[step])
    job.connect()
    second = job.publish(2, weights[2])
    assert second.state == READY
    assert_holds(second.folder, weights[2])
    assert job.publish(3, weights[3]).number > second.number > first.number


def test_a_repeated_signal_does_not_change_the_exit_status(daemon: Daemon) -> None:
    with Node(daemon.endpoint, "one") as node:
        wait_live(daemon, "one")
        for process in (node.process, daemon.process):
            assert process is not None
            while process.poll() is None:
                process.send_signal(signal.SIGTERM)
                time.sleep(0.001)
            assert process.poll() == 0


def test_sigterm_lets_an_open_version_finish_and_takes_no_new_one(unstarted: Daemon) -> None:
    daemon = unstarted
    daemon.options["drain_seconds"] = 300
    daemon.start()
    job = Job(daemon.channel, SPECS, holdings()).connect()
    weights, version = random_weights(SPECS, 1), job.begin(1)
    job.upload(version.number, 0, weights)
    job.seal(version.name, 0, weights)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    for step in itertools.count(2):  # until the signal is heard
        early: list[str] = []
        refusal = reason(lambda step=step, early=early: early.append(job.begin(step).name))
        if refusal == "DRAINING":
            break
        assert refusal == ""
        assert time.monotonic() < deadline
        job.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=early[0], epoch=job.epoch, reason="a test"))
        time.sleep(0.1)
    job.upload(version.number, 1, weights)
    job.seal(version.name, 1, weights)
    assert daemon.wait() == 0
    daemon.start()
    wait_connected(daemon)
    (kept,) = [found for found in job.operator.ListVersions(LIST).versions if found.state == READY]
    assert kept.step == 1
    assert_holds(kept.folder, weights)


def test_a_second_daemon_on_the_same_port_or_store_is_refused(daemon: Daemon) -> None:
    other = Daemon(port=daemon.port)
    try:
        assert other.launch().wait(60) != 0
        assert f"cannot listen on {daemon.endpoint}" in other.log.read_text()
        other.options = {"store": daemon.store}
        other.endpoint = "127.0.0.1:0"
        assert other.launch().wait(60) != 0
        assert "another process uses" in other.log.read_text()
    finally:
        other.process = None
        other.close()


@pytest.mark.full
def test_memory_outside_of_the_versions_stays_small_while_a_large_one_arrives() -> None:
    specs = [TensorSpec(f"layer{i}", "BF16", (8192, 2048)) for i in range(12)]  # 32 MiB each
    with Daemon(keep_count=1, lease_seconds=300) as daemon:  # a rank is silent while a busy machine seals
        job = Job(daemon.channel, specs, [whole(specs[:6]), whole(specs[6:])]).connect()
        most = 0
        for step in (1, 2):
            weights = {spec.name: np.full(spec.shape, step, np.uint16) for spec in specs}
            version = job.begin(step)
            with ThreadPoolExecutor(2) as ranks:
                uploads = [ranks.submit(job.upload, version.number, rank, weights) for rank in (0, 1)]
                while not all(upload.done() for upload in uploads):
                    most = max(most, anonymous_bytes(daemon.pid))
                    time.sleep(0.02)
            for rank, upload in enumerate(uploads):
                assert upload.result().received_bytes == sum(spec.size for spec in specs) // 2
                job.seal(version.name, rank, weights)
            while (ended := job.wait(version.name, 0.05)).state == resources_pb2.Version.UPLOADING:
                most = max(most, anonymous_bytes(daemon.pid))
            assert ended.state == READY, ended.reason
        assert 20 << 20 < most < 300 << 20


def test_without_shared_memory_no_client_is_told_of_a_folder() -> None:
    with Daemon(shared_memory="false") as daemon:
        job = Job(daemon.channel, SPECS, holdings()).connect()
        assert not job.create().HasField("store")
        assert job.publish(1, random_weights(SPECS, 1)).folder == ""


def test_a_client_on_the_host_finds_the_nonce(daemon: Daemon) -> None:
    access = Job(daemon.channel, SPECS, holdings()).create().store
    assert len(access.nonce) == 32
    assert Path(access.nonce_file).read_bytes() == access.nonce


def test_health_and_reflection_are_on(daemon: Daemon) -> None:
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(daemon.channel)
    (answer,) = stub.ServerReflectionInfo(iter([ask]))
    assert {"resharder.v1.PublisherService", "resharder.v1.ServerService", "resharder.v1.OperatorService"} <= {
        service.name for service in answer.list_services_response.service
    }


def test_options_come_from_flags_before_environment_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "resharderd.yaml"
    file.write_text("keep_count: 7\nlease_seconds: 3\nlisten: 127.0.0.1:1\n")
    monkeypatch.setenv("RESHARDERD_LEASE_SECONDS", "4")
    monkeypatch.setenv("RESHARDERD_LISTEN", "127.0.0.1:2")
    config = load(file, {"listen": "127.0.0.1:3"})
    assert (config.keep_count, config.lease_seconds, config.listen) == (7, 4.0, "127.0.0.1:3")
    file.write_text("keep_cuont: 7\n")
    with pytest.raises(ConfigError, match="keep_cuont: there is no such option"):
        load(file, {})


def test_a_store_on_a_disk_has_its_versions_again_after_a_kill(tmp_path: Path) -> None:
    if filesystem_of(tmp_path) in ("tmpfs", "ramfs"):
        pytest.skip(f"{tmp_path} is in memory")
    weights = {step: random_weights(SPECS, step) for step in range(8)}
    with Daemon(store=tmp_path / "store", keep_count=2, chunk_bytes=1024) as daemon:
        job = Job(daemon.channel, SPECS, holdings()).connect()
        inodes = set()
        for step in range(6):
            version = job.publish(step, weights[step])
            assert version.state == READY, version.reason
            inodes |= {path.stat().st_ino for path in Path(version.folder).glob("*.safetensors")}
        assert len(inodes) < 6, "no file was used again"
        job.begin(6)
        daemon.kill()
        daemon.start()
        wait_connected(daemon)
        listed = job.operator.ListVersions(LIST).versions
        assert [(v.step, v.state) for v in listed[:2]] == [(5, READY), (4, READY)]
        for version in listed[:2]:
            assert Path(version.folder).is_relative_to(tmp_path)
            assert_holds(version.folder, weights[version.step])
        job.connect()
        again = job.publish(7, weights[7])
        assert again.state == READY, again.reason
        assert_holds(again.folder, weights[7])


def filesystem_of(path: Path) -> str:
    return subprocess.check_output(["stat", "--file-system", "--format", "%T", str(path)], text=True).strip()


NO_LEASES = """
import errno, fcntl
call = fcntl.fcntl
def refuse(file, command, *argument):
    if command == fcntl.F_SETLEASE:
        raise OSError(errno.EINVAL, "Invalid argument")  # as NFS and FUSE answer
    return call(file, command, *argument)
fcntl.fcntl = refuse
"""


@pytest.mark.full
def test_where_the_kernel_gives_no_leases_the_daemon_refuses_to_share_the_store_and_works_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_LEASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = Daemon(store=tmp_path / "store", keep_count=2)
    try:
        assert daemon.launch().wait(60) == 1
        message = daemon.log.read_text().splitlines()[-1]
        assert message.startswith(f"resharderd: --store: {tmp_path / 'store'}: this filesystem does not report open files")
        assert message.endswith("choose another folder, or shared_memory=false")
        daemon.options["shared_memory"] = "false"
        daemon.start()
        job = Job(daemon.channel, SPECS, holdings()).connect()
        for step in range(5):
            version = job.publish(step, random_weights(SPECS, step))
            assert version.state == READY, version.reason
        assert_holds(str(tmp_path / "store/models/policy/versions" / f"{version.number:08}"), random_weights(SPECS, 4))
    finally:
        daemon.close()


FILE_ONLY = {"checks", "security"}
OPTIONS = {  # every option, with a value that is not its default
    "insecure": True, "caller_rate": 7.0, "caller_calls": 8,
    "listen": "127.0.0.1:9", "store": "/elsewhere", "store_limit_bytes": 1 << 40, "keep_count": 9, "keep_bytes": 10,
    "replicas": 3, "replica_seconds": 9.5, "hold": "none", "take_over": True, "from_nodes": True,
    "registry_key": "/etc/registry.key",
    "lease_file": "/shared/lease", "kubernetes_lease": "rl/resharder", "daemon_lease_seconds": 9.0,
    "shared_memory": False, "lease_seconds": 7.5, "chunk_bytes": 4096, "max_message_bytes": 3 << 20, "threads": 9, "transfers": 8,
    "digest_threads": 99, "drain_seconds": 1.5, "pause_mode": "wait", "log_format": "json", "log_level": "debug",
    "forget_seconds": 60.0, "archive_url": "/archive", "follow": "/other", "archive_every": 5, "archive_full_every": 3,
    "archive_keep": 4, "archive_restore": False, "check_seconds": 60.0,
    "web_listen": "127.0.0.1:10", "data_listen": "127.0.0.1:11", "data_address": "host:12",
    "direct_staging_bytes": 8 << 20, "direct_seconds": 3.0, "direct_trusted_fabric": True,
}  # fmt: skip


@pytest.mark.parametrize("way", ["flags", "environment", "file"])
def test_every_option_is_a_flag_a_variable_and_a_key_of_the_file(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OPTIONS.keys() == Config.model_fields.keys() - FILE_ONLY
    assert all(getattr(Config(), name) != value for name, value in OPTIONS.items())
    started: list[Config] = []
    monkeypatch.setattr(main, "serve", started.append)
    flags: list[str] = []
    for name, value in OPTIONS.items():
        flag = name.replace("_", "-")
        flags += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    (tmp_path / "file.yaml").write_text("\n".join(f"{name}: {value}" for name, value in OPTIONS.items()))
    if way == "environment":
        for name, value in OPTIONS.items():
            monkeypatch.setenv(f"RESHARDERD_{name.upper()}", str(value))
    arguments = {"flags": flags, "environment": [], "file": ["--config", str(tmp_path / "file.yaml")]}[way]
    ended = CliRunner().invoke(main.app, arguments)
    assert ended.exit_code == 0, ended.output
    assert [config.model_dump(mode="json", exclude=FILE_ONLY) for config in started] == [OPTIONS]


def test_the_example_configuration_and_the_page_have_every_option() -> None:
    root = Path(__file__).parents[2]
    load(root / "deploy/resharderd.yaml", {})
    named = {line.split(":")[0] for line in (root / "deploy/resharderd.yaml").read_text().splitlines() if line[:1].isalpha()}
    assert named == OPTIONS.keys() | FILE_ONLY
    page = (root / "docs/configuration.md").read_text()
    rows = {name for name in [*OPTIONS, *FILE_ONLY] if f"| `{name.upper()}` |" in page}
    assert rows == named


READY = resources_pb2.Version.READY
LIST = operator_pb2.ListVersionsRequest(model="policy")


def reason(call: Callable[[], object]) -> str:
    """The reason of its refusal; empty where it succeeds."""
    try:
        call()
    except grpc.RpcError as error:
        return reason_of(error)
    return ""


def assert_holds(folder: str, weights: dict[str, np.ndarray]) -> None:
    found = read_folder(folder)
    assert found.keys() == weights.keys()
    assert all(np.array_equal(found[name], weights[name]) for name in weights)


def wait_connected(daemon: Daemon) -> None:
    """Until the tests' long-lived channel has noticed the new process."""
    health_pb2_grpc.HealthStub(daemon.channel).Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("listen: [", "--config: .* is not a YAML file with options: "),
        ("- a list", "--config: .* is not a YAML file with options: "),
        ("no_such_option: 1", "no_such_option: there is no such option"),
        ("threads: many", "--threads: expected a valid integer, unable to parse string as an integer, got 'many'"),
    ],
)
def test_a_wrong_configuration_ends_the_daemon_with_one_line(text: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "resharderd.yaml").write_text(text)
    ended = run("resharder.server.main", "--config", str(tmp_path / "resharderd.yaml"))
    assert ended.returncode == 2, ended.output
    assert re.match(f"resharderd: {error}", ended.output)
    assert ended.output.count("\n") == 1
