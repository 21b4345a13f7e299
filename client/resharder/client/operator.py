"""The operator SDK: what is where, and copies of it.

    with Operator("daemon:7677") as operator:
        for version in operator.versions("policy"):
            print(version.number, version.step)
        operator.export("policy", 12, Path("checkpoint"))

Answers are the messages of `resharder.v1`.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import xxhash
from resharder.client.channel import Channel
from resharder.client.errors import CorruptData, NotFound, UsageError
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2, server_pb2, server_pb2_grpc

Version = resources_pb2.Version
_PAGE = 500


class Exported(NamedTuple):
    version: resources_pb2.Version
    folder: Path
    files: int
    bytes: int


class Operator:
    """A connection to one daemon. `patience`: seconds to try while it cannot be reached."""

    def __init__(self, endpoint: str | None = None, patience: float = 3.0) -> None:
        where = endpoint or os.environ.get("RESHARDER_ENDPOINT")
        if not where:
            raise UsageError("expected the daemon's endpoint, got none: pass --endpoint host:port or set RESHARDER_ENDPOINT")
        self._channel = Channel(where, patience)
        self._stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)

    @property
    def endpoint(self) -> str:
        return self._channel.endpoint

    def daemon(self) -> operator_pb2.Daemon:
        answer: operator_pb2.Daemon = self._channel.call(self._stub.GetDaemon, operator_pb2.GetDaemonRequest())
        return answer

    def clock_difference(self) -> float:
        """Seconds that the daemon's clock is ahead of this host's, known to half a round trip."""
        self.daemon()  # the connection's own time is not a round trip's
        before = time.time()
        there = self.daemon().time
        return float(there.seconds + there.nanos / 1e9 - (before + time.time()) / 2)

    def versions(self, model: str = "") -> list[resources_pb2.Version]:
        """Of one model, or of all."""
        return list(self._pages(self._stub.ListVersions, operator_pb2.ListVersionsRequest(model=model), "versions"))

    def version(self, name: str) -> resources_pb2.Version:
        answer: resources_pb2.Version = self._channel.call(self._stub.GetVersion, operator_pb2.GetVersionRequest(version=name))
        return answer

    def servers(self, fleet: str = "") -> list[resources_pb2.Server]:
        return list(self._pages(self._stub.ListServers, operator_pb2.ListServersRequest(fleet=fleet), "servers"))

    def fleets(self) -> list[resources_pb2.Fleet]:
        return list(self._pages(self._stub.ListFleets, operator_pb2.ListFleetsRequest(), "fleets"))

    def find_version(self, wanted: str, model: str = "") -> resources_pb2.Version:
        """`wanted`: a number, `latest`, or models/{model}/versions/{number}. Raises NotFound, UsageError."""
        if wanted.startswith("models/"):
            return self.version(wanted)
        model = model or self.only_model()
        if wanted.isdigit():
            return self.version(f"models/{model}/versions/{int(wanted)}")
        if wanted != "latest":
            raise UsageError(f"expected a version's number, `latest` or models/MODEL/versions/NUMBER, got {wanted!r}")
        ready = [version for version in self.versions(model) if version.state == Version.READY]
        if not ready:
            raise NotFound(f"model {model!r} has no READY version yet")
        return max(ready, key=lambda version: version.number)

    def only_model(self) -> str:
        """The daemon's model, where it has just one. Raises UsageError."""
        models = list(self.daemon().models)
        if len(models) != 1:
            raise UsageError(f"expected a model's name, the daemon has {', '.join(models) or 'none'}: pass --model")
        return str(models[0])

    def export(
        self, version: resources_pb2.Version, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Exported:
        """Writes a READY version into `folder`, whole or not at all: as `from_pretrained` opens it.

        `progress(bytes so far, bytes expected)` is told of every part. Raises UsageError for a folder that is not empty,
        CorruptData for a wrong checksum, NotFound.
        """
        with _appearing(folder) as beside:
            request = operator_pb2.ExportVersionRequest(version=version.name)
            parts = self._channel.stream(self._stub.ExportVersion(request, timeout=24 * 3600))
            files, size = _write_parts(beside, parts, lambda done: progress(done, max(done, version.size_bytes)))
        return Exported(version, folder, files, size)

    def fetch_config(self, model: str, folder: Path) -> list[str]:
        """Writes config.json and the tokenizer's files for `vllm serve FOLDER`; their names. Raises UsageError, NotFound."""
        stub = server_pb2_grpc.ServerServiceStub(self._channel.grpc)
        found = self._channel.call(stub.GetModel, server_pb2.GetModelRequest(model=model))
        with _appearing(folder) as beside:
            for file in found.files:
                _write_synced(beside / _plain_name(file.path), file.content)
        return [file.path for file in found.files]

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Operator":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _pages(self, method: Callable[..., Any], request: Any, field: str) -> Iterator[Any]:
        request.page_size = _PAGE
        while True:
            answer = self._channel.call(method, request)
            yield from getattr(answer, field)
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when all went well."""
    folder = folder.absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"expected a new or an empty folder, {folder} is {'not empty' if folder.is_dir() else 'a file'}")
    if not folder.parent.is_dir():
        raise UsageError(f"expected a folder to write into, {folder.parent} does not exist")
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UsageError(f"expected to write into {folder.parent}: {error.strerror}") from error
    try:
        yield beside
        beside.chmod(0o755)
        beside.rename(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    _sync_folder(folder.parent)


def _write_parts(folder: Path, parts: Iterator[operator_pb2.FilePart], progress: Callable[[int], None]) -> tuple[int, int]:
    """(files, bytes). Parts of a file come one after the other."""
    sizes: dict[Path, int] = {}
    written = 0
    for part in parts:
        path = folder / _plain_name(part.path)
        if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
            raise CorruptData(f"{part.path}: {len(part.data)} bytes at {part.offset} arrived other than they were sent")
        with path.open("r+b" if path in sizes else "xb") as file:
            file.seek(part.offset)
            file.write(part.data)
        sizes[path] = part.size_bytes
        written += len(part.data)
        progress(written)
    for path, size in sizes.items():
        if path.stat().st_size != size:
            raise CorruptData(f"{path.name}: expected {size} bytes, got {path.stat().st_size}")
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)
    if written != sum(sizes.values()):
        raise CorruptData(f"expected {sum(sizes.values())} bytes in {len(sizes)} files, got {written}")
    return len(sizes), written


def _plain_name(path: str) -> str:
    if not path or path != Path(path).name or path.startswith("."):
        raise CorruptData(f"expected a plain file name from the daemon, got {path!r}")
    return path


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
