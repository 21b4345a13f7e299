"""Versions of the store as of the last read, on which the fleets' decisions depend."""

from collections.abc import Mapping
from dataclasses import replace

from resharder.server.fleets.ports import DirectOffers, Versions
from resharder.server.state.errors import InvalidArgument, ResourceNotFound
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Ahead
from resharder.server.state.version import READY, UPLOADING


class SeenVersions:
    """READY and offered versions of each model.

    `look` takes the store's lock and is called without the fleets' lock where possible, so its result may be older than a pin.
    """

    def __init__(self, versions: Versions, offers: DirectOffers) -> None:
        self._versions, self._offers = versions, offers
        self._ready: dict[str, dict[int, str]] = {}
        self._ahead: dict[str, dict[int, Ahead]] = {}
        self._set_aside: dict[str, frozenset[int]] = {}

    def look(self, model: str) -> dict[int, str]:
        """Read a model's versions, and return the fingerprints of READY ones by number; empty for an unknown model."""
        try:
            records = self._versions.versions(model)
        except ResourceNotFound:
            records = []
        offered = self._offers.offered(model)
        found = {record.number: record.fingerprint for record in records if record.state == READY}
        ahead = {r.number: Ahead(r.ahead_fingerprint, r.state == UPLOADING) for r in records if r.number in offered}
        self._ready[model], self._ahead[model] = found, ahead
        self._set_aside[model] = frozenset(record.number for record in records if record.set_aside)
        return found

    def look_at_all(self) -> list[str]:
        """Read the versions of every model, and return the models."""
        models = self.models()
        for model in models:
            self.look(model)
        return models

    def models(self) -> list[str]:
        """Return the names of the models in the store."""
        return self._versions.models()

    def only_model(self) -> str:
        """Return the name of the only model, or an empty name if there is none.

        Raises:
            InvalidArgument: MODEL_AMBIGUOUS, if there are several.
        """
        models = self.models()
        if len(models) > 1:
            raise InvalidArgument("MODEL_AMBIGUOUS", f"expected the name of one of the models {models}, got none")
        return models[0] if models else ""

    def ready(self, model: str) -> Mapping[int, str]:
        """Return the fingerprints of READY versions by number, as of the last read."""
        return self._ready.get(model, {})

    def set_aside(self, model: str) -> frozenset[int]:
        """Return the versions that LATEST skips, as of the last read."""
        return self._set_aside.get(model, frozenset())

    def ahead(self, fleet: Fleet) -> dict[int, Ahead]:
        """Return the offered versions of a fleet's model, marked as UPLOADING only for a fleet that serves ahead."""
        on, chosen = fleet.serves_ahead, fleet.serve_ahead is not None
        ahead = self._ahead.get(fleet.model, {})
        return {number: replace(one, staging=one.staging and on, remote=chosen) for number, one in ahead.items()}

    def at_once(self, model: str) -> int:
        """Return the number of servers that can receive a version over the direct path at the same time."""
        return self._offers.at_once(model)
