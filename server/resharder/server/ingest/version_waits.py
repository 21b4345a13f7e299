"""Calls that wait until a version is READY or served."""

from collections.abc import Callable

from resharder.server.infra.change_signal import ChangeSignal, Waiting
from resharder.server.ingest.shared import IngestShared
from resharder.server.state.version import ABORTED, READY, RETIRED, VersionRecord

_LOOK = 2.0  # longest pause of a waiting call, in seconds


class VersionWaits:
    """Waits for versions. Thread-safe.

    Args:
        shared: State that the parts of ingest share.
        audience: Function of a model and a version's number that counts the servers that serve this version or a newer one,
            and all that follow the model.
    """

    def __init__(self, shared: IngestShared, audience: Callable[[str, int], tuple[int, int]]) -> None:
        self._store, self._clock, self._audience = shared.store, shared.clock, audience
        self._versions_changed, self._serving_changed = ChangeSignal(), ChangeSignal()
        shared.store.catalogue.subscribe(lambda record: self.version_changed())

    def version_changed(self) -> None:
        """Notify every waiting call."""
        self._versions_changed.notify()
        self._serving_changed.notify()

    def serving_changed(self) -> None:
        """Notify calls that wait until a version is served."""
        self._serving_changed.notify()

    def wait(self, model: str, number: int, wait_seconds: float, serving: bool) -> Waiting[VersionRecord]:
        """Return a version that is READY (with `serving`: served by all that follow the model), ABORTED or RETIRED.

        After `wait_seconds`, return it in any state.
        """
        deadline = self._clock() + wait_seconds
        changed = self._serving_changed if serving else self._versions_changed
        while True:
            seen = changed.count
            record = self._store.catalogue.get(model, number)
            left = deadline - self._clock()
            if left <= 0 or self._settled(record, serving):
                return record
            yield changed.pause(seen, min(left, _LOOK))

    def _settled(self, record: VersionRecord, serving: bool) -> bool:
        if record.state != READY or not serving:
            return record.state in (READY, ABORTED, RETIRED)
        served, following = self._audience(record.model, record.number)
        return served >= following
