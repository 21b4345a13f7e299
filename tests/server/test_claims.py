"""When a job's claim on a model takes effect: once its layout tiles and its room is reserved, and not before."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.converters.failpoints import arm
from resharder.converters.geometry.layout import Layout, Range, TensorSpec, full_box
from resharder.converters.geometry.piece_arrays import pack as pack_pieces
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.converters.wire.direct import layout_to_proto
from resharder.server.direct.direct import Direct
from resharder.server.direct.state import Member
from resharder.server.ingest import intake
from resharder.server.ingest.boxes import pack
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.rpc.direct_service import DirectService
from resharder.server.state.errors import DaemonError
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.store import Store
from resharder.v1 import direct_pb2

from tests.support.store_versions import FILES, SIZE, SPECS, claim, numbers, publish
from tests.support.waits import completed

HALVES = [[("a", (Range(0, 32), Range(0, 64))), ("b", full_box((16,)))], [("a", (Range(32, 32), Range(0, 64)))]]
WHOLE = [[(spec.name, full_box(spec.shape)) for spec in SPECS]]
TORN = [HALVES[0]]  # nobody holds the other half


class Site:
    """A store with its ingest, and a clock."""

    def __init__(self, root: Path, **options: int) -> None:
        self.root, self.options, self.now = root, options, 0.0
        self.start()

    def start(self) -> None:
        self.store = Store(self.root, shared=False, **self.options)
        self.intake = Intake(self.store, lease_seconds=10, clock=lambda: self.now)

    def restart(self) -> None:
        self.store.close()
        self.start()

    def create(self, job: str, ranks: int = 1, model: str = "policy", together: tuple[str, ...] = ()) -> PublisherRecord:
        return self.intake.create_publisher(model, job, ranks, FILES, together)

    def register(self, publisher: PublisherRecord, rank: int = 0, held=WHOLE, specs=SPECS) -> PublisherRecord:  # type: ignore[no-untyped-def]
        names = [spec.name for spec in specs]
        boxes = pack((names.index(name), box, False) for name, box in held[rank])
        return self.intake.register_slot(publisher.name, rank, f"{rank}", specs, boxes)

    def connect(self, job: str, **options) -> PublisherRecord:  # type: ignore[no-untyped-def]
        return self.register(self.create(job, **options))

    def begin(self, publisher: PublisherRecord, step: int) -> VersionRecord:
        record: VersionRecord = completed(self.intake.create_version, publisher.name, 0, step)
        return record

    def deliver(self, record: VersionRecord) -> None:
        """Write a version's bytes and seal it, and wait for its end."""
        digests = []
        with MappedFiles(self.store.folder.path(record), self.store.lifecycle.layouts(record), writable=True) as files:
            for name, box in WHOLE[0]:
                files.arrays[name][...] = record.step
                digests.append(digest(files.arrays[name], box, files.arrays[name].shape))
        self.intake.seal_slot(record.model, record.number, record.epoch, 0, digests, True)
        completed(self.intake.wait_version, record.model, record.number, 60.0, False)

    def state(self, record: VersionRecord) -> str:
        return self.store.catalogue.get(record.model, record.number).state

    def publishes(self, publisher: PublisherRecord, step: int) -> bool:
        record = self.begin(publisher, step)
        self.deliver(record)
        return self.state(record) == READY


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path / "store")
    yield site
    arm("")
    site.store.close()


def reason(call) -> tuple[str, str]:  # type: ignore[no-untyped-def]
    with pytest.raises(DaemonError) as caught:
        call()
    return caught.value.reason, str(caught.value)


def test_a_job_whose_layout_does_not_tile_leaves_the_running_job_its_model_and_its_open_version(site: Site) -> None:
    running = site.connect("running")
    record = site.begin(running, 1)
    with pytest.raises(DaemonError, match="held by no rank"):
        site.register(site.create("wrong"), held=TORN)
    site.intake.publisher(running.name, 0)
    site.deliver(record)
    assert site.state(record) == READY
    assert site.create("running") is running
    assert site.publishes(running, 2)
    assert [(each.job, each.state) for each in site.intake.publishers()] == [("running", "ACTIVE"), ("wrong", "REJECTED")]


def test_a_job_without_room_leaves_the_running_job_its_model_and_its_files(tmp_path: Path) -> None:
    site = Site(tmp_path / "store", limit_bytes=4 * SIZE)
    running = site.connect("running")
    assert site.publishes(running, 1)
    large = [TensorSpec("a", "F32", (64, 640)), SPECS[1]]
    held = [[(spec.name, full_box(spec.shape)) for spec in large]]
    assert reason(lambda: site.register(site.create("large"), held=held, specs=large))[0] == "NO_ROOM"
    assert site.publishes(running, 2)
    site.store.close()


