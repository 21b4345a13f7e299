"""Durable state of fleets: a small JSON file for each, written before a change takes effect.

In memory, the durations of a move are measured from readings of the monotonic clock, which have no meaning in another process.
In the file, those fields are ages at the time of the write. Time between the last write and the next start does
not count, and the wall clock is not used.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import TypeAdapter
from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import parse_json
from resharder.server.infra.filesystem import make_folder, matching, sync, touching, write_file
from resharder.server.state.fleet import Fleet

_DIGITS = 12  # of a number of starts
_NAMES = {"target": "want", "strategy": "motion"}
"""Names of fields in the file, where they differ."""

_fleet = TypeAdapter(Fleet)
_log = structlog.get_logger("resharder.fleet")


class FleetFiles:
    """Files of all fleets in a folder. Not thread-safe; callers hold the fleets' lock. The constructor raises MediumRefused."""

    def __init__(self, folder: Path) -> None:
        self._folder = make_folder(folder)

    def load(self, now: float) -> dict[str, Fleet]:
        """Return all fleets by name. An unreadable file is logged and skipped. Raises MediumRefused.

        Args:
            now: Reading of the monotonic clock.
        """
        found = {}
        for path in matching(self._folder, "*.json"):
            try:
                fleet = restored(path.read_bytes(), now)
                if f"{fleet.name}.json" != path.name:
                    raise ValueError(f"expected the fleet {path.stem}, found {fleet.name[:64]!r}")
            except (ValueError, OSError) as error:  # pydantic's ValidationError is a ValueError
                _log.error("fleet_unreadable", file=str(path), error=str(error))
                continue
            found[fleet.name] = fleet
        return found

    def next_start(self) -> int:
        """Count this start of a daemon on the store durably, and return the number of starts.

        Restarts from 1 if the file contains no number. Raises OSError.
        """
        path = self._folder / "starts"
        before = path.read_bytes().strip() if path.exists() else b"0"
        if not before.isdigit() or len(before) > _DIGITS:
            _log.error("starts_unreadable", file=str(path), content=before[:40])
            before = b"0"
        count = int(before) + 1
        write_file(path, b"%d\n" % count)
        return count

    def save(self, fleet: Fleet, now: float) -> None:
        """Write a fleet's file. Raises OSError, after restoring the previous file if possible."""
        path = self._folder / f"{fleet.name}.json"
        with touching(path, "reading"):
            before = path.read_bytes() if path.exists() else None
        try:
            failpoint("fleet.write")
            write_file(path, stored(fleet, now))
        except OSError:
            with suppress(OSError):  # the new content may be there if the folder's fsync failed
                path.unlink() if before is None else write_file(path, before)
            raise

    def delete(self, name: str) -> None:
        """Remove a fleet's file durably. Raises OSError."""
        with touching(self._folder / f"{name}.json", "removing"):
            (self._folder / f"{name}.json").unlink(missing_ok=True)
            sync(self._folder)


def stored(fleet: Fleet, now: float) -> bytes:
    """Return the content of a fleet's file. `now` is a reading of the monotonic clock, from which ages are computed."""
    unset = {"serve_ahead"} if fleet.serve_ahead is None else None  # earlier releases read true or false only
    return _with_names(_fleet.dump_json(_turned(fleet, now), exclude=unset), _NAMES)


def restored(content: bytes, now: float) -> Fleet:
    """Return the fleet of a file. Files of releases without ages give ages of 0. Raises ValidationError."""
    return _turned(_fleet.validate_json(_with_names(content, {stored: name for name, stored in _NAMES.items()})), now)


def _turned(fleet: Fleet, now: float) -> Fleet:
    """Convert between readings of the clock and ages, which is the same operation in both directions."""
    move = fleet.move
    return fleet if move is None else replace(fleet, move=replace(move, began=now - move.began, held=now - move.held))


def _with_names(content: bytes, names: Mapping[str, str]) -> bytes:
    """Return a fleet's JSON with the fields of the fleet and of its move renamed; content that is not JSON as it is."""

    def renamed(fields: Any) -> Any:
        return {names.get(key, key): value for key, value in fields.items()} if isinstance(fields, dict) else fields

    try:
        fleet = renamed(parse_json(content))
    except ValueError:
        return content
    if isinstance(fleet, dict) and "move" in fleet:
        fleet["move"] = renamed(fleet["move"])
    return json.dumps(fleet).encode()
