"""Versions of the store, as the fleets have read and pinned them."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from resharder.server.direct.offered_versions import OfferedVersions
from resharder.server.state.errors import InvalidArgument, ResourceNotFound
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Ahead
from resharder.server.state.version import READY, UPLOADING, VersionRecord
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.lifecycle import VersionLifecycle


class FleetVersions:
    """READY and offered versions of each model as of the last read, and the versions that servers and fleets pin.

    `look` takes the store's lock and is called without the fleets' lock where possible, so its result may be older than a pin.
    Callers serialise changes of pins; any thread may call `pinned`.

    Args:
        catalogue: Records of the versions in the store.
        pins: Pins of the versions in the store.
        offers: Versions offered over the direct path.
    """

    def __init__(self, catalogue: Catalogue, pins: VersionLifecycle, offers: OfferedVersions) -> None:
        self._catalogue, self._pins, self._offers = catalogue, pins, offers
        self._ready: dict[str, dict[int, str]] = {}
        self._ahead: dict[str, dict[int, Ahead]] = {}
        self._skipped: dict[str, frozenset[int]] = {}
        self._base: dict[str, str] = {}
        self._base_versions: dict[str, dict[int, int]] = {}
        self._pinned: dict[tuple[str, str], frozenset[int]] = {}  # by holder and model
        self._lost: frozenset[tuple[str, int]] = frozenset()

    # Reads

    def look(self, model: str) -> dict[int, str]:
        """Read a model's versions, and return the fingerprints of READY ones by number; empty for an unknown model."""
        try:
            records = self._catalogue.versions(model)
        except ResourceNotFound:
            records = []
        offered = self._offers.offered(model)
        found = {record.number: record.fingerprint for record in records if record.state == READY}
        ahead = {
            record.number: Ahead(record.ahead_fingerprint, record.state == UPLOADING, reach=offered[record.number])
            for record in records
            if record.number in offered
        }
        self._ready[model], self._ahead[model] = found, ahead
        self._skipped[model] = frozenset(record.number for record in records if record.skipped)
        self._base[model] = next((record.base for record in records if record.base), "")
        self._base_versions[model] = {record.number: record.base_version for record in records if record.base_version}
        return found

    def look_at_all(self) -> list[str]:
        """Read the versions of every model, and return the models."""
        models = self._catalogue.models()
        for model in models:
            self.look(model)
        return models

    def base(self, model: str) -> str:
        """Return the base of a model that is an adapter; empty for any other, and before it has a version."""
        return self._base.get(model, "")

    def base_versions(self, model: str) -> dict[int, int]:
        """Return the versions of an adapter that name the version of its base that they were trained on."""
        return self._base_versions.get(model, {})

    def only_model(self) -> str:
        """Return the name of the only model that is no adapter, or an empty name if there is none.

        Raises:
            InvalidArgument: MODEL_AMBIGUOUS, if there are several.
        """
        models = self._catalogue.models()
        if len(models) > 1:
            models = [model for model in self.look_at_all() if not self.base(model)]
        if len(models) > 1:
            raise InvalidArgument("MODEL_AMBIGUOUS", f"no model was named: name one of {models}")
        return models[0] if models else ""

    def ready(self, model: str) -> Mapping[int, str]:
        """Return the fingerprints of READY versions by number, as of the last read."""
        return self._ready.get(model, {})

    def skipped(self, model: str) -> frozenset[int]:
        """Return the versions that LATEST skips, as of the last read."""
        return self._skipped.get(model, frozenset())

    def ahead(self, fleet: Fleet) -> dict[int, Ahead]:
        """Return the offered versions of a fleet's model, marked as UPLOADING only for a fleet that serves ahead."""
        on, chosen = fleet.serves_ahead, fleet.serve_ahead is not None
        ahead = self._ahead.get(fleet.model, {})
        return {number: replace(one, staging=one.staging and on, remote=chosen) for number, one in ahead.items()}

    def at_once(self, model: str) -> int:
        """Return the number of servers that can receive a version over the direct path at the same time."""
        return self._offers.at_once(model)

    # Pins

    def pinned(self, holder: str, model: str) -> frozenset[int]:
        """Return the numbers of the versions of a model that a holder has pinned."""
        pinned, lost = self._pinned.get((holder, model), frozenset()), self._lost
        return frozenset(number for number in pinned if (model, number) not in lost) if lost else pinned

    def version_changed(self, record: VersionRecord) -> None:
        """Drop the pins of a version that is lost: the only one that retires in spite of them. Any thread may call this."""
        key = (record.model, record.number)
        if record.is_lost:
            self._lost |= {key}
        elif key in self._lost:  # restored from an archive
            self._lost -= {key}

    def pin(self, holder: str, model: str, numbers: Collection[int]) -> frozenset[int]:
        """Pin versions in addition to earlier ones, and return the numbers that are no longer READY."""
        gone = set()
        for number in numbers:
            if number in self.pinned(holder, model):
                continue
            try:
                self._pins.pin(model, number, holder)
                self._pinned[holder, model] = self.pinned(holder, model) | {number}
            except ResourceNotFound:
                gone.add(number)
        return frozenset(gone)

    def release(self, holder: str, model: str, keep: frozenset[int] = frozenset()) -> None:
        """Release all versions of a model that a holder has pinned, except `keep`."""
        pinned = self.pinned(holder, model)
        if pinned & keep:
            self._pinned[holder, model] = pinned & keep
        else:
            self._pinned.pop((holder, model), None)
        for number in pinned - keep:
            self._pins.release(model, number, holder)
