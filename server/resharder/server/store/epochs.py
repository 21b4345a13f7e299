"""Epochs of a model: the claim of each job, and the files and capacity reserved for its versions.

A job's claim has its number from the beginning, and takes effect once capacity is reserved for its versions. Until then the claim
before it is in effect, with its files and capacity.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from resharder.converters.failpoints import failpoint
from resharder.converters.storage.files import INDEX_FILE, FileLayout, index_json
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import FailedPrecondition
from resharder.server.state.version import check_model_name
from resharder.server.store import model_files
from resharder.server.store.catalogue import Catalogue, Claim, StoredModel
from resharder.server.store.file_pool import FilePool
from resharder.server.store.folder import StoreFolder
from resharder.server.store.retention import Capacity, Retention


class NewEpoch(NamedTuple):
    """A claim that is to take effect: layouts of a version's files, the model's small files, and layouts that may be shared."""

    model: str
    epoch: int
    layouts: tuple[FileLayout, ...]
    files: Mapping[str, bytes]
    frozen: tuple[FileLayout, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of one version."""
        return sum(layout.size for layout in self.layouts)


class Epochs:
    """Claims and reservations of all models. Thread-safe; `claim` takes no lock."""

    def __init__(
        self, folder: StoreFolder, catalogue: Catalogue, capacity: Capacity, pool: FilePool, retention: Retention
    ) -> None:
        self._folder = folder
        self._catalogue, self._capacity, self._pool, self._retention = catalogue, capacity, pool, retention

    def claim(self, name: str) -> Claim | None:
        """Return the claim in effect, which survives restarts; None without one."""
        model = self._catalogue.find(name)
        return model.claim if model else None

    @medium_errors()
    def begin(self, name: str, job: str, world_size: int) -> Claim:
        """Return the claim of a job, with the next epoch of the model for a new job. It takes effect with `reserve`.

        The number is durable, so that no other job gets it. A job keeps its epoch, also over restarts.

        Raises InvalidArgument (MODEL_NAME), FailedPrecondition (STALE_EPOCH: a newer job's claim is in effect), Unavailable
        (STORE_FAILED), ResourceExhausted (STORE_FULL, NO_DESCRIPTORS).
        """
        check_model_name(name)
        self._folder.check()
        with self._catalogue.changed:
            model = self._catalogue.add_model(name)
            if model.claim is not None and model.claim.job == job:
                return model.claim
            epoch = model.jobs.get(job)
            if epoch is None:
                epoch = model.epoch + 1
                jobs = dict([*model.jobs.items(), (job, epoch)][-100:])
                try:
                    failpoint("claim.write")
                    model.write_claim(epoch=epoch, jobs=jobs)
                except OSError:
                    with suppress(OSError):  # the file may have the new content if only the sync of its folder failed
                        model.write_claim()
                    raise
                model.epoch, model.jobs = epoch, jobs
            elif model.claim is not None and epoch < model.claim.epoch:
                raise FailedPrecondition("STALE_EPOCH", f"job {job!r} had epoch {epoch} of {name!r}: {model.taken_over()}")
            claim = Claim(job, epoch, world_size)
            model.coming = model.coming | {epoch: claim}
            return claim

    @medium_errors()
    def reserve(self, *wanted: NewEpoch) -> None:
        """Let claims take effect: write the models' small files, reserve capacity, and begin to lay out files for versions.

        The claims of one job on several models take effect together: none does if one has no room.

        Raises ResourceExhausted (NO_ROOM), which lists what the store holds, FailedPrecondition (STALE_EPOCH: a newer claim is in
        effect), and the errors of a medium. Nothing has changed then, except that of several claims the first may be in effect if
        the medium fails at a later one.
        """
        self._folder.check()
        with self._catalogue.changed:
            models = [self._catalogue.model(each.model) for each in wanted]
            claims = [_claim_of(model, each.epoch) for model, each in zip(models, wanted, strict=True)]
            committed: dict[str, int] = {}
            for model, each in zip(models, wanted, strict=True):
                self._capacity.check_epoch(model, each.size, committed)
                committed[model.name] = each.size * self._retention.sets(each.size)
            for model, each, claim in zip(models, wanted, claims, strict=True):
                self._take_effect(model, each, claim)

    def _take_effect(self, model: StoredModel, wanted: NewEpoch, claim: Claim) -> None:
        failpoint("reserve.write")
        content = dict(wanted.files)
        if len(wanted.layouts) > 1:
            content[INDEX_FILE] = index_json(wanted.layouts)
        valid = model.files_epoch
        written = model_files.write(model.folder, claim.epoch, content, valid)
        if claim is not model.claim:
            try:
                failpoint("claim.effect")
                model.write_claim(claim)
            except OSError:
                with suppress(OSError):
                    model.write_claim()
                model_files.drop(model.folder, written, valid)
                raise
            model.claim = claim
            model.coming = {epoch: other for epoch, other in model.coming.items() if epoch > claim.epoch}
        model_files.drop_others(model.folder, written)
        model.published = True
        sets = self._retention.sets(wanted.size)
        self._pool.reserve(model, claim.epoch, sets, wanted.layouts, written, wanted.frozen)

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


def _claim_of(model: StoredModel, epoch: int) -> Claim:
    """Return a job's claim by its epoch. Raises FailedPrecondition (STALE_EPOCH)."""
    if model.claim is not None and model.claim.epoch == epoch:
        return model.claim
    if epoch not in model.coming:
        raise FailedPrecondition("STALE_EPOCH", f"{model.name}: epoch {epoch} is over: {model.taken_over()}")
    return model.coming[epoch]
