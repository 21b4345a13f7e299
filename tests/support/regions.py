"""A home, whose versions are archived, and a region that follows it, in this process."""

from pathlib import Path

from resharder.server.archive.archive import Archive
from resharder.server.archive.follower import Follower
from resharder.server.state.version import VersionRecord
from resharder.server.store.store import Store

from tests.support.archived_steps import Trainer, content


class Home:
    """A store whose trainer's versions are archived."""

    def __init__(self, root: Path, url: str = "", seed: int = 0, job: str = "job", **options: int) -> None:
        self.root, self.store = root, Store(root / f"home-{job}", keep_count=99)
        self.trainer = Trainer(self.store, seed, job)
        self.archive = Archive(self.store, url or str(root / "archive"), pause=0.01, **({"full_every": 4} | options))
        self.records: dict[int, VersionRecord] = {}

    def publish(self, count: int = 1, **options: bool) -> VersionRecord:
        for _ in range(count):
            record = self.trainer.publish(len(self.records), **options)
            self.archive.archive_now("policy", record.number)
            self.records[record.number] = record
        return record

    @property
    def latest(self) -> Path:
        return self.root / "archive" / "policy" / "latest.json"


class Region:
    """A store that follows an archive; its threads run once it is started."""

    def __init__(self, root: Path, url: str = "", name: str = "region", keep_count: int = 9) -> None:
        self.store = Store(root / name, keep_count=keep_count)
        self.reports: list[tuple[str, str, str]] = []
        self.closed = False
        report = lambda name, what, reason: self.reports.append((name, what, reason))  # noqa: E731
        archive = Archive(self.store, url or str(root / "archive"), read_only=True, pause=0.01, report=report)
        self.archive, self.follower = archive, Follower(archive, root / name / "followed.json", pause=0.01)

    def has(self, home: Home, number: int) -> bool:
        known = self.store.catalogue.newest("policy")
        if known is None or known != home.records.get(number):
            return False
        assert content(self.store, known) == content(home.store, home.records[number])
        return True

    @property
    def failures(self) -> list[str]:
        return [f"{name} {reason}" for name, what, reason in self.reports if what == "failed"]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.follower.close()
            self.store.close()
