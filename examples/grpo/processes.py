"""The daemon and the vLLM server of the job, as processes that end with their block."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import ProxyHandler, build_opener

import grpc

START_SECONDS = 500.0
ON_CPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
"""Environment with which vLLM starts on two cores without a network."""


class ProcessFailed(RuntimeError):
    """A process ended, or did not become ready in time; with the end of its log."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    """Run a daemon with its store in shared memory, and yield its endpoint."""
    endpoint = f"127.0.0.1:{free_port()}"
    with TemporaryDirectory(prefix="resharder-grpo-", dir="/dev/shm") as store:
        options = ["--listen", endpoint, "--web-listen", "", "--data-listen", "127.0.0.1:0", "--store", f"{store}/store"]
        with (
            process([*program("resharder.server.main"), *options], folder / "daemon.log"),
            grpc.insecure_channel(endpoint) as channel,
        ):
            grpc.channel_ready_future(channel).result(60)
            yield endpoint


@contextmanager
def vllm_server(config: Path, options: list[str], endpoint: str, port: int, plugin: dict[str, str]) -> Iterator[None]:
    """Run a vLLM server of this config, whose weights come from the daemon. It is ready."""
    small = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--kv-cache-memory-bytes", "64M"]
    command = [*program("vllm.entrypoints.openai.api_server"), "--model", str(config), "--port", str(port), *small, *options]
    environment = ON_CPU | {"RESHARDER_ENDPOINT": endpoint, "VLLM_PLUGINS": "resharder"} | plugin
    log = config.parent / "server.log"
    with process(command, log, environment) as server:
        deadline = time.monotonic() + START_SECONDS
        while not healthy(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise ProcessFailed(f"the vLLM server is not ready:\n{log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.2)
        yield


def program(module: str) -> list[str]:
    return [sys.executable, "-m", module]


@contextmanager
def process(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end it at the end of the block: SIGTERM, after 30 seconds SIGKILL."""
    with log.open("wb") as output:
        running = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | (environment or {}))
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()


def healthy(port: int) -> bool:
    near = build_opener(ProxyHandler({}))  # no proxy of the environment
    with suppress(OSError), near.open(f"http://127.0.0.1:{port}/health", timeout=5):
        return True
    return False
