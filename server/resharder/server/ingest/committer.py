"""Verification and commit of a version whose slots are all sealed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.medium import medium_error
from resharder.server.ingest.homes import ReplicasShort, Replicate
from resharder.server.ingest.shared import IngestShared, Phase
from resharder.server.ingest.upload import ProofFailed, Upload
from resharder.server.ingest.version_group import VersionGroups
from resharder.server.state.errors import DaemonError
from resharder.server.state.timing import timed
from resharder.server.state.version import ABORTED
from resharder.server.store.lifecycle import ProvenVersion

_log = structlog.get_logger("resharder.intake")


class Committer:
    """Commits of sealed versions.

    Args:
        shared: State that the parts of ingest share.
        groups: Groups of versions that become READY together.
        patience: Seconds to wait for the last writer to close a version's files.
        replicas: Holders that every piece of a version must have before it is READY.
        replicate: Function that has nodes hold verified versions.
        forget: Removes a version from the UPLOADING ones.
        abort: Aborts a version and its group, with a reason.
    """

    def __init__(
        self,
        shared: IngestShared,
        groups: VersionGroups,
        patience: float,
        replicas: int,
        replicate: Replicate,
        forget: Callable[[Upload], None],
        abort: Callable[[Upload, str], object],
    ) -> None:
        self._shared, self._store, self._groups = shared, shared.store, groups
        self._patience, self._replicas, self._replicate = patience, replicas, replicate
        self._forget, self._abort = forget, abort

    @contextmanager
    def _timed(self, phase: Phase, upload: Upload) -> Iterator[None]:
        with timed(upload.timings, phase):
            yield
        for observer in self._shared.observers:
            observer.publish_phase(phase, upload.record.model, upload.timings[-1].seconds)

    def commit(self, upload: Upload) -> None:
        """Verify a version, and make it READY with all versions of its group if it is the last of them."""
        try:
            failpoint("commit.before-proof")
            with self._timed("verify", upload):
                proof = upload.prove(self._patience, self._replicas)
            failpoint("commit.after-proof")
            group = self._groups.prove(upload, proof)
            if group:
                first, *others = (
                    ProvenVersion(each.record, found.digests, each.slot_digests(), found.missing) for each, found in group
                )
                with self._timed("commit", upload):
                    self._store.lifecycle.commit(
                        first.record,
                        first.digests,
                        first.slots,
                        *others,
                        missing=first.missing,
                        before_ready=lambda versions: self._replicate(versions, lambda: any(each.aborted for each, _ in group)),
                    )
                for each, _ in group:
                    self._forget(each)
        except (ProofFailed, ReplicasShort) as error:
            self._abort(upload, str(error))
        except (DaemonError, OSError) as error:
            known = error if isinstance(error, DaemonError) else medium_error(error)
            self._commit_failed(upload, f"{known.reason}: {known}", error)
        except Exception as error:
            self._commit_failed(upload, repr(error), error)

    def _commit_failed(self, upload: Upload, reason: str, error: Exception) -> None:
        record = upload.record
        if self._store.catalogue.get(record.model, record.number).state != ABORTED:  # an abort has removed the files
            unknown = None if isinstance(error, DaemonError | OSError) else error
            _log.error("commit_failed", version=record.name, error=reason, exc_info=unknown)
        self._abort(upload, f"the commit failed: {reason}")
