"""What is kept of fleets over restarts: a small JSON file for each, on its medium before anybody is told."""

from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError
from resharder.server.fleet_state import Fleet
from resharder.server.kernel import make_folder, write_file

_fleet = TypeAdapter(Fleet)
_log = structlog.get_logger("resharder.fleet")


class FleetFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = make_folder(folder)

    def load(self) -> dict[str, Fleet]:
        """A file that cannot be read is left where it is, said, and counts as none."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                fleet = _fleet.validate_json(path.read_bytes())
            except (ValidationError, OSError) as error:
                _log.error("fleet_unreadable", file=str(path), error=str(error))
                continue
            found[fleet.name] = fleet
        return found

    def next_start(self) -> int:
        """How often a daemon has started on this store, this time included; on its medium when this returns. Counts from 1 again
        where the file holds no number. Raises OSError."""
        path = self._folder / "starts"
        before = path.read_bytes().strip() if path.exists() else b"0"
        if not before.isdigit():
            _log.error("starts_unreadable", file=str(path), content=before[:40])
            before = b"0"
        count = int(before) + 1
        write_file(path, b"%d\n" % count)
        return count

    def save(self, fleet: Fleet) -> None:
        """Raises OSError."""
        write_file(self._folder / f"{fleet.name}.json", _fleet.dump_json(fleet))
