"""Verified versions that are not READY yet: nodes replicate them first. No call names them to a worker."""

import threading
from pathlib import Path
from typing import NamedTuple

from resharder.server.store.manifest import Manifest


class VerifiedVersion(NamedTuple):
    """An UPLOADING version whose bytes are verified and whose manifest, as of the READY version, is written in `folder`."""

    manifest: Manifest
    folder: Path

    @property
    def name(self) -> str:
        """Resource name."""
        return self.manifest.record.name


class VerifiedVersions:
    """Versions that nodes replicate now. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._found = threading.Lock(), dict[str, VerifiedVersion]()

    def get(self, model: str, number: int) -> VerifiedVersion | None:
        """Return a version; None for any other, also once it is READY."""
        with self._lock:
            return self._found.get(f"models/{model}/versions/{number}")

    def add(self, version: VerifiedVersion) -> None:
        """Let nodes read a version until it is removed."""
        with self._lock:
            self._found[version.name] = version

    def remove(self, name: str) -> None:
        """Remove a version that is READY or ABORTED. A no-op for any other."""
        with self._lock:
            self._found.pop(name, None)
