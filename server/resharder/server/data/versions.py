"""Versions that a data port serves: READY ones of the store, or the held pieces of a node."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from resharder.converters.wire.ranges import FilePart
from resharder.server.store.manifest import Manifest
from resharder.server.store.partial import PartialVersion
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
    """Returns why a part cannot be read yet; empty if it can. May raise a DaemonError instead."""
    manifest: Manifest | None = None
    """Its manifest, for reads of boxes; None for a node, which sends pieces only."""
    partial: PartialVersion | None = None
    """Pieces that the store lacks; None for a whole version, and for a node."""


class ServedVersions(Protocol):
    """Source of the versions that a data port serves."""

    def pinned(self, model: str, number: int, *, replicates: bool) -> AbstractContextManager[ServedVersion]:
        """Retain a version meanwhile. Raises a DaemonError, ResourceNotFound for an unknown one.

        `replicates`: whether the reader may read one that nodes replicate before READY.
        """


class StoredVersions:
    """READY versions of the store. Reads of pieces that it lacks raise Unavailable (PIECES_ELSEWHERE)."""

    def __init__(self, reader: VersionReader) -> None:
        self._reader = reader

    @contextmanager
    def pinned(self, model: str, number: int, *, replicates: bool) -> Iterator[ServedVersion]:
        """Pin a READY version meanwhile. Of one that nodes replicate before READY, pieces alone can be read, and by nodes alone.

        Raises as `VersionReader.manifest` does.
        """
        if replicates and (verified := self._reader.verified.get(model, number)) is not None:
            record, files = verified.manifest.record, verified.manifest.files
            yield ServedVersion(record.name, record.fingerprint, {file.path: file.size for file in files}, verified.folder)
            return
        with self._reader.folder(model, number) as (manifest, folder):
            sizes, record = {file.path: file.size for file in manifest.files}, manifest.record
            partial = self._reader.partial(model, number)
            lacks = partial.lacks if partial is not None else _lacks_nothing
            yield ServedVersion(record.name, record.fingerprint, sizes, folder, lacks, manifest, partial)
