"""Assembly of the fleets' parts: servers, fleets, and the control loop that brings them to their versions."""

import time
from collections.abc import Callable

from resharder.server.fleets.attachments import Attachments
from resharder.server.fleets.changes import FleetChanges
from resharder.server.fleets.fleet_log import FleetLog
from resharder.server.fleets.persistence import FleetFiles
from resharder.server.fleets.pins import FleetPins, Pinnable
from resharder.server.fleets.ports import DirectOffers, NoOffers, Note, StartCheck, Versions, no_check, no_note
from resharder.server.fleets.roster import Roster
from resharder.server.fleets.seen_versions import SeenVersions
from resharder.server.fleets.sessions import Sessions
from resharder.server.fleets.steering import Steering
from resharder.server.fleets.ticker import FleetTicker
from resharder.server.state.fleet import PauseMode
from resharder.server.state.server import Settings

_TICK = 0.5
_TERM_BITS = 32  # low bits of a term, for the leaders of one server in one lifetime of the daemon


class Fleets:
    """Parts of the fleets, which share the lock of `roster`.

    Attributes:
        roster: Current state of servers and fleets, and queries.
        sessions: Calls of servers.
        changes: Calls of operators.
        steering: Steps of servers and fleets, and their observers.
        ticker: Passage of time.

    Args:
        versions: Records of the versions in the store.
        pins: Pins of the versions in the store.
        offers: Versions offered over the direct path.
        settings: Durations and bounds of installs.
        clock: Monotonic clock in seconds, which all decisions use.
        wall: Clock in seconds since 1970, for display.
        files: Durable state of fleets; None: in memory only.
        pause_mode: Pause mode of new fleets.
        note: Recorder of events.
        start_check: Starter of canaries' checks.
        tick_seconds: Interval of the ticker; 0: the caller ticks.
    """

    def __init__(
        self,
        versions: Versions,
        pins: Pinnable,
        *,
        offers: DirectOffers | None = None,
        settings: Settings | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        files: FleetFiles | None = None,
        pause_mode: PauseMode = PauseMode.KEEP,
        note: Note = no_note,
        start_check: StartCheck = no_check,
        tick_seconds: float = _TICK,
    ) -> None:
        offers, settings = offers or NoOffers(), settings or Settings()
        seen, pinned, attachments = SeenVersions(versions, offers), FleetPins(pins), Attachments()
        loaded = files.load(clock()) if files else {}
        first_term = files.next_start() << _TERM_BITS if files else 0  # above every earlier term of this store
        self.roster = Roster(seen, pinned, loaded, settings=settings, pause_mode=pause_mode, clock=clock, wall=wall)
        self.steering = Steering(self.roster, seen, pinned, files, attachments.send, start_check)
        self.steering.observe(FleetLog(note, settings, clock))
        self.sessions = Sessions(self.roster, seen, pinned, self.steering, attachments, first_term, note)
        self.changes = FleetChanges(self.roster, seen, self.steering, self.sessions, note)
        self.ticker = FleetTicker(self.roster, seen, pinned, self.steering, self.sessions, files, tick_seconds)
        versions.subscribe(pinned.version_changed)
        versions.subscribe(lambda _: self.ticker.wake())
        offers.subscribe(self.ticker.wake)

    def close(self) -> None:
        """End every stream and the ticker. Pins remain."""
        self.ticker.close()
