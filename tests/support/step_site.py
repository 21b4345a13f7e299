"""A daemon's intake and ranks of a job that keep count of their attempts as the SDK does; the clock is the test's own."""

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from resharder.client.trainer.session import Attempts
from resharder.converters.geometry.layout import Range, TensorSpec
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.state.errors import DaemonError
from resharder.server.state.version import VersionRecord
from resharder.server.store.store import Store

from tests.support.waits import completed

LEASE = 4.0
RANKS = 3
SPECS = [TensorSpec("a", "F32", (RANKS, 8))]
_PROCESSES = itertools.count()


class Site:
    """A daemon's intake over a store that outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.start()

    def start(self) -> None:
        self.store = Store(self.folder, shared=False)
        self.intake = Intake(self.store, lease_seconds=LEASE, clock=lambda: self.now)

    def stop(self) -> None:
        self.intake.drain(0)
        self.store.close()

    def open(self) -> list[VersionRecord]:
        return (
            [r for r in self.store.catalogue.versions("policy") if r.state == "UPLOADING"]
            if self.store.catalogue.models()
            else []
        )

    def state(self, number: int) -> str:
        return self.store.catalogue.get("policy", number).state

    def settle(self) -> None:
        """Until no proof is under way."""
        end = time.monotonic() + 60
        while any(not staged.open_ranks() for staged in self.intake.uploads()):
            assert time.monotonic() < end, "a proof has not ended"
            time.sleep(0.001)


class Rank:
    """One rank of a job, with the memory of its process."""

    def __init__(self, site: Site, rank: int) -> None:
        self.site, self.rank = site, rank
        self.replace()

    def replace(self) -> None:
        """Another process takes the rank's place."""
        self.process, self.attempts = f"process-{next(_PROCESSES)}", Attempts()
        self.begun: VersionRecord | None = None
        self.started = -1
        self.given: set[int] = set()  # versions that it was answered with
        self.born = self.site.store.catalogue.newest_number("policy")
        self.register()

    def register(self) -> None:
        publisher = self.site.intake.create_publisher("policy", "job", RANKS, {"config.json": b"{}"})
        self.name = publisher.name
        box = (Range(self.rank, 1), Range(0, 8))
        boxes = pack([(0, box, False)])
        self.site.intake.register_slot(self.name, self.rank, f"rank {self.rank}", SPECS, boxes, self.process)
        self.attempts.registered(self.site.store.catalogue.newest_number("policy"))

    def begin(self, step: int) -> VersionRecord:
        record = completed(self.site.intake.create_version, self.name, self.rank, step, self.attempts.after(step))
        self.attempts.begun(step, record.number)
        self.given.add(record.number)
        self.begun = record if record.state == "UPLOADING" else None
        return record

    def seal(self, record: VersionRecord) -> VersionRecord:
        """The files hold zeros, and so does the rank."""
        return self.site.intake.seal_slot("policy", record.number, record.epoch, self.rank, [0], mapped=True)

    def publish(self, step: int) -> VersionRecord:
        record = self.begin(step)
        return self.seal(record) if record.state == "UPLOADING" else record

    def renew(self) -> None:
        self.site.intake.publisher(self.name, self.rank)


def refused(call: Callable[[], object], reason: str) -> str:
    with pytest.raises(DaemonError) as caught:
        call()
    assert caught.value.reason == reason, str(caught.value)
    return str(caught.value)


def stall(site: Site, ranks: list[Rank], silent: int) -> None:
    """One rank is silent for longer than its lease."""
    for _ in range(5):
        site.now += 1
        for rank in ranks:
            if rank.rank != silent:
                rank.renew()
        site.intake.expire()


def publish_all(site: Site, ranks: list[Rank], step: int) -> VersionRecord:
    numbers = {rank.publish(step).number for rank in ranks}
    assert len(numbers) == 1
    site.settle()
    return site.store.catalogue.get("policy", numbers.pop())
