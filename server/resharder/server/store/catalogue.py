"""The catalogue of a store: models, records of their versions, and the lock that guards them."""

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from threading import Condition

from resharder.server.infra.filesystem import make_durable_folder
from resharder.server.state.errors import ResourceNotFound, Unavailable
from resharder.server.state.version import READY, VersionRecord, check_model_name
from resharder.server.store.model_state import StoredModel


class Catalogue:
    """Models and their versions. Thread-safe.

    The reentrant lock of `changed` guards all that a `StoredModel` contains; `changed` is notified of every change for which a
    thread may wait. Queries take no lock: mappings and records are replaced, never modified.
    """

    def __init__(self, root: Path, models: dict[str, StoredModel]) -> None:
        self.changed = Condition()
        self._folder, self._models = root / "models", models
        self._subscribers: list[Callable[[VersionRecord], None]] = []
        self.closed = False

    # Queries

    def models(self) -> list[str]:
        """Return the names of models that have had an ACTIVE publisher, have a READY version, or await a restored one."""
        return sorted(m.name for m in self._models.values() if m.published or m.expected or m.of(READY))

    def versions(self, name: str) -> list[VersionRecord]:
        """Return the versions of a model, oldest first, including recent RETIRED and ABORTED ones.

        Raises ResourceNotFound (MODEL_UNKNOWN).
        """
        return sorted(self.model(name).records.values(), key=lambda r: r.number)

    def get(self, name: str, number: int) -> VersionRecord:
        """Return the record of a version. Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN)."""
        record = self.model(name).records.get(number)
        if record is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"models/{name}/versions/{number} is not known")
        return record

    def newest(self, name: str) -> VersionRecord | None:
        """Return the newest READY version; None if there is none or the model is unknown."""
        model = self.find(name)
        return max(model.of(READY), key=lambda r: r.number, default=None) if model else None

    def newest_number(self, name: str) -> int:
        """Return the greatest version number assigned; 0 for an unknown model."""
        model = self.find(name)
        return model.number if model else 0

    def used_bytes(self) -> int:
        """Return the bytes of all versions and of the files laid out for future ones. Takes the lock."""
        with self.changed:
            return sum(model.used() for model in self._models.values())

    # Models

    def stored(self) -> Collection[StoredModel]:
        """Return all models, including those without a version."""
        return self._models.values()

    def find(self, name: str) -> StoredModel | None:
        """Return the model, or None if it is unknown."""
        return self._models.get(name)

    def model(self, name: str) -> StoredModel:
        """Return the model. Raises InvalidArgument (MODEL_NAME), ResourceNotFound (MODEL_UNKNOWN)."""
        model = self._models.get(check_model_name(name))
        if model is None:
            raise ResourceNotFound("MODEL_UNKNOWN", f"model {name!r} is not known; there are {self.models()}")
        return model

    def add_model(self, name: str) -> StoredModel:
        """Return the model, with a new folder if it is unknown. Callers must hold the lock. Raises OSError."""
        if name not in self._models:
            added = StoredModel(check_model_name(name), make_durable_folder(self._folder / name))
            self._models = self._models | {name: added}
        return self._models[name]

    # Changes

    def subscribe(self, callback: Callable[[VersionRecord], None]) -> None:
        """Call `callback(record)` after every READY, RETIRED and ABORTED, without the lock."""
        self._subscribers.append(callback)

    def notify_subscribers(self, records: Iterable[VersionRecord]) -> None:
        """Call the subscribers with each record, on this thread. Callers must not hold the lock."""
        for record in records:
            for callback in self._subscribers:
                callback(record)

    def wait(self) -> None:
        """Block until a change, with the lock released. Callers must hold it. Raises Unavailable (DRAINING) after `close`."""
        self.changed.wait()
        if self.closed:
            raise Unavailable("DRAINING", "the daemon is shutting down and accepts no new versions")

    def close(self) -> None:
        """Let current and later calls of `wait` raise."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
