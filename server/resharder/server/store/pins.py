"""Pins, which keep READY versions from being retired."""

from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.catalogue import Catalogue
from resharder.server.store.retirement import Retirer


class VersionPins:
    """Pins of all versions, each by the name of its holder. Thread-safe; `holders` takes no lock."""

    def __init__(self, catalogue: Catalogue, retirer: Retirer) -> None:
        self._catalogue, self._retirer = catalogue, retirer

    def pin(self, name: str, number: int, holder: str, *, yielding: bool = False) -> VersionRecord:
        """Protect a READY version from retirement until `release`; with `yielding`, only until the store needs its capacity.

        Raises ResourceNotFound (MODEL_UNKNOWN, VERSION_UNKNOWN, VERSION_GONE).
        """
        with self._catalogue.changed:
            record = self._catalogue.get(name, number)
            if record.state != READY:
                raise ResourceNotFound("VERSION_GONE", f"{record.name} is {record.state}, not READY")
            model = self._catalogue.model(name)
            model.holders[number] = model.holders.get(number, frozenset()) | {holder}
            if yielding:
                model.yielding.add((number, holder))
            return record

    def release(self, name: str, number: int, holder: str) -> None:
        """Remove a pin, and retire what retention no longer keeps. A no-op if the holder has not pinned the version."""
        with self._catalogue.changed:
            model = self._catalogue.find(name)
            if model is None:
                return
            holders = model.holders.get(number, frozenset()) - {holder}
            model.yielding.discard((number, holder))
            if holders:
                model.holders[number] = holders
                return
            model.holders.pop(number, None)
            retired = self._retirer.retain(model)
            self._catalogue.changed.notify_all()
        self._catalogue.notify_subscribers(retired)

    def holders(self, name: str, number: int) -> list[str]:
        """Return the names of the holders that pin the version."""
        model = self._catalogue.find(name)
        return sorted(model.holders.get(number, ())) if model else []
