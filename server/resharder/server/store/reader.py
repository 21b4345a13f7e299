"""Reads of READY versions, of verified ones that nodes read before, and of models' small files."""

import errno
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from resharder.converters.checkpoint_files import folder_names
from resharder.converters.failpoints import failpoint
from resharder.converters.hf_config import described, differences
from resharder.converters.json_input import parse_json
from resharder.converters.storage.files import INDEX_FILE, MappedFiles
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.infra.filesystem import touching
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import DaemonError, ResourceNotFound
from resharder.server.state.version import ABORTED, READY, UPLOADING, VersionRecord
from resharder.server.store import manifest, model_files
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.folder import StoreFolder
from resharder.server.store.lifecycle import VersionLifecycle, gone
from resharder.server.store.manifest import MANIFEST_FILE, Manifest, ManifestCache
from resharder.server.store.partial import VerifiedVersion

PATIENCE = 5.0
Borrow = Callable[[VerifiedVersion, Collection[PieceSpan]], AbstractContextManager[None]]
"""Function that has bytes of a version in its files meanwhile. Raises Unavailable (PIECES_ELSEWHERE)."""


class VersionReader:
    """Reads of versions, each pinned meanwhile. Thread-safe; files are read without the lock.

    `patience`: seconds for which a read waits for bytes that are being fetched from nodes.
    """

    def __init__(
        self,
        folder: StoreFolder,
        catalogue: Catalogue,
        lifecycle: VersionLifecycle,
        manifests: ManifestCache,
        patience: float = PATIENCE,
    ) -> None:
        self._folder, self._catalogue, self._lifecycle, self._manifests = folder, catalogue, lifecycle, manifests
        self._patience = patience
        self.borrow: Borrow | None = None
        """Brings bytes that a store which holds no versions lacks; None for a store that holds them."""

    @medium_errors()
    def manifest(self, name: str, number: int) -> Manifest:
        """Return the manifest of a READY version.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN, VERSION_GONE), Unavailable (STORE_FAILED), ResourceExhausted
        (NO_DESCRIPTORS).
        """
        with self._pinned(name, number, "manifest") as record:
            with self._catalogue.changed:
                known = self._manifests.get(name, number)
            if known is None:
                with touching(self._folder.path(record), "reading"):
                    known = manifest.read(self._folder.path(record))
                with self._catalogue.changed:
                    self._manifests.add(name, number, known)
            return known

    @contextmanager
    def open(self, name: str, number: int, tensors: Collection[str] | None = None) -> Iterator[MappedFiles]:
        """Map a READY version read-only, once the store has the bytes of some tensors, or with None all bytes.

        Only these tensors may be read. Arrays must not outlive the context. Raises as `manifest` does, and Unavailable
        (PIECES_ELSEWHERE) if the bytes have not been fetched from nodes after some seconds.
        """
        with self._pinned(name, number, "reader") as record:
            found = self.manifest(name, number)
            names = found.specs if tensors is None else tensors
            spans = found.spans_of(names) if self.partial(name, number) is not None else ()
            with self.reading(name, number, spans), MappedFiles(self._folder.path(record), found.files) as files:
                yield files

    @contextmanager
    def reading(self, name: str, number: int, spans: Collection[PieceSpan], patience: float | None = None) -> Iterator[None]:
        """Have bytes of a READY version's files in its folder meanwhile.

        Raises ResourceNotFound (VERSION_GONE), Unavailable (PIECES_ELSEWHERE) if they have not come from nodes in some seconds.
        """
        partial = self.partial(name, number)
        with self._unless_gone(name, number):
            if partial is None:
                record = self._catalogue.get(name, number)
                if record.is_lost or record.state == ABORTED:  # it lacks bytes, and is partial no longer
                    raise gone(record)
                yield
            elif self.borrow is not None:
                with self.borrow(partial, spans):
                    yield
            else:
                partial.await_bytes(spans, self._patience if patience is None else patience)
                yield

    def await_whole(self, name: str, number: int) -> None:
        """Wait until the store has all bytes of a READY version, unless it borrows them from nodes as they are read.

        Raises ResourceNotFound (VERSION_GONE), Unavailable (PIECES_ELSEWHERE).
        """
        if (partial := self.partial(name, number)) is not None and self.borrow is None:
            partial.await_bytes(None, self._patience)

    def verified(self, name: str, number: int) -> VerifiedVersion | None:
        """Return a version that waits for READY, or a READY one that lacks pieces; None for any other."""
        model = self._catalogue.find(name)
        return model.verified.get(number) if model is not None else None

    def waiting(self, name: str, number: int) -> VerifiedVersion | None:
        """Return a version that waits for READY, which holders fetch now; None for any other."""
        found = self.verified(name, number)
        return found if found is not None and self._catalogue.get(name, number).state == UPLOADING else None

    def partial(self, name: str, number: int) -> VerifiedVersion | None:
        """Return a version of which the store lacks pieces, READY or soon READY; None for any other."""
        found = self.verified(name, number)
        return found if found is not None and found.is_partial else None

    @contextmanager
    def folder(self, name: str, number: int) -> Iterator[tuple[Manifest, Path]]:
        """Pin a READY version meanwhile, and yield its manifest and folder. Raises as `manifest` does.

        Readers of the folder's files have to ask `partial` first which bytes are there.
        """
        with self._pinned(name, number, "reader") as record:
            yield self.manifest(name, number), self._folder.path(record)

    @medium_errors()
    def config(self, name: str, number: int) -> bytes:
        """Return the config.json of a version that is READY or UPLOADING, or the adapter_config.json of an adapter.

        Empty if the version has just ended. Raises as `manifest` does.
        """
        record = self._catalogue.get(name, number)
        file = self._folder.path(record) / folder_names(record.base).config
        with touching(file, "reading"):
            try:
                return file.read_bytes()
            except FileNotFoundError:
                return b""

    def config_change(self, record: VersionRecord) -> str:
        """Return how the config.json of a READY version differs from that of the one before it; empty if it does not.

        Servers load each version of an adapter with a config of its own.
        """
        if record.base:
            return ""
        known = self._catalogue.find(record.model)
        before = max((each.number for each in known.of(READY) if each.number < record.number), default=0) if known else 0
        try:
            old, new = (self.config(record.model, number) if number else b"" for number in (before, record.number))
            found = differences(parse_json(old), parse_json(new)) if old and new and old != new else []
        except (DaemonError, ValueError, AttributeError, RecursionError):  # a medium that fails, or no config at all
            return ""
        if not found:
            return ""
        values = described(found, "there").encode(errors="backslashreplace").decode()[:2000]
        return f"its config.json is not that of version {before}, on which servers may run: {values}"

    @medium_errors()
    def model_files(self, name: str, number: int = 0) -> dict[str, bytes]:
        """Return the contents of the config and tokenizer files, by name.

        They are those of a READY version, by default the newest one, and before there is one, of the newest ACTIVE publisher.

        Raises ResourceNotFound (MODEL_UNKNOWN), Unavailable (STORE_FAILED), ResourceExhausted (NO_DESCRIPTORS).
        """
        newest = self._catalogue.newest(name)
        number = number or (newest.number if newest is not None else 0)
        if number:
            with self.folder(name, number) as (found, folder), touching(folder, "reading"):
                return {file: (folder / file).read_bytes() for file in found.other_files if file != INDEX_FILE}
        with self._catalogue.changed:
            model = self._catalogue.model(name)
            folders = model_files.folders(model.folder, model.files_epoch)
            if not folders:
                raise ResourceNotFound(
                    "MODEL_UNKNOWN", f"model {name!r} has no publisher yet; the daemon has {self._catalogue.models()}"
                )
            with touching(folders[-1], "reading"):
                return {file.name: file.read_bytes() for file in folders[-1].iterdir() if file.name != INDEX_FILE}

    def files_besides_weights(self, name: str, number: int) -> dict[str, bytes]:
        """Return the contents of all files of a READY version but the safetensors files, by name, once the version is whole.

        Raises as `open` does, and ResourceExhausted (NO_DESCRIPTORS).
        """
        with self.folder(name, number) as (_, folder):
            self.await_whole(name, number)
            failpoint("export.read")
            with touching(folder, "reading"):
                found = {file: (folder / file).read_bytes() for file in self.manifest(name, number).other_files}
            return found | {MANIFEST_FILE: self.manifest_content(name, number)}

    @medium_errors()
    def manifest_content(self, name: str, number: int) -> bytes:
        """Return the content of a READY version's manifest, as it is once the version is whole. Raises as `manifest` does."""
        with self.folder(name, number) as (_, folder), touching(folder, "reading"):
            if self.partial(name, number) is not None:
                return manifest.encode_whole(manifest.load(folder))
            return (folder / MANIFEST_FILE).read_bytes()

    @contextmanager
    def _pinned(self, name: str, number: int, purpose: str) -> Iterator[VersionRecord]:
        holder = f"{purpose}-{secrets.token_hex(4)}"
        record = self._lifecycle.pin(name, number, holder)
        try:
            with self._unless_gone(name, number):
                yield record
        finally:
            self._lifecycle.release(name, number, holder)

    @contextmanager
    def _unless_gone(self, name: str, number: int) -> Iterator[None]:
        """Say that a version is gone where the block misses a file of it: a pin does not keep a version that is lost."""
        try:
            yield
        except OSError as error:
            record = self._catalogue.get(name, number)
            if error.errno != errno.ENOENT or record.state in (READY, UPLOADING):
                raise
            raise gone(record) from error
