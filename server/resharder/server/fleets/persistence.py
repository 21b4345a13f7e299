"""What is kept of fleets over restarts: a small JSON file for each, on its medium before anybody is told.

In memory, the durations of a move are measured from readings of the monotonic clock, which mean nothing to another process. In
the file those fields hold how long ago that was when the file was written. Time between the last write and the next start does
not count, and no clock of the host is trusted over it.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter, ValidationError
from resharder.server.infra.filesystem import make_folder, touching, write_file
from resharder.server.state.fleet import Fleet

_NAMES = {"target": "want", "strategy": "motion"}
"""Names of fields by which the file of a fleet has them."""

_fleet = TypeAdapter(Fleet)
_log = structlog.get_logger("resharder.fleet")


class FleetFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = make_folder(folder)

    def load(self, now: float) -> dict[str, Fleet]:
        """`now` is a reading of the monotonic clock. A file that cannot be read is left where it is, said, and counts as none."""
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            try:
                fleet = restored(path.read_bytes(), now)
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

    def save(self, fleet: Fleet, now: float) -> None:
        """Raises OSError; the file has what it had then, as far as the medium lets it."""
        path = self._folder / f"{fleet.name}.json"
        with touching(path, "reading"):
            before = path.read_bytes() if path.exists() else None
        try:
            write_file(path, stored(fleet, now))
        except OSError:
            with suppress(OSError):  # the new content may stand there, where its folder's fsync is what failed
                path.unlink() if before is None else write_file(path, before)
            raise


def stored(fleet: Fleet, now: float) -> bytes:
    return _with_names(_fleet.dump_json(_turned(fleet, now)), _NAMES)


def restored(content: bytes, now: float) -> Fleet:
    """A file that has no such ages, of a release that kept times of day, gives 0: what it waited for begins anew.

    Raises ValidationError.
    """
    return _turned(_fleet.validate_json(_with_names(content, {stored: name for name, stored in _NAMES.items()})), now)


def _turned(fleet: Fleet, now: float) -> Fleet:
    """Ages for readings of the clock, and readings for ages."""
    move = fleet.move
    return fleet if move is None else replace(fleet, move=replace(move, began=now - move.began, held=now - move.held))


def _with_names(content: bytes, names: Mapping[str, str]) -> bytes:
    """Return a fleet's JSON with the fields of the fleet and of its move renamed; content that is not JSON as it is."""

    def renamed(fields: Any) -> Any:
        return {names.get(key, key): value for key, value in fields.items()} if isinstance(fields, dict) else fields

    try:
        fleet = renamed(json.loads(content))
    except ValueError:
        return content
    if isinstance(fleet, dict) and "move" in fleet:
        fleet["move"] = renamed(fleet["move"])
    return json.dumps(fleet).encode()