def test_a_job_has_room_where_it_takes_the_place_of_one_with_open_versions_and_files_laid_out(tmp_path: Path) -> None:
    site = Site(tmp_path / "store", limit_bytes=4 * SIZE)  # three versions that are kept, and one that is written
    running = site.connect("running")
    for step in range(3):
        assert site.publishes(running, step)
    open_version = site.begin(running, 3)
    later = site.connect("later")
    assert site.state(open_version) == "ABORTED"
    assert all(site.publishes(later, step) for step in range(3))
    site.store.close()


def test_a_job_that_lacks_ranks_holds_nobody_up_and_is_forgotten(site: Site) -> None:
    running = site.connect("running")
    late = site.create("half", ranks=2)
    site.register(late, 0, HALVES)
    assert site.publishes(running, 1)
    site.now += 2 * intake._FORGOTTEN_SECONDS
    site.intake.publisher(running.name, 0)
    site.intake.expire()
    assert site.intake.publishers() == [running]
    assert reason(lambda: site.register(late, 1, HALVES))[0] == "PUBLISHER_UNKNOWN"
    assert site.publishes(running, 2)


def test_the_ranks_of_a_fenced_job_read_which_job_has_taken_over(site: Site) -> None:
    running = site.connect("running")
    record = site.begin(running, 1)
    site.connect("newer")
    aborted = site.store.catalogue.get("policy", record.number)
    assert (aborted.state, aborted.reason) == ("ABORTED", "job 'newer' has taken over the model")
    for call in (
        lambda: site.intake.publisher(running.name, 0),
        lambda: site.begin(running, 2),
        lambda: site.create("running"),
        lambda: site.intake.missing_chunks("policy", record.number, record.epoch, 0),
        running.check_usable,
    ):
        found, text = reason(call)
        assert found == "STALE_EPOCH"
        assert "job 'newer' has taken over model 'policy'; to take it back, start this job again with a new job id" in text


def test_of_two_jobs_that_register_at_the_same_time_the_newer_one_fences_the_older_one(site: Site) -> None:
    older, newer = site.create("older"), site.create("newer")
    site.register(newer)
    assert reason(lambda: site.register(older))[0] == "STALE_EPOCH"
    assert reason(lambda: site.create("older"))[0] == "STALE_EPOCH", "it must not come back as a newer one"
    assert site.publishes(newer, 1)


def test_of_two_jobs_that_register_at_the_same_time_the_older_one_publishes_until_the_newer_one_can(site: Site) -> None:
    older, newer = site.create("older"), site.create("newer")
    site.register(older)
    assert site.publishes(older, 1)
    site.register(newer)
    assert reason(lambda: site.begin(older, 2))[0] == "STALE_EPOCH"
    assert site.publishes(newer, 1)


def test_a_restarted_daemon_gives_jobs_their_epochs_again_and_no_other_job_the_number_of_a_pending_one(site: Site) -> None:
    running, pending = site.connect("running"), site.create("pending")
    site.restart()
    another = site.create("another")
    assert another.epoch > pending.epoch
    again = site.connect("running")
    assert again.epoch == running.epoch
    assert site.publishes(again, 1)
    assert site.create("pending").epoch == pending.epoch
    site.connect("pending")
    assert reason(lambda: site.begin(again, 2))[0] == "STALE_EPOCH"


def test_a_job_that_was_refused_may_come_again_after_a_restart_of_the_daemon(site: Site) -> None:
    running = site.connect("running")
    with pytest.raises(DaemonError):
        site.register(site.create("wrong"), held=TORN)
    site.restart()
    site.connect("running")
    site.connect("wrong")
    assert reason(lambda: site.intake.publisher(running.name, 0))[0] == "STALE_EPOCH"


def test_a_claim_whose_record_cannot_be_written_takes_no_effect_and_can_be_tried_again(site: Site) -> None:
    running = site.connect("running")
    new = site.create("new")
    arm("claim.effect=eio")
    assert reason(lambda: site.register(new))[0] == "STORE_FAILED"
    arm("")
    assert site.publishes(running, 1)
    site.register(new)
    assert reason(lambda: site.begin(running, 2))[0] == "STALE_EPOCH"
    assert site.publishes(new, 1)


