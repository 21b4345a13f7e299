"""The sampler counts what a process has, and sees what it leaks."""

import mmap
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from subprocess import PIPE, Popen

from tests.soak.sampler import descriptors, fields, kind, mappings, memory, sizes
from tests.soak.soak import fill_journals
from tests.soak.verdict import BOUNDS


def test_descriptors_are_counted_by_kind(tmp_path: Path) -> None:
    before = descriptors(os.getpid())
    read, write = os.pipe()
    with (tmp_path / "open").open("w"), tempfile.TemporaryFile(dir="/dev/shm"):
        now = descriptors(os.getpid())
    os.close(read)
    os.close(write)
    grown = {name: now[name] - before[name] for name in now if now[name] != before[name]}
    assert grown == {"descriptors": 4, "pipes": 2, "files": 1, "segments": 1}


def test_links_of_descriptors_have_kinds() -> None:
    links = {"socket:[7]": "sockets", "pipe:[7]": "pipes", "anon_inode:[eventpoll]": "events"}
    links |= {"/dev/shm/a (deleted)": "segments", "/memfd:x (deleted)": "segments", "/tmp/a": "files"}
    assert {link: kind(link) for link in links} == links


def test_memory_that_is_written_is_anonymous_and_unique() -> None:
    before = memory(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 64)
    now = memory(os.getpid())
    assert now["anonymous"] - before["anonymous"] > 0.9 * len(held)
    assert now["uss"] - before["uss"] > 0.9 * len(held)


THREADS = """
import sys, threading
print("one", flush=True)
sys.stdin.readline()
thread = threading.Thread(target=sys.stdin.read)
thread.start()
print("two", flush=True)
thread.join()
"""


def test_threads_are_counted() -> None:
    """The threads of a process that starts no others."""
    with Popen([sys.executable, "-c", THREADS], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "one\n"
        before = memory(process.pid)["threads"]
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "two\n"
        assert memory(process.pid)["threads"] == before + 1
        process.stdin.close()


def test_mapped_files_in_shared_memory_are_held_until_they_are_unmapped() -> None:
    held = set[str]()
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="resharder-test-") as file:
        file.truncate(1 << 16)
        mapped = mmap.mmap(file.fileno(), 1 << 16)
        before = mappings(os.getpid(), held)["mappings"]
        assert file.name in held
        mapped.close()
        assert mappings(os.getpid(), again := set[str]())["mappings"] < before
        assert file.name not in again


def test_measures_of_a_process_have_bounds() -> None:
    measures = {*memory(os.getpid()), *descriptors(os.getpid()), *mappings(os.getpid(), set())}
    assert measures <= BOUNDS.keys()


def test_fields_are_numbers_with_or_without_a_unit() -> None:
    assert fields("Name:\tpython\nThreads:\t7\nRssShmem:\t   12 kB\n") == {"Threads": 7.0, "RssShmem": 12.0}


def test_filled_journals_are_close_to_their_rotation(tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill_journals(store)
    assert 9_000 < (store / "events.jsonl").read_bytes().count(b"\n") < 10_000
    assert 0.9 * (2 << 20) < (store / "history.jsonl").stat().st_size < 2 << 20
    assert len(sizes(store)) == 2


def test_folders_that_are_removed_meanwhile_are_left_out(tmp_path: Path) -> None:
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            (tmp_path / "version").mkdir()
            (tmp_path / "version" / "model").write_bytes(b"1234")
            shutil.rmtree(tmp_path / "version")

    (tmp_path / "kept").write_bytes(b"12")
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(set(sizes(tmp_path)) in ({2}, {2, 0}, {2, 4}) for _ in range(300))
    finally:
        ended.set()
        thread.join()
    assert sizes(tmp_path, "ke*", "x") == [2]
