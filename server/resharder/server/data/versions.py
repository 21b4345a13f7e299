"""Versions that a data port serves: READY ones of the store, or the held pieces of a node."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resharder.converters.wire.ranges import FilePart
from resharder.server.store.manifest import Manifest
from resharder.server.store.reader import VersionReader


def _lacks_nothing(part: FilePart) -> str:
    return ""


@dataclass(frozen=True)
class ServedVersion:
    """A version in `folder`, and the sizes in bytes of its safetensors files."""

    name: str
    fingerprint: str
    sizes: Mapping[str, int]
    folder: Path
    lacks: Callable[[FilePart], str] = _lacks_nothing
    """Returns why a part cannot be read yet; empty if it can."""
    manifest: Manifest | None = None
    """Its manifest, for reads of boxes; None for a node, which sends pieces only."""


class ServedVersions(Protocol):
    """Source of the versions that a data port serves."""

    def pinned(self, model: str, number: int) -> AbstractContextManager[ServedVersion]:
        """Retain a version meanwhile. Raises a DaemonError, ResourceNotFound for an unknown one."""


class StoredVersions:
    """READY versions of the store, each whole."""

    def __init__(self, reader: VersionReader) -> None:
        self._reader = reader

    @contextmanager
    def pinned(self, model: str, number: int) -> Iterator[ServedVersion]:
        """Pin a READY version meanwhile. Raises as `VersionReader.manifest` does."""
        with self._reader.folder(model, number) as (manifest, folder):
            sizes = {file.path: file.size for file in manifest.files}
            yield ServedVersion(manifest.record.name, manifest.record.fingerprint, sizes, folder, manifest=manifest)
