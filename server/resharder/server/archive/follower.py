"""A daemon far away, that follows an archive: it sees nothing of home but the bucket, and writes nothing there.

    <url>/<model>/latest.json, each second ──► the version that it names, by the fewest bytes ──► READY, proven, under its number

What it cannot use it names, keeps the version that it has, and tries again. It remembers the lineage of each model, the name
that the archive gave to the model's versions: those of another job in the same bucket have another one, and are refused.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import is_count, is_text, parse_json
from resharder.server.archive.archive import Archive
from resharder.server.archive.archived import LATEST, Latest
from resharder.server.archive.remote import Content
from resharder.server.infra.backoff import backoff
from resharder.server.infra.filesystem import touching, write_file
from resharder.server.infra.medium import medium_errors
from resharder.server.state.errors import AlreadyExists, DaemonError, DataLoss, ResourceNotFound, Unavailable

_HOLDER = "follower"
_LOOK = 10.0  # between two lists of the models
_LONGEST = 30.0  # seconds between two tries
_AT_ONCE = 2  # versions that are fetched
_OVERTAKEN = 3  # versions in a row that the archive may remove while they are fetched
_PATIENCE = 30.0  # seconds that a starting daemon waits for the archive
_log = structlog.get_logger("resharder.follower")


class Followed(NamedTuple):
    """State of a followed model.

    Attributes:
        model: Its name; empty while the archive cannot be listed.
        wanted: Number of the version that latest.json names; 0 if unknown.
        archive_time: Time at which that version was archived, in seconds since 1970.
        has: Whether the daemon has it.
        problem: Why the daemon lacks it, or cannot read latest.json; empty if there is no problem.
    """

    model: str
    wanted: int = 0
    archive_time: float = 0.0
    has: bool = False
    problem: str = ""


class _Known(NamedTuple):
    """Lineage of a model, and the highest version of latest.json that became READY here."""

    lineage: str
    number: int


class Follower:
    """Brings the newest archived version of each model into a store. Thread-safe: each model has a thread of its own.

    Args:
        archive: The archive, opened to be read only.
        file: File that remembers lineages and versions.
        pause: Seconds between two looks at a latest.json, and before the first further try of what has failed.

    Raises:
        MediumRefused: The file cannot be read.
    """

    def __init__(self, archive: Archive, file: Path, pause: float = 1.0) -> None:
        self._archive, self._file, self._pause = archive, file, pause
        self._lock = threading.Lock()  # guards what is known, and its file
        self._known = _read(file)
        self._followed: dict[str, Followed] = {}  # replaced, never modified
        self._problem = ""
        self._slots = threading.Semaphore(_AT_ONCE)
        self._looked, self._threads = threading.Event(), list[threading.Thread]()

    @property
    def url(self) -> str:
        """URL of the archive."""
        return self._archive.url

    def followed(self) -> list[Followed]:
        """Return the state of each model, and one without a model while the archive cannot be listed."""
        unseen = [Followed("", problem=self._problem)] if self._problem else []
        return unseen + [each for _, each in sorted(self._followed.items())]

    def start(self) -> None:
        """Begin to follow, and return once the models are known, or after 30 seconds."""
        self._begin("follower", self._run)
        self._looked.wait(_PATIENCE)

    def close(self) -> None:
        """End, and wait for the threads. A version that is being fetched leaves nothing behind."""
        self._archive.close()
        for thread in self._threads:
            thread.join(30)

    # Models

    def _run(self) -> None:
        failures, begun = 0, set[str]()
        while not self._archive.closed.is_set():
            try:
                for model in self._archive.checkpoints.models(begun):
                    self._add(model)
                    begun.add(model)
                failures, self._problem = 0, ""
                self._looked.set()
            except Exception as error:
                failures += 1
                if failures == 1:
                    self._archive.failed("archive", "not followed", error)
                self._problem = str(error)
            self._archive.closed.wait(_LOOK if not failures else backoff(failures, self._pause, _LONGEST))

    def _add(self, model: str) -> None:
        """Follow a model. Servers that boot wait for its first version."""
        store = self._archive.store
        store.epochs.expect(model, 0, 0, coming=store.catalogue.newest(model) is None)
        self._put(Followed(model))
        self._begin(f"follow-{model}", lambda: self._follow(model))

    def _begin(self, name: str, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _put(self, followed: Followed) -> None:
        with self._lock:
            self._followed = self._followed | {followed.model: followed}

    # One model

    def _follow(self, model: str) -> None:
        failures, seen = 0, None
        while not self._archive.closed.is_set():
            try:
                seen, failures, wait = self.look(model, seen), 0, self._pause
            except Exception as error:
                failures, seen = failures + 1, None
                wait = 0.0 if self._is_overtaken(model, error, failures) else backoff(failures, self._pause, _LONGEST)
                if wait:
                    self._fail(model, error)
            self._archive.closed.wait(wait)

    @medium_errors()
    def look(self, model: str, seen: Content | None = None) -> Content:
        """Look at latest.json, have the version that it names, and return its content.

        `seen`: content of the last look, after which there was nothing left to do.

        Raises AlreadyExists (VERSION_DIFFERS) for versions of another lineage, DataLoss (CHECKSUM) for objects that are missing,
        damaged or older than before, and the errors of `Archive.restore`. The store is unchanged then.
        """
        latest, content = self._archive.checkpoints.latest(model, seen)
        if content is not None and content is seen:
            return content
        place = f"{self.url}/{model}/{LATEST}"
        if latest is None or content is None:
            raise DataLoss("CHECKSUM", f"{place} is missing: the daemon that archives there writes it when it starts")
        self._accept(place, latest)
        before = self._followed.get(model, Followed(model))
        self._put(Followed(model, latest.number, latest.archive_time, problem=before.problem))
        with self._slots:
            failpoint("follow.before-fetch")
            self._archive.restore(model, latest.number, latest.fingerprint)
        self._retain(model, latest.number)
        self._remember(model, _Known(latest.lineage, latest.number))
        self._put(Followed(model, latest.number, latest.archive_time, has=True))
        if before.problem:
            _log.info("followed_again", model=model, version=latest.number)
        return content

    def _retain(self, model: str, number: int) -> None:
        """Retire what the store's retention does not keep beside a version: an adopted one retires none, a released pin does."""
        lifecycle = self._archive.store.lifecycle
        lifecycle.pin(model, number, _HOLDER)
        lifecycle.release(model, number, _HOLDER)

    def _accept(self, place: str, latest: Latest) -> None:
        """Raise AlreadyExists (VERSION_DIFFERS) or DataLoss (CHECKSUM) unless a version continues those that were followed."""
        known = self._known.get(latest.model)
        if known is None:
            self._remember(latest.model, _Known(latest.lineage, 0))
        elif known.lineage != latest.lineage:
            raise AlreadyExists(
                "VERSION_DIFFERS",
                f"{place} is of another lineage, {latest.lineage[:40]}, than the versions that this daemon has followed, "
                f"{known.lineage}: another job's versions have taken their place. To follow those, give it an empty store",
            )
        elif latest.number < known.number:
            raise DataLoss(
                "CHECKSUM",
                f"{place} names version {latest.number}, and has named version {known.number} before: "
                "an earlier state of the bucket. This daemon keeps what it has",
            )

    def _is_overtaken(self, model: str, error: Exception, failures: int) -> bool:
        """Return whether a version was not there any more because the archive has gone on: the newer one is tried at once."""
        if failures > _OVERTAKEN or not isinstance(error, DataLoss | ResourceNotFound | Unavailable):
            return False
        try:
            latest, _ = self._archive.checkpoints.latest(model)
        except DaemonError:
            return False
        wanted = self._followed[model].wanted
        if latest is None or not wanted or latest.number <= wanted:
            return False
        _log.info("version_overtaken", model=model, version=wanted, newest=latest.number, reason=str(error))
        return True

    def _fail(self, model: str, error: Exception) -> None:
        followed = self._followed[model]
        if str(error) != followed.problem:
            name = f"models/{model}{f'/versions/{followed.wanted}' if followed.wanted else ''}"
            self._archive.failed(name, "not followed", error)
        self._put(followed._replace(problem=str(error), has=False))

    def _remember(self, model: str, known: _Known) -> None:
        with self._lock:
            if self._known.get(model) == known:
                return
            merged = self._known | {model: known}
            with touching(self._file, "writing"):
                failpoint("follow.write")
                write_file(self._file, json.dumps(merged).encode())
            self._known = merged


def _read(file: Path) -> dict[str, _Known]:
    """Return what is known of each model. An unreadable file is logged and counts as empty. Raises MediumRefused."""
    with touching(file, "reading"):
        content = file.read_bytes() if file.exists() else b"{}"
    try:
        found = {model: _Known(*known) for model, known in parse_json(content).items()}
        if not all(is_text(each.lineage) and is_count(each.number) for each in found.values()):
            raise ValueError(f"expected lineages and numbers, found {content[:64]!r}")
    except (ValueError, TypeError, AttributeError) as error:
        _log.error("followed_unreadable", file=str(file), error=str(error))
        return {}
    return found
