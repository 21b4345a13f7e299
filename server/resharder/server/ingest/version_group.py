"""Versions that become READY together: those of one step, one of each model that a job publishes together."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from resharder.server.ingest.upload import Proof, Upload

GroupKey = tuple[str, int, frozenset[str]]
"""Job, step and models."""


def key_of(upload: Upload) -> GroupKey:
    """Return the group of a version: its own model alone unless its publisher names others."""
    publisher = upload.publisher
    return publisher.job, upload.record.step, frozenset({publisher.model, *publisher.together})


@dataclass
class VersionGroup:
    """UPLOADING versions of one step, guarded by ingest's lock. A version may have begun later than the others, or never."""

    models: frozenset[str]
    uploads: dict[str, Upload] = field(default_factory=dict)
    proofs: dict[str, Proof] = field(default_factory=dict)  # of verified versions, by model

    def add(self, upload: Upload) -> None:
        """Add a version that has begun."""
        self.uploads[upload.record.model] = upload

    def remove(self, upload: Upload) -> None:
        """Remove a version that is no longer UPLOADING; a no-op if another one has replaced it."""
        if self.uploads.get(upload.record.model) is upload:
            del self.uploads[upload.record.model]
            self.proofs.pop(upload.record.model, None)

    def prove(self, upload: Upload, proof: Proof) -> list[Upload]:
        """Record a verified version. Return all versions of the group once all are verified, else none."""
        if self.uploads.get(upload.record.model) is not upload:
            return []
        self.proofs[upload.record.model] = proof
        return list(self.uploads.values()) if self.proofs.keys() == self.models else []

    def open_ranks(self, world_size: int, among: Iterable[int] | None = None) -> list[int]:
        """Return the ranks that have not sealed their slots of all versions, of `among` or of all."""
        asked = range(world_size) if among is None else list(among)
        if len(self.uploads) < len(self.models):
            return list(asked)
        found = {rank for upload in self.uploads.values() for rank in upload.open_ranks(asked)}
        return sorted(found)


class VersionGroups:
    """Groups of all UPLOADING versions. Thread-safe. `lock`: ingest's, which is reentrant."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._groups = lock, dict[GroupKey, VersionGroup]()

    def _of(self, upload: Upload) -> VersionGroup:
        key = key_of(upload)
        return self._groups.get(key) or VersionGroup(key[2])

    def add(self, upload: Upload) -> None:
        """Add a version that has begun."""
        with self._lock:
            self._groups.setdefault(key_of(upload), self._of(upload)).add(upload)

    def remove(self, upload: Upload) -> None:
        """Remove a version that is no longer UPLOADING."""
        with self._lock:
            group = self._of(upload)
            group.remove(upload)
            if not group.uploads:
                self._groups.pop(key_of(upload), None)

    def prove(self, upload: Upload, proof: Proof) -> list[tuple[Upload, Proof]]:
        """Record a verified version. Return all versions of its group with their proofs once all are verified, else none."""
        with self._lock:
            group = self._of(upload)
            return [(each, group.proofs[each.record.model]) for each in group.prove(upload, proof)]

    def others(self, upload: Upload) -> list[Upload]:
        """Return the other UPLOADING versions of a version's group."""
        with self._lock:
            return [other for other in self._of(upload).uploads.values() if other is not upload]

    def open_ranks(self, upload: Upload, among: Iterable[int] | None = None) -> list[int]:
        """Return the ranks that have yet to seal a slot before the version can be READY, of `among` or of all."""
        with self._lock:
            return self._of(upload).open_ranks(upload.publisher.world_size, among)
