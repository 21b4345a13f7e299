"""Damaged and made-up files and messages: each reader ends in success or in one documented error, and changes no other data.

`make fuzz` does the same for as long as one likes.
"""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from resharder.client.inference import version_page
from resharder.client.inference.version_page import Page
from resharder.converters.storage.files import INDEX_FILE, read_checkpoint_layout
from resharder.server import config
from resharder.server.config import ConfigError
from resharder.server.fleets.persistence import FleetFiles, stored
from resharder.server.infra.event_log import Events
from resharder.server.state.fleet import Fleet
from resharder.server.store.store import Store

from tests.support import store_versions
from tests.support.fuzzing import damage
from tests.support.hostile_files import Bench, bench
from tests.support.hostile_targets import TARGETS, try_seed
from tests.support.in_process_daemon import inside
from tests.support.store_versions import numbers

pytestmark = pytest.mark.slow

INPUTS = {"configuration": 25, "store_folder": 60, "torch_dist": 60}
ONE_END = ("configuration", "events", "store_folder")
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def place() -> Iterator[Bench]:
    with bench() as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.process, pytest.mark.full] if name == "torch_dist" else []) for name in TARGETS],
)
def test_a_reader_of_damaged_content_fails_as_documented(name: str, place: Bench) -> None:
    ends = [try_seed(name, str(number), place) for number in range(INPUTS.get(name, 150))]
    assert len(set(ends)) > 1 or name in ONE_END, f"all inputs end with {ends[0]}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store with versions 1 to 3, and 4, which was aborted."""
    store = Store(tmp_path / "store", limit_bytes=1 << 24, shared=False)
    epoch = store_versions.claim(store)
    for step in range(3):
        store_versions.publish(store, epoch, step)
    store.lifecycle.abort("policy", store.lifecycle.begin("policy", epoch, 9, "job").number, "a test")
    store.close()
    return tmp_path / "store"


@pytest.mark.parametrize(
    "content", [b"[]", b"null", b'{"version": null}', b"{", DEEP, b'{"version": 1e999}', b'{"version": "x"}']
)
def test_a_store_with_a_damaged_claim_starts_and_uses_no_number_again(root: Path, content: bytes) -> None:
    (root / "models/policy/claim.json").write_bytes(content)
    store = Store(root, limit_bytes=1 << 24, shared=False)
    try:
        assert numbers(store) == [1, 2, 3]
        epoch = store_versions.claim(store, "later")
        assert epoch == 2
        assert store_versions.publish(store, epoch, 10).number == 5, "4 is in the history alone"
    finally:
        store.close()


@pytest.mark.parametrize("line", [b"[]", b"7", DEEP, b'{"model": 1, "number": "x"}', b'{"model": "policy", "number": 1e400}'])
def test_damaged_lines_of_the_history_are_skipped(root: Path, line: bytes) -> None:
    history = root / "history.jsonl"
    history.write_bytes(line + b"\n" + history.read_bytes())
    store = Store(root, limit_bytes=1 << 24, shared=False)
    assert numbers(store) == [1, 2, 3]
    store.close()


@pytest.mark.parametrize("line", [b'{"id": "x", "time": 0, "kind": "k", "subject": 1, "what": ""}', b"[]", DEEP, b'{"id": null}'])
def test_damaged_events_are_skipped(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "events.jsonl").write_bytes(line + b"\n")
    log = Events(tmp_path)
    assert log.add("fleet", "fleets/a", "changed").id == 1
    assert [event.subject for event in log.last(9)] == ["fleets/a"]
    log.close()


def test_a_fleet_in_the_file_of_another_one_is_skipped(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path)
    files.save(Fleet("a", "policy"), 1.0)
    (tmp_path / "b.json").write_bytes(stored(Fleet("a", "other"), 1.0))
    (tmp_path / "c.json").write_bytes(DEEP)
    assert files.load(1.0) == {"a": Fleet("a", "policy")}


def test_a_count_of_starts_of_too_many_digits_begins_again(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path)
    (tmp_path / "starts").write_bytes(b"9" * 5000)
    assert [files.next_start(), files.next_start()] == [1, 2]


def test_a_configuration_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"[" * 3000)
    with pytest.raises(ConfigError, match="is not a YAML file with options"):
        config.load(tmp_path / "config.yaml", {})


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x.safetensors"}}]
)
def test_an_index_with_other_content_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"expected|does not name the file of each tensor"):
        read_checkpoint_layout(tmp_path)


@pytest.mark.parametrize("payload", [b"", b"{}", b"[1, 2]", b"[[[0, 1]], [[0, null]]]", b"\xff", DEEP[:50_000]])
def test_a_page_with_other_content_names_no_version(tmp_path: Path, payload: bytes) -> None:
    page = Page(tmp_path / "page", lambda: 1.0)
    check = version_page._checksum(1, payload)
    page.path.write_bytes(version_page._HEADER.pack(1, len(payload), check) + payload)
    assert page.version == 0
    page.write(0, 3)
    assert page.version == 0, "a page that was unreadable names no version"
    page.close()


PATHS = ("/", "/api/status", "/metrics", "/healthz", "/readyz", "/status.js", "/x%00y")
REQUESTS = [
    f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic eDp5\r\n\r\n".encode()
    for method in ("GET", "POST")
    for path in PATHS
]
STATUSES = {200, 400, 401, 404, 405, 414, 421, 431, 501}


def exchange(address: tuple[str, int], content: bytes, seconds: float) -> bytes:
    """Send bytes and return the start of the answer; nothing if there is none within some seconds, as to a part of a request."""
    with socket.create_connection(address, 20) as connection:
        connection.settimeout(seconds)
        try:
            connection.sendall(content)
            return connection.recv(1 << 16)
        except OSError:
            return b""


@pytest.mark.timeout(300)
def test_damaged_http_requests_get_a_status_or_no_answer_and_pages_stay_up(tmp_path: Path) -> None:
    random, contents = Random("http"), list[bytes]()
    for number in range(400):
        content = random.choice(REQUESTS)
        for _ in range(random.choice((0, 1, 2, 5))):
            content = damage(random, content)
        if number % 20 == 0:
            content = content[:-2] + b"x: " + b"y" * random.choice((100, 20_000)) + b"\r\n\r\n"
        contents.append(content)
    with inside(store=tmp_path / "store", store_limit_bytes=1 << 24, web_listen="127.0.0.1:0") as (daemon, _):
        host, _, port = daemon.shown.listen.rpartition(":")
        with ThreadPoolExecutor(8) as pool:  # they wait for those that get no answer
            answers = list(pool.map(lambda content: exchange((host, int(port)), content, 0.2), contents))
        statuses = set[int]()
        for content, answer in zip(contents, answers, strict=True):
            if answer:
                statuses.add(int(answer.split(b" ", 2)[1]))
                assert statuses <= STATUSES, f"{content!r} is answered {answer[:200]!r}"
        assert b" 200 " in exchange((host, int(port)), REQUESTS[3], 20.0)[:20]
    assert statuses >= {400, 404}, f"only {statuses}"


@pytest.mark.parametrize(("name", "seed", "end"), [("version_manifest", "2-1/1283", "BadManifest")])
def test_a_seed_that_once_failed_ends_as_documented(name: str, seed: str, end: str, place: Bench) -> None:
    assert try_seed(name, seed, place) == end


def test_an_index_with_a_name_longer_than_a_file_system_permits_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": "x" * 300}}))
    with pytest.raises(ValueError, match="expected plain file names, found 'xxx"):
        read_checkpoint_layout(tmp_path)
