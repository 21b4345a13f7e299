"""The lease of daemons: one holder at a time, by each host's own clock; and standby daemons as processes."""

import itertools
import json
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from resharder.converters.geometry.layout import TensorSpec
from resharder.server.standby.lease import Lease, LeaseConflict, LeaseRecord, LeaseStore
from resharder.server.standby.lease_file import LeaseFile
from resharder.server.standby.tenure import REPLACED_STATUS, read_term

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.publishing import Job, random_weights, whole

SECONDS = 2.0
SPECS = [TensorSpec("embed", "BF16", (96, 40)), TensorSpec("norm", "F32", (40,))]


class Memory:
    """A store in memory."""

    place = "the lease in memory"

    def __init__(self) -> None:
        self.record: LeaseRecord | None = None
        self.count = itertools.count()

    def read(self) -> LeaseRecord | None:
        return self.record

    def write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        if before != self.record:
            raise LeaseConflict("it has changed")
        self.record = replace(after, version=str(next(self.count)))
        return self.record


class Cut:
    """One daemon's way to a store."""

    place = "the lease in memory"

    def __init__(self, store: Memory) -> None:
        self._store, self.reachable = store, True

    def read(self) -> LeaseRecord | None:
        return self._way().read()

    def write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        return self._way().write(before, after)

    def _way(self) -> Memory:
        if not self.reachable:
            raise OSError("no route to the lease")
        return self._store


def held(store: LeaseStore, name: str = "a", *, lost: Callable[[str], object] = print, above: int = 0) -> Lease:
    lease = Lease(store, name, SECONDS, lost)
    assert lease.acquire(lambda: above, threading.Event(), lambda reason: None)
    return lease


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LeaseStore:
    return Memory() if request.param == "memory" else LeaseFile(tmp_path / "shared/lease")


def test_the_first_daemon_takes_a_term_above_that_of_its_folder(store: LeaseStore) -> None:
    assert held(store).term == 1
    found = store.read()
    assert found is not None
    assert (found.term, found.holder) == (1, "a")
    assert held(Memory(), above=7).term == 8


def test_a_lease_that_was_released_is_taken_at_once(store: LeaseStore) -> None:
    first = held(store)
    first.start()
    first.release()
    began = time.monotonic()
    assert held(store, "b").term == 2
    assert time.monotonic() - began < SECONDS / 2


def test_a_standby_waits_for_a_whole_lease_and_names_the_holder(store: LeaseStore) -> None:
    first, reasons = held(store), list[str]()
    began = time.monotonic()
    second = Lease(store, "b", SECONDS, print)
    assert second.acquire(lambda: 0, threading.Event(), reasons.append)
    assert SECONDS < time.monotonic() - began < 2 * SECONDS
    assert (first.term, second.term) == (1, 2)
    assert [re.sub("the lease in .*? in", "IT in", reason) for reason in reasons] == ["a holds IT in term 1"]


def test_a_lease_that_is_renewed_is_never_taken_and_its_holder_never_ends(store: LeaseStore) -> None:
    lost, ended = list[str](), threading.Event()
    first = held(store, lost=lost.append)
    first.start()
    threading.Timer(3 * SECONDS, ended.set).start()
    assert not Lease(store, "b", SECONDS, print).acquire(lambda: 0, ended, lambda reason: None)
    first.release()
    assert lost == []


def test_a_holder_that_cannot_renew_ends_before_a_standby_may_take_the_lease() -> None:
    store, ends = Memory(), list[float]()
    cut_off = Cut(store)
    first = held(cut_off, lost=lambda reason: ends.append(time.monotonic()))
    first.start()
    time.sleep(SECONDS)
    cut_off.reachable, cut = False, time.monotonic()
    second = Lease(store, "b", SECONDS, print)
    assert second.acquire(lambda: 0, threading.Event(), lambda reason: None)
    assert len(ends) == 1
    assert cut < ends[0] < time.monotonic()
    assert second.term == 2


def test_a_holder_that_finds_another_one_in_its_place_ends(store: LeaseStore) -> None:
    lost = list[str]()
    first = held(store, lost=lost.append)
    second = Lease(store, "b", SECONDS, print)
    assert second.acquire(lambda: 0, threading.Event(), lambda reason: None, at_once=True)
    first.start()
    wait_until(lambda: bool(lost), timeout=SECONDS * 2)
    assert re.match(r"another daemon has taken the lease in .*\. This daemon ends; start it again as a standby$", lost[0])


def test_a_term_has_one_holder_however_many_take_it_at_once(tmp_path: Path) -> None:
    for attempt in range(20):
        stores, barrier, took = [LeaseFile(tmp_path / f"{attempt}") for _ in range(6)], threading.Barrier(6), list[int]()

        def take(store: LeaseFile, name: str, barrier: threading.Barrier = barrier, took: list[int] = took) -> None:
            barrier.wait()
            with suppress(LeaseConflict):
                took.append(store.write(None, LeaseRecord(1, name)).term)

        threads = [threading.Thread(target=take, args=(each, f"d{n}")) for n, each in enumerate(stores)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert took == [1]


def test_a_term_whose_taker_died_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "lease.1").touch()
    assert held(LeaseFile(tmp_path / "lease")).term == 2


