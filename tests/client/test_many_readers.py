"""More readers than the data port has connections: each of them gets its bytes, and none of them fails."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from resharder.client.versions.manifest import VersionManifest
from resharder.client.versions.port_reader import PortConnection
from resharder.client.versions.read_plan import FileRange
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.range_client import DataAddress
from resharder.server.data.connection import DataConnection, DataReads
from resharder.server.data.port import DataPort
from resharder.server.data.versions import ServedVersion
from resharder.server.security import web
from resharder.server.security.settings import Security

from tests.support.secure import Authority

READERS, PLACES, SIZE = 12, 4, 3 << 20
PATIENCE = 0.5  # seconds; much less than a reader waits for its turn


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_more_readers_than_connections_all_read_their_bytes(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = np.random.default_rng(1).bytes(SIZE)
    (tmp_path / "file").write_bytes(content)
    authority = Authority(tmp_path / "pki")
    context = web.tls_context(
        Security(
            certificate=authority.folder / "daemon.pem",
            key=authority.folder / "daemon.key",
            tokens=authority.tokens,
            client_ca=None,
            roles={},
        ),
        required=True,
    )
    refused = threading.Event()

    @contextmanager
    def reading(spans: object) -> Iterator[None]:
        refused.wait(5)  # all places are taken until a reader was refused
        yield

    refuse = DataConnection._refuse
    monkeypatch.setattr(DataConnection, "_refuse", lambda *answer: (refused.set(), refuse(*answer)))
    version = ServedVersion("models/m/versions/1", "f", {"file": SIZE}, tmp_path, reading)
    versions = SimpleNamespace(pinned=lambda *_, **__: nullcontext(version))
    reads = DataReads(versions, lambda *caller: nullcontext(), local_only=True)  # type: ignore[arg-type]
    port = DataPort("127.0.0.1", 0, reads, context if secure else None, most=PLACES)
    address = DataAddress("127.0.0.1", port.port, authority.tls().context if secure else None)
    manifest = VersionManifest(version.name, 1, "f", "", {}, {}, (FileLayout("file", b"", SIZE, ()),))

    def read(reader: int) -> bytes:
        opened = PortConnection(SimpleNamespace(address=address, manifest=manifest), PATIENCE)  # type: ignore[arg-type]
        target = np.zeros(SIZE, np.uint8)
        for start in range(0, SIZE, 1 << 20):
            opened.read_range(FileRange(0, start, start + (1 << 20)), target[start : start + (1 << 20)])
        opened.close()
        return target.tobytes()

    try:
        with ThreadPoolExecutor(READERS) as readers:
            assert all(found == content for found in readers.map(read, range(READERS)))
    finally:
        port.close()