def test_small_files_of_a_claim_that_took_no_effect_are_not_the_models(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", shared=False)
    publish(store, claim(store), 1)
    later = store.epochs.begin("policy", "later", 1).epoch
    folder = store.catalogue.model("policy").folder / "files"
    written = folder / f"{later}.7"  # as a daemon leaves it that is killed before the claim is written
    written.mkdir()
    (written / "config.json").write_bytes(b'{"of": "later"}')
    assert store.reader.model_files("policy") == FILES
    store.close()
    again = Store(tmp_path / "store", shared=False)
    assert again.reader.model_files("policy") == FILES
    assert [path.name for path in folder.iterdir()] == ["1.1"]
    claim(again)
    assert numbers(again) == [1]
    again.close()


def test_models_that_a_job_publishes_together_are_taken_over_together_or_not_at_all(site: Site) -> None:
    models = ("keep", "serve")
    running = [site.create("running", model=model, together=models) for model in models]
    for publisher in running:
        site.register(publisher)
    assert [publisher.state for publisher in running] == ["ACTIVE", "ACTIVE"]
    keep, serve = (site.create("wrong", model=model, together=models) for model in models)
    site.register(keep)
    assert (keep.state, running[0].state) == ("REGISTERING", "ACTIVE")
    assert "['serve']" in reason(lambda: completed(site.intake.assignment, keep.name, 0, 0.0))[1]
    with pytest.raises(DaemonError, match="held by no rank"):
        site.register(serve, held=TORN)
    assert reason(lambda: completed(site.intake.assignment, keep.name, 0, 0.0))[0] == "LAYOUT_MISMATCH"
    assert [publisher.state for publisher in running] == ["ACTIVE", "ACTIVE"]
    newer = [site.create("newer", model=model, together=models) for model in models]
    for publisher in newer:
        site.register(publisher)
    assert [publisher.state for publisher in (*newer, *running)] == ["ACTIVE", "ACTIVE", "FENCED", "FENCED"]


def test_room_for_one_of_two_models_that_are_published_together_takes_over_neither(tmp_path: Path) -> None:
    site, models = Site(tmp_path / "store", limit_bytes=7 * SIZE), ("keep", "serve")
    running = site.connect("running", model="keep")
    newer = [site.create("newer", model=model, together=models) for model in models]
    site.register(newer[0])
    assert reason(lambda: site.register(newer[1]))[0] == "NO_ROOM"
    assert running.state == "ACTIVE"
    assert site.store.catalogue.model("serve").reservation is None
    site.store.close()


def test_a_job_that_registers_leaves_the_running_one_its_place_on_the_direct_path(site: Site) -> None:
    direct = Direct(lambda *_: frozenset(), lambda server: {})
    service = DirectService(direct, site.intake)

    def declare(publisher: PublisherRecord) -> Member:
        member = Member(publisher.name, 0, publisher.job)
        layout = layout_to_proto(pack_pieces({0: Layout({}, ())}))
        sent = direct_pb2.Member(owner=member.owner, rank=0, process=member.process)
        service.DeclareMemory(direct_pb2.DeclareMemoryRequest(member=sent, fingerprint="m", layout=layout), None)  # type: ignore[arg-type]
        return member

    running = declare(site.connect("running"))
    coming = declare(site.create("coming"))
    assert direct.offer(running, "m", "policy", 1, 1, 1.0).complete
    site.connect("coming")
    newest = declare(site.connect("newest"))
    for fenced in (running, coming):
        assert reason(lambda member=fenced: direct.offer(member, "m", "policy", 2, 1, 1.0))[0] == "MEMORY_UNKNOWN"
    assert direct.offer(newest, "m", "policy", 2, 1, 1.0).complete


def test_ranks_that_wait_while_the_daemon_checks_the_layout_are_told_so(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = site.create("job", ranks=2)
    site.register(publisher, 0, HALVES)
    checking, go_on = threading.Event(), threading.Event()

    def slow(*given, **options):  # type: ignore[no-untyped-def]
        checking.set()
        assert go_on.wait(60)
        return lay_out(*given, **options)

    monkeypatch.setattr("resharder.server.ingest.publisher.lay_out", slow)
    last = threading.Thread(target=site.register, args=(publisher, 1, HALVES))
    last.start()
    assert checking.wait(60)
    found, text = reason(lambda: completed(site.intake.assignment, publisher.name, 0, 0.0))
    go_on.set()
    last.join()
    assert found == "NOT_REGISTERED"
    assert text == (
        f"{publisher.name}: all ranks have registered; the daemon still checks their tensors and reserves room: wait for it"
    )
