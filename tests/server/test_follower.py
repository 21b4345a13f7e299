"""A daemon that follows an archive: it has what home has, or names what keeps it from that and keeps what it had."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from random import Random

import pytest
from resharder.server.archive.archive import Archive
from resharder.server.archive.follower import Followed
from resharder.server.state.errors import AlreadyExists, DataLoss, FailedPrecondition, Unavailable
from resharder.server.state.version import READY

from tests.support import bucket
from tests.support.archived_steps import HARM, LAYOUTS, Trainer, content, place, small_pieces, spoil  # noqa: F401
from tests.support.bucket import Bucket, Fault
from tests.support.observing import wait_until
from tests.support.regions import Home, Region
from tests.support.store_versions import numbers


@pytest.fixture
def opened(root: Path) -> Iterator[Callable[..., Region]]:
    regions: list[Region] = []

    def open_(url: str = "", **options: object) -> Region:
        regions.append(Region(root, url, **options))
        return regions[-1]

    yield open_
    for region in regions:
        region.close()


@pytest.fixture
def home(root: Path) -> Iterator[Home]:
    made = Home(root)
    yield made
    made.archive.close()
    made.store.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket.opened(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("on", ["folder", "s3"])
def test_every_version_comes_under_its_number_as_it_was(
    root: Path, opened: Callable[..., Region], on: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("s3").url if on == "s3" else ""
    home, region = Home(root, url), opened(url)
    home.publish()
    region.follower.start()
    for _ in range(9):
        newest = home.publish().number
        wait_until(lambda number=newest: region.has(home, number))
    assert region.failures == []
    restored = [reason for _, what, reason in region.reports if what == "restored"]
    assert all("of the store and" in reason for reason in restored[1:]), "only the first one in full"
    assert region.follower.followed() == [Followed("policy", newest, region.follower.followed()[0].archive_time, has=True)]
    home.archive.close()
    home.store.close()


def test_a_look_at_a_bucket_without_news_is_one_conditional_request(
    root: Path, s3: Bucket, opened: Callable[..., Region]
) -> None:
    home, region = Home(root, s3.url), opened(s3.url)
    home.publish(2)
    seen = region.follower.look("policy")
    s3.requests.clear()
    assert region.follower.look("policy", seen) is seen
    assert s3.requests == [("GET", "/versions/here/policy/latest.json")]
    assert s3.answered[-1].startswith("304")
    home.publish()
    assert region.follower.look("policy", seen) is not seen
    assert region.has(home, 3)
    home.archive.close()
    home.store.close()


@pytest.mark.parametrize("gap", [1, 3, 10, 20])
def test_any_gap_is_caught_up_by_the_way_with_the_fewest_bytes(home: Home, opened: Callable[..., Region], gap: int) -> None:
    region = opened()
    home.publish(2)
    region.follower.look("policy")
    home.publish(gap)
    region.reports.clear()
    region.follower.look("policy")
    assert region.has(home, 2 + gap)
    there = home.archive.checkpoints.find
    steps = [there("policy", number) for number in range(3, 3 + gap)]
    by_deltas = sum(each.stored_bytes(delta=True) for each in steps)
    last = next(number for number in range(2 + gap, 0, -1) if there("policy", number).full)
    in_full = there("policy", last).stored_bytes(delta=False)
    in_full += sum(there("policy", number).stored_bytes(delta=True) for number in range(last + 1, 3 + gap))
    way = "from version 2 of the store" if by_deltas < in_full else "in full"
    assert [way in reason for _, _, reason in region.reports] == [True]
    assert numbers(region.store) == [2, 2 + gap], "versions between are skipped"


def test_a_region_retires_what_its_own_retention_does_not_keep(home: Home, opened: Callable[..., Region]) -> None:
    region = opened(keep_count=2)
    for count in range(1, 6):
        home.publish()
        region.follower.look("policy")
        assert numbers(region.store) == [number for number in (count - 1, count) if number]
    region.archive.restore("policy", 1)
    home.publish()
    region.follower.look("policy")
    assert numbers(region.store) == [1, 5, 6], "what an operator restores stays"


def test_what_latest_skips_at_home_is_not_followed(home: Home, opened: Callable[..., Region]) -> None:
    region = opened()
    home.publish(2)
    home.publish(2, skipped=True)
    region.follower.look("policy")
    assert region.has(home, 2)
    region.archive.restore("policy", 4)
    assert region.store.catalogue.newest("policy") == home.records[4]
    home.publish()
    region.follower.look("policy")
    assert region.has(home, 5)


def test_a_region_publishes_and_archives_nothing_but_restores(home: Home, opened: Callable[..., Region]) -> None:
    region = opened()
    home.publish(3)
    region.follower.look("policy")
    with pytest.raises(
        FailedPrecondition, match=r"this daemon follows file://.*: archive the version with the daemon that writes"
    ):
        region.archive.archive_now("policy", 3)
    assert region.archive.restore("policy", 1) == home.records[1]


@pytest.mark.parametrize("how", HARM)
@pytest.mark.parametrize("which", ["file", "pieces", "archived", "latest"])
def test_harm_is_named_once_and_the_version_before_stays_until_it_is_mended(
    home: Home, root: Path, opened: Callable[..., Region], how: str, which: str
) -> None:
    region = opened()
    home.publish(2)
    region.follower.start()
    wait_until(lambda: region.has(home, 2))
    before = content(region.store, home.records[2])
    kept = root / "kept"
    shutil.copytree(root / "archive", kept)
    region.close()
    region = opened()  # looks at nothing until it is started
    home.publish()
    paths = {
        "file": place(root, 3) / f"{LAYOUTS[0].path}.delta",
        "pieces": place(root, 3) / "pieces.json.delta",
        "archived": place(root, 3).parent / "archived.json",
        "latest": home.latest,
    }
    path, whole = paths[which], paths[which].read_bytes()
    earlier = {
        "file": place(root, 2) / f"{LAYOUTS[0].path}.delta",
        "pieces": place(root, 2) / "pieces.json.delta",
        "archived": place(root, 2).parent / "archived.json",
        "latest": kept / "policy" / "latest.json",
    }[which]
    other = place(root, 2).parent / "archived.json" if how == "another" and which == "latest" else earlier
    spoil(path, how, other)
    region.follower.start()
    if (how, which) == ("earlier", "latest"):  # it names version 2, which is there
        wait_until(lambda: region.follower.followed()[0].has)
        assert region.failures == []
    else:
        wait_until(lambda: bool(region.failures))
        named = {"archived": "policy/00000003/archived.json", "latest": "policy/latest.json"}.get(
            which, f"00000003/\\w+/{path.name}"
        )
        assert region.follower.followed()[0].problem in region.failures[0]
        assert re.search(named, region.failures[0]), region.failures
    assert numbers(region.store) == [2]
    assert content(region.store, home.records[2]) == before
    assert len(region.failures) <= 1, "once, not with each try"
    path.write_bytes(whole)
    wait_until(lambda: region.has(home, 3))
    assert region.follower.followed()[0].problem == ""


def test_an_earlier_state_of_the_pointer_is_named_and_changes_nothing(home: Home, opened: Callable[..., Region]) -> None:
    region = opened()
    home.publish(2)
    earlier = home.latest.read_bytes()
    home.publish(2)
    region.follower.look("policy")
    home.latest.write_bytes(earlier)
    with pytest.raises(DataLoss, match=r"latest\.json names version 2, and has named version 4 before"):
        region.follower.look("policy")
    assert numbers(region.store) == [4]
    home.publish()  # home's next version mends it
    region.follower.look("policy")
    assert region.has(home, 5)


def test_another_jobs_registry_in_the_same_bucket_is_refused_by_name_over_restarts(
    home: Home, root: Path, opened: Callable[..., Region]
) -> None:
    region = opened()
    home.publish(2)
    region.follower.look("policy")
    shutil.rmtree(root / "archive")
    stranger = Home(root, seed=1, job="stranger")
    stranger.publish(5)
    region.close()
    region = opened()
    with pytest.raises(
        AlreadyExists, match=r"policy/latest\.json is of another lineage, .* another job's versions have taken their"
    ):
        region.follower.look("policy")
    assert numbers(region.store) == [2]
    fresh = opened(name="fresh")
    fresh.follower.look("policy")
    assert fresh.has(stranger, 5)
    stranger.archive.close()
    stranger.store.close()


def test_another_version_under_a_number_is_refused_by_name(home: Home, root: Path, opened: Callable[..., Region]) -> None:
    region = opened()
    home.publish(2)
    region.follower.look("policy")
    stranger = Home(root, str(root / "foreign"), seed=1, job="stranger")
    stranger.publish(3)
    home.publish()
    shutil.rmtree(root / "archive" / "policy" / "00000003")
    shutil.copytree(root / "foreign" / "policy" / "00000003", root / "archive" / "policy" / "00000003")
    with pytest.raises(AlreadyExists, match=r"is another models/policy/versions/3, not the one with fingerprint"):
        region.follower.look("policy")
    assert numbers(region.store) == [2]
    stranger.archive.close()
    stranger.store.close()


def test_a_version_that_home_removes_while_it_is_fetched_gives_way_to_the_next(
    home: Home, root: Path, opened: Callable[..., Region]
) -> None:
    region = opened()
    home.publish(2)
    region.follower.look("policy")
    home.archive._keep_count, home.archive._full_every = 1, 1
    home.publish()
    fetch, overtaken = region.archive.checkpoints.fetch, [False]

    def overtaking(*arguments: object) -> object:
        if not overtaken[0]:
            overtaken[0] = True
            home.publish()
            assert not (root / "archive" / "policy" / "00000003" / "archived.json").exists()
        return fetch(*arguments)

    region.archive.checkpoints.fetch = overtaking
    region.follower.start()
    wait_until(lambda: region.has(home, 4))
    assert overtaken[0]
    assert region.failures == []


def test_an_archive_that_removes_faster_than_a_region_fetches_is_named(
    home: Home, root: Path, opened: Callable[..., Region]
) -> None:
    region = opened()
    home.publish(2)
    region.follower.look("policy")
    home.archive._keep_count, home.archive._full_every = 1, 1
    home.publish()
    fetch = region.archive.checkpoints.fetch

    def overtaking(*arguments: object) -> object:
        if len(home.records) < 12:
            home.publish()
        return fetch(*arguments)

    region.archive.checkpoints.fetch = overtaking
    region.follower.start()
    wait_until(lambda: region.has(home, 12))
    assert region.failures


def test_two_regions_follow_one_bucket(home: Home, opened: Callable[..., Region]) -> None:
    one, other = opened(name="one"), opened(name="other")
    home.publish()
    for region in (one, other):
        region.follower.start()
    for _ in range(4):
        home.publish()
    for region in (one, other):
        wait_until(lambda region=region: region.has(home, 5))
        assert region.failures == []


def test_a_bucket_that_cannot_be_reached_is_named_and_followed_later(
    root: Path, s3: Bucket, opened: Callable[..., Region], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(root, s3.url)
    home.publish()
    s3.before = lambda method, path: 403
    monkeypatch.setattr("resharder.server.archive.follower._PATIENCE", 0.1)
    region = opened(s3.url)
    region.follower.start()
    wait_until(lambda: bool(region.failures))
    assert region.failures[0].startswith("archive not followed: s3://versions/here/")
    assert "a-secret" not in region.failures[0]
    assert [(each.model, bool(each.problem)) for each in region.follower.followed()] == [("", True)]
    s3.before = lambda method, path: None
    wait_until(lambda: region.has(home, 1))
    assert [each.problem for each in region.follower.followed()] == [""]
    home.archive.close()
    home.store.close()


def test_an_archive_of_an_earlier_release_gets_its_pointer_when_home_starts(
    home: Home, root: Path, opened: Callable[..., Region]
) -> None:
    home.publish(3)
    home.latest.unlink()
    region = opened()
    with pytest.raises(
        DataLoss, match=r"policy/latest\.json is missing: the daemon that archives there writes it when it starts"
    ):
        region.follower.look("policy")
    again = Archive(home.store, str(root / "archive"))
    again.start(restore=False)
    again.close()
    region.follower.look("policy")
    assert region.has(home, 3)


def test_of_many_writers_the_pointer_names_the_newest_version(home: Home, root: Path) -> None:
    home.publish(5)
    there = [home.archive.checkpoints.find("policy", number) for number in range(1, 6)]
    lineage = json.loads(home.latest.read_bytes())["lineage"]
    for archived in (*there, *there[::-1]):
        home.archive.checkpoints.point_at(archived)
    found = json.loads(home.latest.read_bytes())
    assert (found["number"], found["lineage"]) == (5, lineage)
    home.archive.checkpoints.remove("policy", 5)
    home.archive.checkpoints.point_at(there[3])
    found = json.loads(home.latest.read_bytes())
    assert (found["number"], found["lineage"]) == (4, lineage), "one that is gone gives way"


FAULTS: dict[str, tuple[Fault, ...]] = {
    "throttled": (429, 503), "failing": (500, 502), "cut": ("cut",), "stale": ("stale",), "lost": ("lost",),
    "all": (429, 503, 500, "cut", "stale", "lost"),
}  # fmt: skip


@pytest.mark.parametrize("which", FAULTS)
def test_a_bucket_that_fails_a_third_of_its_requests_loses_and_alters_nothing(
    root: Path, s3: Bucket, opened: Callable[..., Region], which: str
) -> None:
    random = Random(which)
    home, region = Home(root, s3.url), opened(s3.url)
    home.publish()
    region.follower.start()
    wait_until(lambda: region.has(home, 1))
    counts: Counter[Fault] = Counter()

    def before(method: str, path: str) -> Fault | None:
        if random.random() > 0.3:
            return None
        fault = random.choice(FAULTS[which])
        counts[fault] += 1
        return fault

    for _ in range(4):
        record = home.trainer.publish(len(home.records))
        home.records[record.number] = record
        s3.before = before
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                home.archive.archive_now("policy", record.number)
                break
            except (Unavailable, DataLoss):  # named; the background thread tries again as well
                continue
        time.sleep(0.3)
        s3.before = lambda method, path: None
    home.publish()
    wait_until(lambda: region.has(home, 6), timeout=90)
    assert counts.total() > 10
    for number in numbers(region.store):
        known = region.store.catalogue.get("policy", number)
        assert content(region.store, known) == content(home.store, home.records[number])
    fresh = opened(s3.url, name="fresh")
    for number in range(2, 7):
        assert fresh.archive.restore("policy", number) == home.records[number]
    home.archive.close()
    home.store.close()


_FOLLOW = """
import sys
from pathlib import Path
from tests.support.regions import Region
from tests.support import archived_steps
from resharder.server.archive import archived, checkpoints
archived.PIECE = checkpoints.PIECE = archived_steps.PIECE
Region(Path(sys.argv[1])).follower.look("policy")
"""


@pytest.mark.parametrize(
    ("point", "first"),
    [
        *product(
            ("follow.write", "follow.before-fetch", "restore.write", "restore.write@2", "adopt.before-proof",
             "adopt.before-rename", "adopt.after-rename"),
            (True, False),
        ),
        ("follow.write@2", True),  # once the lineage is known, it is written once
    ],
)  # fmt: skip
def test_a_region_killed_in_mid_fetch_goes_on_with_nothing_half_done(
    home: Home, root: Path, opened: Callable[..., Region], point: str, first: bool
) -> None:
    home.publish(3)
    if not first:
        region = opened()
        region.follower.look("policy")
        region.close()
        home.publish()
    environment = os.environ | {"RESHARDER_FAILPOINT": f"{point}=kill"}
    run = subprocess.run([sys.executable, "-c", _FOLLOW, str(root)], env=environment, timeout=300, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr
    region = opened()
    known = region.store.catalogue.find("policy")
    left = [] if known is None else sorted(record.number for record in known.of(READY))
    arrived = point == "adopt.after-rename" or (point, first) in [("follow.write@2", True), ("follow.write", False)]
    newest = len(home.records)
    assert left == ([3] if not first else []) + ([newest] if arrived else [])
    assert not list((region.store.folder.root / "models").glob("*/staging/*"))
    region.follower.look("policy")
    assert region.has(home, newest)


def test_home_killed_before_the_pointer_is_followed_from_its_next_start(
    home: Home, root: Path, opened: Callable[..., Region]
) -> None:
    home.publish(2)
    record = home.trainer.publish(2)
    home.records[record.number] = record
    home.archive.checkpoints.point_at = _refuse
    with pytest.raises(Unavailable):
        home.archive.archive_now("policy", record.number)
    region = opened()
    region.follower.look("policy")
    assert region.has(home, 2)
    again = Archive(home.store, str(root / "archive"))
    again.start(restore=False)
    again.close()
    region.follower.look("policy")
    assert region.has(home, 3)


def _refuse(archived: object) -> None:
    raise Unavailable("ARCHIVE_FAILED", "as if it was killed")
