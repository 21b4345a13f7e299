"""Versions as checkpoint folders, in shared memory or on disk. The folders are authoritative; the history is not.

    <root>/decision.json                        versions that become READY together, while they are renamed
           models/<model>/claim.json            the last version number and epoch assigned, and the epochs' jobs
                          files/<epoch>.<n>/    config.json, tokenizer, index of the newest ACTIVE publisher
                          pool/<epoch>-<n>/     safetensors files for future versions, with headers and allocated pages
                          staging/<number>/     UPLOADING
                          versions/<number>/    READY: a complete checkpoint and resharder.json (or what partial.py describes)
                          retired/<number>/     being removed

A version's files move pool -> staging -> versions -> retired -> pool by rename. They return to the pool only within their epoch,
and only if the kernel reports that no process has them open or mapped; otherwise they are unlinked.
"""

import time
from collections.abc import Callable
from pathlib import Path

from resharder.server.infra.medium import medium_errors
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.epochs import Epochs
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder
from resharder.server.store.history import History
from resharder.server.store.lifecycle import VersionLifecycle
from resharder.server.store.manifest import ManifestCache
from resharder.server.store.reader import VersionReader
from resharder.server.store.restore import restore_models
from resharder.server.store.retention import Capacity, Retention


class Store:
    """The parts of one store. All of them share the lock of `catalogue`.

    If a file operation fails, a call raises Unavailable (STORE_FAILED) or ResourceExhausted (STORE_FULL, NO_DESCRIPTORS), and
    memory and medium are unchanged, except for numbers, which are not assigned again. Failures in work that follows from a
    completed call (history, retention, removal of files) are logged, and the work is retried later.
    """

    def __init__(
        self,
        root: Path,
        *,
        limit_bytes: int = 0,
        hold: bool = True,
        keep_count: int = 3,
        keep_bytes: int = 0,
        shared: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Lock the folder and restore its versions.

        `limit_bytes`: bound on all versions; 0: 80 % of the medium. `hold`: whether the folder has the bytes of versions, and not
        their manifests and small files alone.

        Raises FailedPrecondition (STORE_OWNER, STORE_LOCKED, STORE_FILESYSTEM), Unavailable (STORE_FAILED), ResourceExhausted
        (STORE_FULL, NO_DESCRIPTORS).
        """
        retention, manifests, self.hold = Retention(keep_count, keep_bytes), ManifestCache(), hold
        with medium_errors():
            self.folder = StoreFolder(root, shared=shared)
            try:
                self.catalogue = Catalogue(root, restore_models(root, hold=hold), hold=hold)
                self.capacity = Capacity(root, self.catalogue, retention, limit_bytes, hold=hold)
                self._history = History(root)
            except BaseException:
                self.folder.close()
                raise
        folder, catalogue, history = self.folder, self.catalogue, self._history
        pool = FilePool(catalogue, self.capacity, hold=hold)
        self.epochs = Epochs(folder, catalogue, self.capacity, pool, retention)
        self.lifecycle = VersionLifecycle(folder, catalogue, self.capacity, pool, retention, history, manifests, clock)
        self.reader = VersionReader(folder, catalogue, self.lifecycle, manifests)

    def close(self) -> None:
        """Remove all files except READY versions and models' small files, and unlock the folder. Refuses waiting calls."""
        self.catalogue.close()
        for model in self.catalogue.stored():
            model.background.shutdown(wait=False, cancel_futures=True)
        for model in self.catalogue.stored():
            model.background.shutdown(wait=True)
            model.sweep()
        self._history.close()
        self.folder.close()
