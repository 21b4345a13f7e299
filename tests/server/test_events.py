"""The journal of events: ids over kills and rotations, subjects, and those who follow."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.server.infra.event_log import Event, Events, event_to_proto
from resharder.v1 import operator_pb2

from tests.support.waits import without_pauses

WRITER = """
import sys
from pathlib import Path
from resharder.server.infra.event_log import Events
events = Events(Path(sys.argv[1]), limit=50)
while True:
    print(events.add("version", "models/policy/versions/1", "ready", "x" * 1000, step=1).id, flush=True)
"""


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events]


def test_ids_increase_over_a_kill_in_the_middle_of_writing_and_nothing_that_was_seen_is_lost(tmp_path: Path) -> None:
    newest = 0
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            seen = [int(writer.stdout.readline()) for _ in range(120)]
            writer.send_signal(signal.SIGKILL)
            seen += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
        assert seen == list(range(newest + 1, newest + len(seen) + 1))
        newest = Events(tmp_path)._id
        assert newest >= seen[-1]
    kept = Events(tmp_path, limit=50).last(50)
    assert ids(kept) == list(range(newest - 49, newest + 1)), "the newest are whole over a rotation"
    assert len((tmp_path / "events.1.jsonl").read_bytes().splitlines()) == 50
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "events.1.jsonl"}


def test_a_line_that_was_cut_short_is_dropped_and_costs_no_other(tmp_path: Path) -> None:
    first = Events(tmp_path)
    for what in ("claimed", "serving"):
        first.add("server", "servers/a", what)
    file = tmp_path / "events.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    second = Events(tmp_path)
    assert [event.what for event in second.last(10)] == ["claimed"]
    assert second.add("server", "servers/a", "lost").id == 2
    assert [event.what for event in Events(tmp_path).last(10)] == ["claimed", "lost"]


@pytest.mark.parametrize("damaged", [0, 1, 7, (1 << 63) - 1])
def test_a_line_with_another_id_hides_no_other_event(tmp_path: Path, damaged: int) -> None:
    first = Events(tmp_path)
    for what in ("claimed", "serving", "lost"):
        first.add("server", "servers/a", what)
    first.close()
    file = tmp_path / "events.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"id": 2', b'"id": %d' % damaged))
    second = Events(tmp_path)
    added = second.add("server", "servers/a", "left")
    listed = second.last(10)
    assert {event.what for event in listed} >= {"claimed", "lost", "left"}
    assert (ids(listed), listed[-1]) == (sorted(ids(listed)), added)
    assert event_to_proto(added).id == added.id


def test_a_subject_is_the_resource_itself_or_what_is_under_it(tmp_path: Path) -> None:
    events = Events(tmp_path)
    for subject in ("models/a", "models/a/versions/1", "models/ab/versions/1", "servers/a", "fleets/a"):
        events.add("version", subject, "said")
    assert [event.subject for event in events.last(10, "models/a")] == ["models/a", "models/a/versions/1"]
    assert [event.subject for event in events.after(1, "models/ab")] == ["models/ab/versions/1"]
    assert ids(events.last(2)) == [4, 5]
    assert ids(events.after(3)) == [4, 5]
    assert events.last(0) == []


def test_who_follows_gets_what_was_and_what_comes_until_the_journal_closes(tmp_path: Path) -> None:
    events = Events(tmp_path)
    events.add("server", "servers/a", "claimed")
    started = threading.Semaphore(0)

    def follow(subject: str) -> list[int]:
        found = []
        for event in without_pauses(events.follow(0, subject)):
            found.append(event.id)
            started.release()
        return found

    with ThreadPoolExecutor(2) as pool:
        both, one = pool.submit(follow, ""), pool.submit(follow, "servers/a")
        assert all(started.acquire(timeout=60) for _ in range(2))
        events.add("server", "servers/b", "claimed")
        events.add("server", "servers/a", "serving")
        assert all(started.acquire(timeout=60) for _ in range(3))
        events.close()
        assert (both.result(60), one.result(60)) == ([1, 2, 3], [1, 3])
    assert events.add("daemon", "daemon", "stopped").id == 4


def test_a_list_call_takes_the_newest_or_those_after_an_id_and_goes_on_without_a_gap(tmp_path: Path) -> None:
    events = Events(tmp_path)
    for number in range(150):
        events.add("version", f"models/policy/versions/{number}", "ready")
    asked = operator_pb2.ListEventsRequest
    assert ids(list(events.listed(asked()))) == list(range(51, 151))
    assert ids(list(events.listed(asked(last=2)))) == [149, 150]
    assert ids(list(events.listed(asked(after=148)))) == [149, 150]
    going_on = without_pauses(events.listed(asked(last=1, follow=True)))
    assert next(going_on).id == 150
    events.add("version", "models/policy/versions/150", "ready")
    assert next(going_on).id == 151


def test_writers_in_many_threads_get_ids_of_their_own_in_the_order_of_the_file(tmp_path: Path) -> None:
    events = Events(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: events.add("server", f"servers/{i}", "claimed").id, range(400)))
    assert sorted(made) == list(range(1, 401))
    assert ids(Events(tmp_path).last(400)) == list(range(1, 401))


def test_an_operators_event_is_synced_before_it_is_answered_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    events = Events(tmp_path)

    def of_the_journal() -> list[str]:
        """Threads that an earlier test left behind may sync as well."""
        return [path for path in synced if path.startswith(str(tmp_path))]

    events.add("server", "servers/a", "claimed")
    assert of_the_journal() == []
    events.add("operator", "fleets/policy", "rolled-back")
    assert of_the_journal() == [str(tmp_path / "events.jsonl"), str(tmp_path)]


def test_a_full_medium_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, line: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        events.add("server", "servers/a", "claimed")
    events.add("server", "servers/a", "serving")
    assert [event.what for event in events.last(10)] == ["claimed", "serving"]
    again = Events(tmp_path)
    assert [(event.id, event.what) for event in again.last(10)] == [(1, "claimed"), (2, "serving")]
    assert again.add("server", "servers/a", "lost").id == 3


def test_what_a_medium_refused_last_is_written_when_the_journal_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, real = Events(tmp_path), os.write
    with monkeypatch.context() as half:
        half.setattr(os, "write", lambda file, line: real(file, line[:5]))
        events.add("server", "servers/a", "claimed")
    events.close()
    assert [(event.id, event.what) for event in Events(tmp_path).last(10)] == [(1, "claimed")]


def test_a_journal_goes_on_after_its_new_file_could_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, real = Events(tmp_path, limit=2), os.open
    events.add("server", "servers/a", "claimed")
    events.add("server", "servers/a", "serving")

    def refuse(path, *arguments):
        raise OSError(24, "Too many open files", str(path))

    with monkeypatch.context() as full:
        full.setattr(os, "open", refuse)
        events.add("server", "servers/a", "lost")
    assert os.open is real
    events.add("server", "servers/a", "claimed")
    events.close()
    assert [event.id for event in Events(tmp_path, limit=4).last(10)] == [1, 2, 3, 4]


def test_an_event_as_a_message_says_all_of_it(tmp_path: Path) -> None:
    event = Events(tmp_path).add("move", "fleets/policy", "failed", "2 of 3 canaries failed", move=7)
    message = event_to_proto(event)
    assert (message.id, message.kind, message.subject, message.what) == (1, "move", "fleets/policy", "failed")
    assert (message.reason, dict(message.details)) == ("2 of 3 canaries failed", {"move": "7"})
    assert abs(message.time.ToNanoseconds() / 1e9 - event.time) < 1e-3
