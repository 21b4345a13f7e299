"""READY versions of which the store lacks pieces: found, and made whole once their pieces have arrived."""

import structlog
from resharder.server.state.version import READY
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.manifest import BadManifest, Manifest
from resharder.server.store.partial import PartialVersion, remove_leftovers
from resharder.server.store.retirement import Retirer

_log = structlog.get_logger("resharder.store")


class PartialVersions:
    """Versions that lack pieces, of all models. Thread-safe."""

    def __init__(self, catalogue: Catalogue, retirer: Retirer) -> None:
        self._catalogue, self._retirer = catalogue, retirer

    def all(self) -> list[PartialVersion]:
        """Return the versions, the one that became READY last first."""
        found = [partial for model in self._catalogue.stored() for partial in model.partial.values()]
        return sorted(found, key=lambda partial: (partial.record.ready_time, partial.record.number), reverse=True)

    def get(self, name: str, number: int) -> PartialVersion | None:
        """Return a version; None for one that is whole, not READY or unknown."""
        model = self._catalogue.find(name)
        return model.partial.get(number) if model is not None else None

    def settle(self, partial: PartialVersion, threads: int) -> bool:
        """Verify the tensors whose pieces have arrived, and make the version whole if all have. Returns whether it is settled.

        A version whose tensors do not have their digests is lost (`Retirer.lose`). Raises OSError, DaemonError; the next call
        repeats what has failed.
        """
        record = partial.record
        damage = partial.verify(threads)
        if not damage and not partial.is_whole():
            return False
        try:
            if not damage:
                partial.complete()
        except BadManifest as error:
            damage = str(error)
        if damage:
            self._retirer.lose(record.model, record.number, damage)
            return True
        with self._catalogue.changed:
            model = self._catalogue.model(record.model)
            if model.records[record.number].state != READY:
                return True
            model.put_partial(record.number, None)
            self._catalogue.changed.notify_all()
        partial.finish()
        _log.info("version_whole", version=record.name)
        try:
            remove_leftovers(partial.folder, Manifest(record, partial.files, {}, ()))
        except OSError as error:  # the next start removes them
            _log.warning("not_removed", version=record.name, error=str(error))
        return True