def test_a_slow_taker_of_an_old_term_does_not_write_over_a_later_one(tmp_path: Path) -> None:
    slow, store = LeaseFile(tmp_path / "lease"), LeaseFile(tmp_path / "lease")
    assert slow.read() is None
    held(store, above=4)
    with pytest.raises(LeaseConflict, match="a has term 5"):
        slow.write(None, LeaseRecord(1, "slow"))
    assert json.loads((tmp_path / "lease").read_text())["term"] == 5


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"term": "1", "holder": "a", "renewals": 0}', '{"term": 1, "holder": 3}'])
def test_a_file_that_is_no_lease_is_never_taken(content: str, tmp_path: Path) -> None:
    (tmp_path / "lease").write_text(content)
    reasons, ended = list[str](), threading.Event()
    threading.Timer(SECONDS, ended.set).start()
    assert not Lease(LeaseFile(tmp_path / "lease"), "a", SECONDS / 4, print).acquire(lambda: 0, ended, reasons.append)
    assert "make sure that no daemon runs, and remove it" in reasons[0]


@pytest.mark.parametrize("seed", range(50))
def test_at_no_time_two_holders_believe_that_the_lease_is_theirs(seed: int) -> None:
    """Daemons whose clocks start anywhere, and that are late, cut off and killed: none holds what another one holds."""
    chance, now, store = random.Random(seed), 0.0, Memory()
    ways = [Cut(store) for _ in range(3)]
    clocks = [chance.uniform(0, 1e6) for _ in ways]

    def new(number: int) -> Lease:
        return Lease(ways[number], f"daemon {number} at {now}", SECONDS, print, clock=lambda: now + clocks[number])

    leases, terms = [new(number) for number in range(3)], list[int]()
    for _ in range(3000):
        now += chance.choice([0.01, 0.1, 0.3])
        number = chance.randrange(3)
        lease, ways[number].reachable = leases[number], chance.random() > 0.2
        if not lease.term:
            if not lease.take(lambda: 0):
                terms.append(lease.term)
        elif lease.expires or chance.random() < 0.01:
            leases[number] = new(number)
        elif chance.random() < 0.5:
            try:
                lease.renew()
            except LeaseConflict:
                leases[number] = new(number)
            except OSError:
                pass
        assert sum(bool(each.term) and not each.expires for each in leases) <= 1
    assert terms == sorted(set(terms))
    assert len(terms) > 3


# Processes


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def pair(shared: Path) -> Iterator[tuple[Daemon, Daemon]]:
    """A daemon that holds the lease, and a standby."""
    web = free_port()
    options = {"store": shared / "store", "lease_file": shared / "lease", "daemon_lease_seconds": SECONDS, "chunk_bytes": 1024}
    with closing(Daemon(**options)) as first, closing(Daemon(**options, web_listen=f"127.0.0.1:{web}")) as second:  # type: ignore[arg-type]
        first.start()
        second.environment["TEST_WEB"] = str(web)
        second.launch()
        wait_until(lambda: probe(second)[0] == 503, timeout=60)
        yield first, second


def probe(standby: Daemon, path: str = "readyz") -> tuple[int, str]:
    try:
        answer = httpx.get(f"http://127.0.0.1:{standby.environment['TEST_WEB']}/{path}", timeout=5)
    except httpx.HTTPError:
        return 0, ""
    return answer.status_code, answer.text


def wait_serving(daemon: Daemon) -> float:
    began = time.monotonic()
    wait_until(lambda: "listening" in daemon.log.read_text(), timeout=60)
    return time.monotonic() - began


def test_a_standby_says_whom_it_waits_for_and_takes_over_when_the_holder_is_killed(pair: tuple[Daemon, Daemon]) -> None:
    first, second = pair
    Job(first.channel, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))
    wait_until(lambda: "holds the lease" in probe(second)[1], timeout=10)
    assert re.fullmatch(r"standby: \S+ holds the lease in \S+ in term 1\n", probe(second)[1])
    assert probe(second, "healthz")[0] == 200
    first.kill()
    assert wait_serving(second) < 2 * SECONDS + 2
    published = Job(second.channel, SPECS, [whole(SPECS)]).connect().publish(2, random_weights(SPECS, 2))
    assert (published.number, published.State.Name(published.state)) == (2, "READY")
    wait_until(lambda: probe(second) == (200, "ready\n"), timeout=10)


def test_a_standby_goes_on_at_once_when_the_holder_is_stopped(pair: tuple[Daemon, Daemon]) -> None:
    first, second = pair
    assert first.stop() == 0
    assert wait_serving(second) < SECONDS


def test_a_holder_that_was_suspended_ends_when_it_continues(pair: tuple[Daemon, Daemon]) -> None:
    first, second = pair
    assert first.process is not None
    first.process.send_signal(signal.SIGSTOP)
    wait_serving(second)
    first.process.send_signal(signal.SIGCONT)
    assert first.wait(60) == REPLACED_STATUS
    term = read_term(second.store)
    assert term is not None
    assert term.number == 2


def test_a_holder_whose_storage_is_gone_ends_before_its_lease(pair: tuple[Daemon, Daemon], shared: Path) -> None:
    first, second = pair
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)
    (shared / "lease").unlink()
    for claim in shared.glob("lease.*"):
        claim.unlink()
    shutil.move(shared / "store", shared / "elsewhere")
    shared.rename(shared.with_name("gone"))
    began = time.monotonic()
    assert first.wait(60) == REPLACED_STATUS
    assert time.monotonic() - began < SECONDS + 1
    second.process.send_signal(signal.SIGCONT)


def test_a_standby_ends_by_a_signal(pair: tuple[Daemon, Daemon]) -> None:
    _, second = pair
    assert second.stop() == 0
    assert "listening" not in second.log.read_text()
