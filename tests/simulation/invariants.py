"""A reference of what ranks delivered and clients were told, and the invariants of the store against it."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.storage.files import BITS, INDEX_FILE
from resharder.converters.wire.ranges import HELD_FILE
from resharder.server.state.version import ABORTED, READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.store.manifest import MANIFEST_FILE
from resharder.server.store.partial import PIECES_FILE

from tests.simulation.daemon import STORE, Answer, SimulatedDaemon
from tests.simulation.medium import Medium
from tests.simulation.models import FILES, Model, Weights, layouts, part, weights
from tests.simulation.node_pieces import NodePieces
from tests.simulation.publishers import NAME, Job

MODEL_FOLDER = f"{STORE}/models/{NAME}"


class Reference:
    """Invariants of one model. `told` and `delivers` are called as ranks receive answers and send seals."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self.jobs: dict[str, Job] = {}
        self.identities: dict[int, tuple[int, int, float]] = {}
        self.epochs: dict[int, str] = {}
        self.states: dict[int, str] = {}  # newest state that a client was told
        self.ready: dict[int, VersionRecord] = {}  # versions that were READY
        self.steps: dict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
        self.delivered: dict[int, dict[int, dict[str, tuple[int, ...]]]] = defaultdict(lambda: defaultdict(dict))
        self.retired_on_command: set[int] = set()
        self._told_at: dict[int, int] = {}
        self.nodes: NodePieces | None = None
        self._claims: dict[str, int] = {}  # length of `_taken` at each job's first claim
        self._taken: list[str] = []  # jobs whose registrations the daemon has handled
        self._taking: list[str] = []  # jobs whose registrations the daemon handles now
        self._checked: set[int] = set()

    # Requests of clients and their answers

    def claimed(self, job: str, epoch: int) -> None:
        """Check that an epoch belongs to one job."""
        known = self.epochs.setdefault(epoch, job)
        assert known == job, f"epoch {epoch} was given to {self.epochs[epoch]} and to {job}"

    def claims(self, job: str) -> None:
        """Record that the daemon handles a claim of a job."""
        self._claims.setdefault(job, len(self._taken))

    @contextmanager
    def takes_over(self, job: str) -> Iterator[None]:
        """Record that the daemon handles a registration of a job, whose claim may take effect at any time meanwhile."""
        self._taken.append(job)
        self._taking.append(job)
        try:
            yield
        finally:
            self._taking.remove(job)
            self._taken.append(job)

    def is_fenced(self, job: str) -> None:
        """Check that a job that is refused as stale was followed by another, whose layout is not refused."""
        assert {*self._taken[self._claims[job] :], *self._taking} - {job}, (
            f"{job} is refused as stale, and no other job has taken over the model since"
        )

    def begins(self, record: VersionRecord, after: int, versions: Sequence[VersionRecord]) -> None:
        """Check that a rank is answered with an aborted version of the step before it begins the next one."""
        same = [v for v in versions if (v.epoch, v.step) == (record.epoch, record.step) and after < v.number < record.number]
        aborted = [v.number for v in same if v.state == ABORTED]
        assert record.state != UPLOADING or not aborted, (
            f"a rank that has begun version {after} of step {record.step} gets {record.number}, and not the aborted {aborted}"
        )

    def delivers(self, record: VersionRecord, rank: int, variant: str, positions: Sequence[int]) -> None:
        """Record that a process of a rank seals its slot of a version, with the boxes at these positions."""
        self.delivered[record.number][rank][variant] = tuple(positions)

    def answered(self, answer: Answer) -> None:
        """Check an answer with a version against earlier ones."""
        record: VersionRecord = answer.result
        number, before = record.number, self.states.get(record.number)
        identity = (record.epoch, record.step, record.create_time)
        known = self.identities.setdefault(number, identity)
        assert known == identity, f"version {number} was {self.identities[number]} (epoch, step, time), now it is {identity}"
        if before is not None and record.state == UPLOADING and answer.made <= self._told_at[number]:
            return  # an answer that was longer under way
        if before in (READY, RETIRED):
            assert record.state in (READY, RETIRED), f"version {number} was told to be {before}, now it is {record.state}"
        if before == ABORTED:
            assert record.state == ABORTED, f"version {number} was told to be ABORTED, now it is {record.state}"
        self.states[number], self._told_at[number] = record.state, self._medium.schedule.steps
        if record.state == READY:
            self._check_ready(record)

    def _check_ready(self, record: VersionRecord) -> None:
        known = self.ready.setdefault(record.number, record)
        assert known.fingerprint == record.fingerprint, f"version {record.number} has another fingerprint than before"
        folder = self._folder(record.number)
        if self.nodes is not None and self._medium.files.exists(folder) and self.nodes.is_partial(folder):
            return
        if record.number not in self._checked and self._medium.files.exists(folder):
            self._checked.add(record.number)
            self.check_content(record)

    # Content

    def _folder(self, number: int) -> str:
        return f"{MODEL_FOLDER}/versions/{number:08}"

    def check_content(self, record: VersionRecord) -> None:
        """Compare a READY version with what its ranks delivered, bit for bit."""
        folder, files = self._folder(record.number), self._medium.files
        job = self.jobs[record.job]
        model = job.model
        names = {layout.path for layout in layouts(model)} | set(FILES) | {MANIFEST_FILE}
        names |= {INDEX_FILE} if len(layouts(model)) > 1 else set()
        found = set(files.names(folder))
        found -= {HELD_FILE, PIECES_FILE} if self.nodes is not None else set()  # not removed yet
        assert found == names, f"version {record.number} has the files {sorted(found)}, expected {sorted(names)}"
        for name, small in FILES.items():
            assert files.find(f"{folder}/{name}").data == small, f"version {record.number} has another {name}"
        content = self._tensors(model, folder)
        for rank in range(model.world_size):
            self._check_rank(job, record, content, rank)
        steps = self.steps[record.epoch, record.step]
        steps[record.number] = b"".join(content[spec.name].tobytes() for spec in model.specs)

    def _tensors(self, model: Model, folder: str) -> Weights:
        content: dict[str, npt.NDArray[np.generic]] = {}
        for layout in layouts(model):
            data = self._medium.files.find(f"{folder}/{layout.path}").data
            assert data[: len(layout.header)] == layout.header, f"{folder}: the header of {layout.path} is not what was laid out"
            for spec, offset in layout.tensors:
                bits = np.frombuffer(bytes(data[offset : offset + spec.size]), BITS[ITEM_SIZES[spec.dtype]])
                content[spec.name] = bits.reshape(spec.shape)
        return content

    def _check_rank(self, job: Job, record: VersionRecord, content: Weights, rank: int) -> None:
        delivered = self.delivered[record.number].get(rank, {})
        held = job.model.held[rank]
        owned = [position for position, (_, _, replica) in enumerate(held) if not replica]
        for variant, positions in delivered.items():
            values = weights(job.model, job.name, record.step, variant)
            due = positions if job.varies else {*positions, *owned}
            if all((part(content, job.model, rank, at) == part(values, job.model, rank, at)).all() for at in due):
                return
        assert not owned, (
            f"version {record.number} (step {record.step}): the boxes of rank {rank} are not what it delivered; "
            f"processes that have delivered: {sorted(delivered)}"
        )

    def check_steps(self, records: list[VersionRecord]) -> None:
        """Check that no two READY versions of a step differ."""
        by_step: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        for record in records:
            content = self.steps[record.epoch, record.step].get(record.number)
            if content is not None:
                by_step[record.epoch, record.step].add(content)
        assert all(len(found) == 1 for found in by_step.values()), "two READY versions of a step have differing content"

    # The daemon

    def check_catalogue(self, daemon: SimulatedDaemon, *, restarted: bool) -> None:
        """Compare the versions of a daemon with those that clients were told of."""
        model = daemon.store.catalogue.find(NAME)
        records = dict(model.records) if model else {}
        ready = [record for record in records.values() if record.state == READY]
        for record in ready:
            assert self.states.get(record.number) != ABORTED, f"version {record.number} was told to be ABORTED, it is READY"
            if restarted:
                self._checked.discard(record.number)
            self._check_ready(record)
        self.check_steps(ready)
        present = {record.number for record in ready}
        were_ready = {*self.ready, *(record.number for record in records.values() if record.ready_time)}
        for number in [n for n, state in self.states.items() if state == READY and n not in present]:
            newer = sum(1 for other in were_ready if other > number)  # one may be lost before a client is told of it
            is_lost = self.nodes is not None and number in self.nodes.gone
            kept = max(1, daemon.keep - (self.nodes is not None))  # the newest whole version may take a place
            assert newer >= kept or number in self.retired_on_command or is_lost, (
                f"version {number} was told to be READY and is lost: {records.get(number)}"
            )
        for number, identity in self.identities.items():
            found = records.get(number)
            same = found is None or (found.epoch, found.step, found.create_time) == identity
            assert same, f"version {number} was reused: {found}"
        newest = daemon.store.catalogue.newest_number(NAME)
        assert newest >= max(self.identities, default=0), f"the daemon may assign {newest + 1} again"

    def check_folder(self, daemon: SimulatedDaemon) -> None:
        """Check that every file of the store is explained by the state of the daemon, which is at rest."""
        files, model = self._medium.files, daemon.store.catalogue.model(NAME)
        reservation = model.reservation
        assert reservation is not None, "an ACTIVE publisher has no reservation"
        ready = {f"{record.number:08}" for record in model.of(READY)}
        pool = {path.name for path in reservation.free}
        root = set(files.names(STORE))
        assert root == {"lock", "nonce", "history.jsonl", "models"}, f"the store has {sorted(root)}"
        assert set(files.names(f"{STORE}/models")) == {NAME}
        folders = set(files.names(MODEL_FOLDER)) - {"staging", "retired", "pool"}
        assert folders == {"claim.json", "files", "versions"}, f"the model has {sorted(folders)}"
        for kind, expected in (("versions", ready), ("pool", pool), ("staging", set()), ("retired", set())):
            found = set(files.names(f"{MODEL_FOLDER}/{kind}"))
            assert found == expected, f"{kind}/ has {sorted(found)}, expected {sorted(expected)}"
        small = files.names(f"{MODEL_FOLDER}/files")  # other folders that could not be removed stay until the next registration
        assert len(small) == 1 or self._medium.counts, f"files/ has {small}"
        left = f"{MODEL_FOLDER}/files/new.part"
        parts = [path for path, _ in files.walk(STORE) if path.endswith(".part") and not path.startswith(left)]
        assert not parts, f"unfinished files are left: {parts}"
        sizes = {inode.number: len(inode.data) for path, inode in files.walk(STORE) if path.endswith(".safetensors")}
        tensors = sum(sizes.values())
        assert model.used() == tensors, f"the model takes {tensors} bytes, and counts {model.used()}"
        assert not model.stuck, "folders could not be removed"
        assert not daemon.intake.uploads(), "a version is UPLOADING"
        claim = json.loads(bytes(files.find(f"{MODEL_FOLDER}/claim.json").data))
        assert (claim["version"], claim["epoch"]) == (model.number, model.epoch), f"claim.json is {claim}"
        for record in model.of(READY):
            self.check_content(record)
