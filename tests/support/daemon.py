"""A real `resharderd` process on a free port, with its store in a new folder in shared memory, or in `store`.

with Daemon() as daemon:
    publishers = PublisherServiceStub(daemon.channel)
    daemon.kill(); daemon.start()   # SIGKILL, then the same port and store again
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.forked import ForkedProcess, start
from tests.support.ports import free_port
from tests.support.supervised import shared_memory

LEASE_SECONDS = 60.0  # a loaded machine may suspend a test and its clients for many seconds

_RECONNECTS = [
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 200),
]


class Daemon:
    """Daemon process. `options` become its environment: `keep_count=2` is RESHARDERD_KEEP_COUNT=2; None: not set.

    `command` wraps its command line, as for a network namespace, of which `host` is the address. `program`: that of another
    environment, in place of this one's.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        umask: int = -1,
        store: Path | None = None,
        command: tuple[str, ...] = (),
        program: Path | None = None,
        **options: object,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="resharder-test-", dir=shared_memory()))
        self.store = store or self.folder / "store"
        self.log = self.folder / "log"
        self.port = port or free_port()
        self.endpoint = f"{host}:{self.port}"
        self.environment: dict[str, str] = {}  # besides the options
        self.options = {"lease_seconds": LEASE_SECONDS} | options
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        own = (sys.executable, "-m", "resharder.server.main") if command else ()
        self._umask, self._command = umask, [*command, *((program,) if program else own)]
        self._channel: grpc.Channel | None = None

    def connect(self, options: list[tuple[str, int]]) -> grpc.Channel:
        return grpc.insecure_channel(self.endpoint, options=options)

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = self.connect([("grpc.max_receive_message_length", -1), *_RECONNECTS])
        return self._channel

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError("the daemon is not running")
        return self.process.pid

    def start(self, *, failpoint: str = "", timeout: float = 300) -> "Daemon":
        """Start the process; return once its health service reports SERVING. `failpoint`: see `converters.failpoints`."""
        self.launch(failpoint=failpoint)
        deadline = time.monotonic() + timeout
        with self.connect([("grpc.use_local_subchannel_pool", 1), *_RECONNECTS]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                if self.process is None or self.process.poll() is not None:
                    raise RuntimeError(f"the daemon ended at once:\n{self.log.read_text()}")
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return self
        raise TimeoutError(f"the daemon was not healthy in {timeout} s:\n{self.log.read_text()}")

    def launch(self, *, failpoint: str = "") -> subprocess.Popen[bytes] | ForkedProcess:
        """Start the process without waiting: forked, unless it has a command line of its own."""
        host = self.endpoint.rpartition(":")[0]
        options = {"listen": self.endpoint, "web_listen": "", "data_listen": f"{host}:0", "store": self.store, **self.options}
        environment = {f"RESHARDERD_{key.upper()}": str(value) for key, value in options.items() if value is not None}
        if failpoint:
            environment["RESHARDER_FAILPOINT"] = failpoint
        with self.log.open("ab") as log:
            environment = os.environ | environment | self.environment
            if self._command:
                self.process = subprocess.Popen(self._command, env=environment, stdout=log, stderr=log, umask=self._umask)
            else:
                self.process = start("resharder.server.main", environment, log, self._umask)
        return self.process

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end(signal.SIGKILL, 60)

    def stop(self, timeout: float = 300) -> int:
        """Send SIGTERM, and return the exit status."""
        return self._end(signal.SIGTERM, timeout)

    def wait(self, timeout: float = 300) -> int:
        """Wait until the process ends by itself, and return its exit status."""
        return self._end(None, timeout)

    def _end(self, sign: signal.Signals | None, timeout: float) -> int:
        if self.process is None:
            raise RuntimeError("the daemon is not running")
        if sign is not None:
            self.process.send_signal(sign)
        status = self.process.wait(timeout)
        self.process = None
        return status

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "Daemon":
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
