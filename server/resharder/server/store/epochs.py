"""Epochs of a model: the claim of each job, and the files and capacity reserved for its versions."""

from collections.abc import Mapping
from contextlib import suppress

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import INDEX_FILE, FileLayout, index_json
from resharder.server.infra.medium import medium_errors
from resharder.server.store import model_files
from resharder.server.store.capacity import Capacity
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.file_pool import FilePool
from resharder.server.store.model_state import Claim, Reservation, check_model_name
from resharder.server.store.retention import Retention


class Epochs:
    """Claims and reservations of all models. Thread-safe; `claim` takes no lock."""

    def __init__(self, catalogue: Catalogue, capacity: Capacity, pool: FilePool, retention: Retention) -> None:
        self._catalogue, self._capacity, self._pool, self._retention = catalogue, capacity, pool, retention

    def claim(self, name: str) -> Claim | None:
        """Return the claim of the newest job, which survives restarts; None without one."""
        model = self._catalogue.find(name)
        return model.claim if model else None

    def of_job(self, name: str, job: str) -> int | None:
        """Return the epoch that the job was given, however long ago; None if it had none among the last 100 jobs."""
        with self._catalogue.changed:
            model = self._catalogue.find(name)
            return model.jobs.get(job) if model else None

    @medium_errors()
    def begin(self, name: str, job: str, world_size: int) -> Claim:
        """Give the job the next epoch of the model, durably, and discard the pool of earlier epochs.

        Raises InvalidArgument (MODEL_NAME), Unavailable (STORE_FAILED), ResourceExhausted (STORE_FULL, NO_DESCRIPTORS).
        """
        check_model_name(name)
        with self._catalogue.changed:
            model = self._catalogue.add_model(name)
            claim = Claim(job, model.epoch + 1, world_size)
            jobs = dict([*model.jobs.items(), (job, claim.epoch)][-100:])
            try:
                failpoint("claim.write")
                model.write_claim(claim, jobs)
            except OSError:
                with suppress(OSError):  # the file may have the new content if only the sync of its folder failed
                    model.write_claim()
                raise
            model.claim, model.epoch, model.jobs = claim, claim.epoch, jobs
            self._pool.drop(model)
            return claim

    @medium_errors()
    def reserve(self, name: str, epoch: int, layouts: tuple[FileLayout, ...], files: Mapping[str, bytes]) -> None:
        """Write the model's small files, reserve capacity for the epoch's versions, and begin to lay out their files.

        Raises ResourceExhausted (NO_ROOM), which lists what the store holds; nothing has changed then.
        """
        size = sum(layout.size for layout in layouts)
        with self._catalogue.changed:
            model = self._catalogue.model(name)
            self._capacity.check_epoch(model, size)
            failpoint("reserve.write")
            content = dict(files)
            if len(layouts) > 1:
                content[INDEX_FILE] = index_json(layouts)
            written = model_files.write(model.folder, epoch, content)
            model.published = True
            self._pool.drop(model)
            model.reservation = Reservation(epoch, written, layouts, size, self._retention.sets(size))
            self._pool.top_up(model)

    @medium_errors()
    def expect(self, name: str, number: int, epoch: int, *, coming: bool) -> None:
        """Reserve the numbers and epochs of an archive: assign only greater ones from now on.

        `coming`: whether versions of the model are about to be restored from the archive.
        """
        with self._catalogue.changed:
            model = self._catalogue.add_model(name)
            model.number, model.epoch = max(model.number, number), max(model.epoch, epoch)
            model.expected = coming
            model.write_claim()
