"""A store and fleet files in memory, for fleets under a simulated clock."""

from collections.abc import Mapping

from resharder.converters.signal import Signal
from resharder.server.fleets.persistence import restored, stored
from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.fleet import Fleet
from resharder.server.state.server import Reach
from resharder.server.state.version import ABORTED, READY, UPLOADING, VersionRecord

MODEL = "policy"


class SimulatedVersions:
    """Store whose pinned versions stay READY, and the offers of the direct path.

    A version that begins is offered at once. The store's bytes of versions in `changed` differ from the offered ones.
    `keep` is the number of READY versions that stay without a pin.
    """

    def __init__(self, keep: int = 3) -> None:
        self.keep = keep
        self.ready: dict[int, str] = {}
        self.version_changed: Signal[VersionRecord] = Signal()
        self.offers_changed: Signal[()] = Signal()
        self.ever: set[int] = set()
        self.holders: dict[int, set[str]] = {}
        self.last = 0
        self.staging: set[int] = set()
        self.aborted: set[int] = set()
        self.offers: dict[int, Reach] = {}
        self.changed: set[int] = set()

    def begin(self, host: str = "", links: Mapping[str, str] | None = None) -> int:
        self.last += 1
        self.staging.add(self.last)
        self.offers[self.last] = Reach(frozenset({host} - {""}), links)
        return self.last

    def abort(self, number: int) -> None:
        self.staging.discard(number)
        self.aborted.add(number)

    def publish(self) -> int:
        self.last += 1
        return self.complete(self.last)

    def complete(self, number: int, changed: bool = False) -> int:
        self.staging.discard(number)
        self.changed |= {number} if changed else set()
        self.ever.add(number)
        self.ready[number] = f"fingerprint {number}"
        for old in sorted(self.ready)[: -self.keep]:
            if not self.holders.get(old):
                del self.ready[old]
        return number

    def offered(self, model: str) -> dict[int, Reach]:
        return dict(self.offers)

    def at_once(self, model: str) -> int:
        return 1

    def models(self) -> list[str]:
        return [MODEL] if self.ready else []

    def versions(self, name: str) -> list[VersionRecord]:
        states = dict.fromkeys(self.staging, UPLOADING) | dict.fromkeys(self.aborted, ABORTED) | dict.fromkeys(self.ready, READY)
        return [
            VersionRecord(MODEL, number, state, 1, number, "job", 1, 1, 0.0, fingerprint=self.ready.get(number, ""))
            for number, state in sorted(states.items())
        ]

    def sent_as(self, number: int) -> str:
        """Fingerprint of workers that received it from the ranks."""
        return VersionRecord(MODEL, number, UPLOADING, 1, number, "job", 1, 1, 0.0).ahead_fingerprint

    def pin(self, name: str, number: int, holder: str) -> VersionRecord:
        if number not in self.ready:
            raise ResourceNotFound("VERSION_GONE", f"{number}")
        self.holders.setdefault(number, set()).add(holder)
        return self.versions(name)[0]

    def release(self, name: str, number: int, holder: str) -> None:
        self.holders.get(number, set()).discard(holder)

    def restart(self) -> None:
        """Drop pins and UPLOADING versions, which a restarted daemon loses."""
        self.holders.clear()
        self.offers.clear()
        self.aborted |= self.staging
        self.staging.clear()


class SimulatedFiles:
    def __init__(self) -> None:
        self.kept: dict[str, Fleet] = {}
        self.written: dict[str, bytes] = {}
        self.starts = 0

    def next_start(self) -> int:
        self.starts += 1
        return self.starts

    def load(self, now: float) -> dict[str, Fleet]:
        self.kept = {name: restored(content, now) for name, content in self.written.items()}
        return dict(self.kept)

    def save(self, fleet: Fleet, now: float) -> None:
        self.kept[fleet.name], self.written[fleet.name] = fleet, stored(fleet, now)
