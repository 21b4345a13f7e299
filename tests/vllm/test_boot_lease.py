"""A server that boots keeps its claim for as long as it lives, and is LOST a lease after it dies; helpers die with it."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from resharder.client.inference.worker.claim import Renewal
from resharder.client.operator import Operator, answers
from resharder.v1 import resources_pb2

from tests.client.models import connected, publish_all, weights
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.simulated_server import SimulatedServer

LEASE = 8.0
Server = resources_pb2.Server


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(lease_seconds=LEASE) as running:
        publishers = connected(running.endpoint, 1, "boots")
        publish_all(publishers, 1, weights(1))[0].wait_ready(60)
        publishers[0].close()
        yield running


def test_a_helper_starts_where_many_descriptors_are_open(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT": daemon.endpoint, "SERVER_ID": "many", "MODEL": "policy"}.items():
        monkeypatch.setenv(f"RESHARDER_{name}", value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(open(os.devnull, "rb"))
            Renewal().close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def booting(daemon: Daemon, server: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": server, "RESHARDER_MODEL": "policy"}
    command = [sys.executable, "-m", "tests.vllm.booting_process", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "booting\n"
            yield process
        finally:
            process.kill()


def state(operator: Operator, server: str) -> answers.Server.State:
    return operator.server(server).state


@pytest.mark.full
def test_a_server_that_loads_for_many_leases_is_kept_and_a_killed_one_is_waited_for_no_longer(daemon: Daemon) -> None:
    with Operator(daemon.endpoint) as operator, SimulatedServer(daemon, "serves"), booting(daemon, "boots") as process:
        end = time.monotonic() + 2 * LEASE
        while time.monotonic() < end:
            assert state(operator, "boots") == answers.Server.State.BOOTING, operator.server("boots").reason
            time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        operator.wait_serving("policy", timeout=120)
        assert state(operator, "boots") == answers.Server.State.LOST
        assert "its claim was not renewed" in operator.server("boots").reason


@pytest.mark.full
def test_a_booting_server_is_known_again_to_a_daemon_that_was_restarted(daemon: Daemon) -> None:
    with Operator(daemon.endpoint) as operator, booting(daemon, "stays"):
        daemon.kill()
        daemon.start()
        wait_until(lambda: "servers/stays" in [server.name for server in operator.servers()], "the helper claims again")
        time.sleep(1.5 * LEASE)
        assert state(operator, "stays") == answers.Server.State.BOOTING


@pytest.mark.full
def test_the_claim_of_a_release_that_does_not_renew_lasts_as_before(daemon: Daemon) -> None:
    with Operator(daemon.endpoint) as operator, booting(daemon, "older", "unrenewed") as process:
        process.kill()
        process.wait()
        time.sleep(1.5 * LEASE)
        assert state(operator, "older") == answers.Server.State.BOOTING


@pytest.mark.parametrize(
    "helper",
    [
        "from resharder.client.inference.worker import fetch; fetch.main()",
        "from resharder.client.inference.worker import claim; claim.main()",
    ],
)
def test_a_helper_ends_with_its_killed_parent(helper: str, daemon: Daemon) -> None:
    # The test holds the helper's standard input open, so that nothing but the parent's end ends it.
    reading, writing = os.pipe()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, threading, time\n"
            f"command = [sys.executable, '-c', {helper!r}, str(os.getpid()), {daemon.endpoint!r}]\n"
            "thread = threading.Thread(target=lambda: print(subprocess.Popen(command).pid, flush=True))\n"
            "thread.start(); thread.join()\n"  # the helper outlives the thread that made it
            "time.sleep(600)",
        ],
        stdin=reading,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_SERVER_ID": "s"},
    )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(2)
        assert alive(child)
        parent.kill()
        parent.wait()
        wait_until(lambda: not alive(child), "the helper ends")
    finally:
        parent.kill()
        os.close(writing)
        os.close(reading)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
