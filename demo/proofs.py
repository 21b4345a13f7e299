"""Independent checks of the daemon and of exported folders."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, read_layout
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon


@dataclass(frozen=True)
class Proven:
    """Install that every worker has confirmed."""

    size_bytes: int
    stage_seconds: float
    apply_seconds: float
    pause_seconds: float
    verified_tensors: int


def installed(daemon: Daemon, version: int, timeout: float = 60) -> Proven:
    """Wait until the only server serves `version`. Raises TimeoutError with the server's reason."""
    operators = operator_pb2_grpc.OperatorServiceStub(daemon.channel)
    end = time.monotonic() + timeout
    while True:
        (server,) = operators.ListServers(operator_pb2.ListServersRequest()).servers
        committed = server.install.state == resources_pb2.Install.COMMITTED and server.install.pause_seconds > 0
        if server.version == version and server.state == resources_pb2.Server.SERVING and committed:
            break
        if time.monotonic() > end:
            raise TimeoutError(f"expected version {version} to be served within {timeout} s, the server is: {server}")
        time.sleep(0.02)
    info = operators.GetVersion(operator_pb2.GetVersionRequest(version=f"models/policy/versions/{version}"))
    return Proven(
        size_bytes=info.size_bytes,
        stage_seconds=max(worker.stage_seconds for worker in server.workers),
        apply_seconds=max(worker.apply_seconds for worker in server.workers),
        pause_seconds=server.install.pause_seconds,
        verified_tensors=min(worker.verified_tensors for worker in server.workers),
    )


def export(daemon: Daemon, version: int, folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    resharder("export", str(version), folder, endpoint=daemon.endpoint)


def digests_equal(daemon: Daemon, version: int, folder: Path) -> bool:
    """Return whether the exported folder has exactly the version's tensors, each with the digest that the ranks published."""
    servers = server_pb2_grpc.ServerServiceStub(daemon.channel)
    manifest = servers.GetManifest(server_pb2.GetManifestRequest(version=f"models/policy/versions/{version}"))
    published = {tensor.spec.name: tensor.digest for tensor in manifest.tensors}
    with MappedFiles(folder, read_layout(folder)) as mapped:
        found = {name: digest(array, full_box(array.shape), array.shape) for name, array in mapped.arrays.items()}
    return found == published


def resharder(*arguments: str | Path, endpoint: str) -> None:
    """Run the `resharder` command. Raises CalledProcessError."""
    command = [sys.executable, "-m", "resharder.client", *map(str, arguments), "--json"]
    subprocess.run(command, env=os.environ | {"RESHARDER_ENDPOINT": endpoint}, check=True, stdout=subprocess.DEVNULL)
