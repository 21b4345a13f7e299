"""A real `resharder-node` process, with its folder in shared memory.

with Node(daemon.endpoint, "one") as node:
    node.kill(); node.start()   # SIGKILL, then the same name and folder again
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TypeVar

from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2

from tests.support.daemon import Daemon
from tests.support.forked import ForkedProcess, start
from tests.support.observing import wait_until
from tests.support.supervised import shared_memory

D = TypeVar("D", bound=Daemon)


class Node:
    """Node process. `options` become its environment; `command` wraps its command line, as for a network namespace.

    `program`: that of another environment, in place of this one's.
    """

    def __init__(
        self, endpoint: str, name: str, *, command: tuple[str, ...] = (), program: Path | None = None, **options: object
    ) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="resharder-node-test-", dir=shared_memory()))
        self.folder, self.log, self.name = self.root / "node", self.root / "log", name
        own = (sys.executable, "-m", "resharder.server.node.main") if command else ()
        self._command = [*command, *((program,) if program else own)]
        self._options = {"endpoint": endpoint, "name": name, "folder": self.folder, "listen": "127.0.0.1:0"} | options
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def start(self, *, failpoint: str = "", environment: Mapping[str, str] = MappingProxyType({})) -> "Node":
        """Start the process."""
        given = {f"RESHARDER_NODE_{key.upper()}": str(value) for key, value in self._options.items()} | dict(environment)
        if failpoint:
            given["RESHARDER_FAILPOINT"] = failpoint
        with self.log.open("ab") as log:
            if self._command:
                self.process = subprocess.Popen(self._command, env=os.environ | given, stdout=log, stderr=log)
            else:
                self.process = start("resharder.server.node.main", os.environ | given, log)
        return self

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self._end(signal.SIGKILL)

    def send_signal(self, sign: signal.Signals) -> None:
        """Send a signal."""
        assert self.process is not None
        self.process.send_signal(sign)

    def stop(self) -> int:
        """Send SIGTERM, and return the exit status."""
        return self._end(signal.SIGTERM)

    def wait(self, timeout: float = 60) -> int:
        """Wait until the process ends by itself, and return its exit status."""
        assert self.process is not None
        status = self.process.wait(timeout)
        self.process = None
        return status

    def _end(self, sign: signal.Signals) -> int:
        self.send_signal(sign)
        return self.wait()

    def copy_of(self, version: str) -> Path:
        """Return the folder of a version."""
        _, model, _, number = version.split("/")
        (folder,) = (self.folder / "versions" / model).glob(f"{int(number):08}-*")
        return folder

    def files(self, version: str) -> dict[str, bytes]:
        """Return the content of a version's files."""
        return {path.name: path.read_bytes() for path in self.copy_of(version).glob("*.safetensors")}

    def __enter__(self) -> "Node":
        return self if self.process is not None else self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process, and remove its folder."""
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.root, ignore_errors=True)


def patient(daemon: D) -> D:
    """Let a daemon wait a minute for nodes to lay out files before ranks take another way, and return it."""
    folder = Path(__file__).with_name("patient_daemon")
    daemon.environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return daemon


def stored_files(daemon: Daemon, version: str) -> dict[str, bytes]:
    """The content of a version's files in the daemon's store."""
    _, model, _, number = version.split("/")
    folder = daemon.store / f"models/{model}/versions/{int(number):08}"
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def nodes(daemon: Daemon) -> dict[str, resources_pb2.Node]:
    """All nodes by name."""
    stub = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    return {node.name: node for node in stub.ListNodes(operator_pb2.ListNodesRequest()).nodes}


def wait_live(daemon: Daemon, *names: str) -> None:
    """Wait until these nodes are live."""

    def live() -> bool:
        found = nodes(daemon)
        return all(f"nodes/{name}" in found and found[f"nodes/{name}"].state == resources_pb2.Node.LIVE for name in names)

    wait_until(live)


def holds(daemon: Daemon, name: str, version: str) -> bool:
    """Whether a node has reported all that is needed of a version on its host."""
    copies = {copy.version: copy for copy in nodes(daemon)[f"nodes/{name}"].copies}
    return version in copies and copies[version].held_pieces == copies[version].wanted_pieces > 0
