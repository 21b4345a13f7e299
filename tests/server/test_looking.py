"""Queries, renewals of leases and waits for a version are not held up by changes, however long these take."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.server.config import Config
from resharder.server.holding import set_pool
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.publisher import ACTIVE
from resharder.server.main import Daemon
from resharder.server.state.errors import FailedPrecondition, Unavailable
from resharder.server.state.server import Worker
from resharder.server.state.server_events import Attached
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.store import Store
from resharder.v1 import resources_pb2

from tests.support.digest_reference import compilations
from tests.support.store_versions import FILES, LAYOUTS, claim, numbers, publish, ready_version, settle
from tests.support.waits import completed

PATIENCE = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with one READY version, one publisher and one attached server, without a listener."""
    made = Daemon(Config(listen="127.0.0.1:0", web_listen="", store=tmp_path / "store", shared_memory=False, lease_seconds=600))
    record = ready_version(made.store)
    made.intake.create_publisher("policy", "job", 1, FILES)
    completed(made.fleets.claim, "s", "policy", "", wait_seconds=0, boot=True)
    made.fleets.attach("s", Attached("control", 1, "10.0.0.1:8000"))
    made.fleets.report_worker("s", Worker(0, resources_pb2.Worker.BOOTED, 1, process="p", fingerprint=record.fingerprint))
    yield made
    made.server.start()
    made.stop()


LOOKS: dict[str, Callable[[Daemon], object]] = {
    "a lease is renewed": lambda d: d.intake.publisher("models/policy/publishers/1", 0).name,
    "publishers are listed": lambda d: [publisher.name for publisher in d.intake.publishers()],
    "a version is looked at": lambda d: d.store.catalogue.get("policy", 1).state,
    "a version is waited for": lambda d: completed(d.intake.wait_version, "policy", 1, 0, False).state,
    "its servers are waited for": lambda d: completed(d.intake.wait_version, "policy", 1, 0, True).state,
    "versions are listed": lambda d: [record.number for record in d.store.catalogue.versions("policy")],
    "the newest is asked for": lambda d: d.store.catalogue.newest("policy").number,  # type: ignore[union-attr]
    "who uses it": lambda d: d.store.lifecycle.holders("policy", 1),
    "whose the model is": lambda d: d.store.epochs.claim("policy"),
    "models are listed": lambda d: d.store.catalogue.models(),
    "servers are listed": lambda d: [view.server.id for view in d.fleets.servers()],
    "fleets are listed": lambda d: [(view.fleet.name, view.wanted_version, view.servers) for view in d.fleets.fleets()],
    "servers are counted": lambda d: d.fleets.serving("policy", 1),
    "an order is written down": lambda d: d.fleets.policy("s"),
    "a call's lane is found": lambda d: (
        d.fleets.model_of("s"),
        d.fleets.fleet_of("s"),
        d.fleets.following(),
    ),
    "its workers are asked for": lambda d: d.fleets.processes("s"),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_while_others_hold_every_lock(daemon: Daemon, look: Callable[[Daemon], object]) -> None:
    before = look(daemon)
    assert before
    with ExitStack() as held, ThreadPoolExecutor(1) as threads:
        for lock in (daemon.fleets.lock, daemon.intake.lock, daemon.store.catalogue.changed):
            held.enter_context(lock)
        looking = threads.submit(look, daemon)
        looking.exception(PATIENCE)
        held.close()
        assert looking.result() == before


def test_what_proofs_need_is_compiled_when_a_job_registers_and_not_in_its_first_version(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compilations(monkeypatch)
    specs = [TensorSpec("a", "BF16", (4, 4)), TensorSpec("b", "U8", (8,))]
    boxes = pack((number, full_box(spec.shape), False) for number, spec in enumerate(specs))
    publisher = daemon.intake.create_publisher("other", "job", 1, FILES)
    assert daemon.intake.register_slot(publisher.name, 0, "fingerprint", specs, boxes).state == ACTIVE
    assert compiled[1] == compiled[2] == 1  # all that their digests use


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "store", keep_count=2, limit_bytes=100_000_000, shared=False)
    yield made
    made.close()


def in_between(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """`act` is done once, when the small files of a future version are written."""
    real, todo = set_pool.write_file, [act]

    def write_file(path: Path, content: bytes) -> None:
        while path.name in FILES and todo:
            todo.pop()()
        real(path, content)

    monkeypatch.setattr(set_pool, "write_file", write_file)


def test_versions_are_held_and_let_go_while_another_ones_files_are_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = claim(store)
    publish(store, epoch, 0)
    done = threading.Event()

    def use() -> None:
        store.lifecycle.pin("policy", 1, "servers/s")
        store.lifecycle.release("policy", 1, "servers/s")
        done.set()

    def elsewhere() -> None:
        threading.Thread(target=use, daemon=True).start()
        assert done.wait(PATIENCE)

    in_between(monkeypatch, elsewhere)
    assert publish(store, epoch, 1).number == 2
    settle(store)
    assert done.is_set()


def test_a_version_whose_job_is_fenced_while_its_files_are_written_never_begins(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = list[int]()
    in_between(monkeypatch, lambda: later.append(claim(store, "later")))
    epoch = claim(store)
    with pytest.raises(
        FailedPrecondition, match=f"epoch {epoch} has no reserved capacity: job 'later' has taken over model 'policy'"
    ):
        store.lifecycle.begin("policy", epoch, 0, "job")
    assert store.catalogue.versions("policy") == []
    settle(store)
    assert publish(store, later[0], 0).epoch == epoch + 1
    settle(store)
    (record,) = store.catalogue.versions("policy")
    assert (record.number, record.state, numbers(store)) == (1, READY, [1])
    assert {folder.name for folder in (store.folder.path(record).parent).iterdir()} == {"00000001"}
    sets = len(list((store.folder.root / "models/policy/pool").iterdir()))
    assert store.catalogue.used_bytes() == (1 + sets) * sum(layout.size for layout in LAYOUTS), "what it had taken came back"


def test_a_medium_that_fails_while_small_files_are_written_costs_no_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("the medium is full")

    in_between(monkeypatch, fail)
    epoch = claim(store)
    with pytest.raises(Unavailable, match="the medium is full"):
        store.lifecycle.begin("policy", epoch, 0, "job")
    settle(store)
    assert store.catalogue.used_bytes() == 0
    published: VersionRecord = publish(store, epoch, 0)
    assert (published.number, published.state) == (1, READY)
