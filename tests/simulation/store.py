"""Publishers, slots and the store under faults: ranks publish, processes end, messages and writes are lost, time jumps.

A schedule has a phase with faults and one in peace, after which a new publish must become READY and nothing may be left behind.

Not simulated: gRPC (dispatch, admission, deadlines), the archive, direct transfers and fleets; several models at a time; data of
a map that another process reads while it is written; the hardware's own errors, such as a flipped bit.
"""

from collections import Counter
from collections.abc import Callable, Generator
from random import Random

from resharder.server.state.version import READY, UPLOADING

from tests.simulation.daemon import LEASE, STORE, Network, SimulatedDaemon
from tests.simulation.filesystem import SimulatedFiles
from tests.simulation.invariants import Reference
from tests.simulation.medium import Crash, FaultPlan, Medium
from tests.simulation.models import FILES, MODELS, layouts
from tests.simulation.node_pieces import PIECE_BYTES, NodePieces
from tests.simulation.publishers import NAME, Job, Rank
from tests.simulation.schedule import Process, Schedule, Wait
from tests.simulation.seams import Log, installed

_FAULTY_STEPS, _PEACEFUL_STEPS = 800, 6000
_FEW_FAULTY_STEPS = 250
_DONE = 8  # steps between two looks at whether a phase is over
_CAPACITY = 1 << 30
_SMALL = 0.7  # share of schedules with fewer steps, which find most faults sooner


def simulate(random: Random, trace: Callable[[str], None], *, partial: bool = False) -> Counter[str]:
    """Run one schedule of one model's store. `partial`: whether versions are READY while a node alone holds some pieces."""
    world = _Site(random, trace, partial=partial)
    piece_bytes = PIECE_BYTES if partial else 16 << 20
    with installed(world.medium, lambda: world.daemon.process, world.log, world.model.file_bytes, piece_bytes):
        try:
            world.run()
        finally:
            world.schedule.close()
    return world.counts


class _Site:
    """A host with one store, its daemon, and the jobs that publish to it."""

    def __init__(self, random: Random, trace: Callable[[str], None], *, partial: bool) -> None:
        self.random, self.counts = random, Counter[str]()
        self.schedule = Schedule(random, trace, random.choice((0.0, 0.05, 0.3)))
        self.log = Log(self.schedule)
        self.files = SimulatedFiles(random, _CAPACITY)
        plan = FaultPlan(random)
        self.medium = Medium(self.files, self.schedule, plan)
        self.reference = Reference(self.medium)
        self.is_small = random.random() < _SMALL
        self.model = MODELS[0] if self.is_small and random.random() < 0.5 else random.choice(MODELS)
        self.network = _network(random)
        shared = random.random() < 0.7
        most = 100 if self.is_small else random.choice((100, 300, 700))
        crashes = [_crash(random, most) for _ in range(random.choice((0, 1, 1) if self.is_small else (0, 0, 1, 1, 2, 4)))]
        self.daemon = SimulatedDaemon(
            self.schedule,
            self.medium,
            self.network,
            crashes,
            shared=shared,
            chunk=self.model.chunk_bytes,
            keep=random.choice((1, 2)),
        )
        if partial:
            self.daemon.nodes = self.reference.nodes = NodePieces(random, self.medium)
        self.files.mkdir(STORE)
        self.files.fsync(self.files.root)
        self.supervisor = Process("supervisor")
        self.peaceful = False
        self.checked_life = 0
        self.serials = 0
        self.ranks: list[Rank] = []
        self.torn: list[Job] = []
        self.job = self._new_job(mapped=shared and random.random() < 0.6)
        self.schedule.trace(plan.describe())

    def _new_job(self, *, mapped: bool) -> Job:
        random = self.random
        job = Job(
            f"job-{len(self.reference.jobs) + 1}",
            self.model,
            random.randint(0, 1 if self.is_small else 3),
            mapped,
            random.random() < 0.2,
            random.random() < 0.5,
        )
        job.stalls = random.choice((0.0, 0.0, 0.2))
        self.reference.jobs[job.name] = job
        return job

    # Events

    def run(self) -> None:
        """Run both phases and check the invariants."""
        schedule = self.schedule
        schedule.follow("supervisor", self.supervisor, self._supervise())
        mischief = schedule.follow("mischief", self.supervisor, self._mischief())
        for rank in range(self.model.world_size):
            self._start_rank(self.job, rank, 0)
        self._steps(lambda: self._is_done(self.job), _FEW_FAULTY_STEPS if self.is_small else _FAULTY_STEPS)
        self._make_peace()
        self._publish_in_peace()
        assert self._steps(lambda: mischief.done, _PEACEFUL_STEPS), "a call of before the peace does not end"
        self._stop_and_restart()
        self.counts += self.daemon.counts + self.medium.counts
        self.counts += self.daemon.nodes.counts if self.daemon.nodes is not None else Counter()
        self.counts["versions READY"] += len(self.reference.ready)
        self.counts["steps"] += schedule.steps
        self.counts["file operations"] += self.medium.operations

    def _steps(self, done: Callable[[], bool], most: int) -> bool:
        for number in range(most):
            if number % _DONE == 0 and done():
                return True
            self.schedule.step()
            self._look()
        return done()

    def _look(self) -> None:
        """Act on what the last step has done, and check what it has shown."""
        daemon, medium = self.daemon, self.medium
        if (
            daemon.process.dead
            and daemon.lives
            and (medium.crashed or any(t.process is daemon.process for t in self.schedule.tasks))
        ):
            self._bury(medium.crashed)
            medium.crashed = None
        if daemon.is_up and self.checked_life != daemon.lives:
            self.checked_life = daemon.lives
            self.reference.check_catalogue(daemon, restarted=daemon.lives > 1)
        if self.schedule.unexpected:
            task, error = self.schedule.unexpected[0]
            raise AssertionError(f"{task.name} ended with {error!r}") from error
        assert not daemon.violations, daemon.violations[0]
        assert not self.log.errors, self.log.errors[0]
        if self.schedule.steps % 64 == 0:
            daemon.check_calls()
            daemon.check_leases()

    def _bury(self, crash: Crash | None) -> None:
        self.daemon.end()
        if crash is not None and crash.power:
            for rank in list(self.ranks):
                self._end_rank(rank)
            self.schedule.trace(self.files.cut_power())

    def _supervise(self) -> Generator[Wait, None, None]:
        while True:
            yield (lambda: self.daemon.process.dead), None
            yield None, self.schedule.now + (0.5 if self.peaceful else self.random.random() * 2 * LEASE)
            self.daemon.end()
            self.daemon.start()

    def _start_rank(self, job: Job, rank: int, first: int) -> None:
        self.serials += 1
        started = Rank(self.daemon, self.medium, self.reference, job, rank, self.serials, first)
        self.ranks.append(started)
        started.start()

    def _end_rank(self, rank: Rank) -> None:
        self.ranks.remove(rank)
        rank.end()
        self.schedule.follow("scheduler", self.supervisor, self._replace(rank))

    def _replace(self, rank: Rank) -> Generator[Wait, None, None]:
        yield None, self.schedule.now + self.random.random() * (1 if self.peaceful else LEASE)
        if not rank.job.fenced:
            back = self.random.random() < 0.3 and rank.step > 0  # a checkpoint of an earlier step
            self._start_rank(rank.job, rank.rank, rank.step - back)

    def _is_done(self, job: Job) -> bool:
        ours = [rank for rank in self.ranks if rank.job is job]
        return len(ours) == job.model.world_size and all(rank.step > job.target for rank in ours)

    def _mischief(self) -> Generator[Wait, None, None]:
        """Kill, stop and replace ranks and jobs, let the wall clock jump, retire and read versions."""
        random, schedule = self.random, self.schedule
        often = random.choice((2.0, 5.0, 20.0))
        while not self.peaceful:
            yield None, schedule.now + random.random() * often
            chance = random.random()
            if self.peaceful:
                return
            if chance < 0.2 and self.ranks:
                self.counts["ranks killed"] += 1
                self._end_rank(random.choice(self.ranks))
            elif chance < 0.4 and self.ranks:
                self.counts["ranks stopped"] += 1
                random.choice(self.ranks).process.stopped_until = schedule.now + random.random() * 3 * LEASE
            elif chance < 0.55:
                self.counts["clock jumps"] += 1
                schedule.wall_offset += random.choice((-1, 1)) * 10 ** random.uniform(0, 8)
            elif chance < 0.6 and len(self.reference.jobs) < 3:
                self._replace_job()
            elif chance < 0.64:
                self._start_torn_job()
            elif chance < 0.7:
                yield from self._retire()
            else:
                yield from self._read()

    def _replace_job(self) -> None:
        self.counts["jobs replaced"] += 1
        if self.random.random() < 0.5:
            for ended in [each for each in self.ranks if each.job is self.job]:
                self.ranks.remove(ended)
                ended.end()
        self.job = self._new_job(mapped=self.job.mapped)
        for rank in range(self.model.world_size):
            self._start_rank(self.job, rank, 0)

    def _start_torn_job(self) -> None:
        """Start a job whose layout the daemon refuses, beside the one that publishes."""
        self.counts["jobs refused"] += 1
        self.serials += 1
        job = Job(f"torn-{self.serials}", self.model, 0, False, False, False, torn=True)
        self.torn.append(job)
        for rank in range(self.model.world_size):
            self._start_rank(job, rank, 0)

    def _retire(self) -> Generator[Wait, None, None]:
        known = sorted(self.reference.ready)
        if known:
            number = self.random.choice(known)
            self.reference.retired_on_command.add(number)
            yield from self.daemon.call("RetireVersions", lambda d: d.store.lifecycle.retire(NAME, [number]), 5.0)

    def _read(self) -> Generator[Wait, None, None]:
        """Read a version that was READY, or the model's small files, and compare them."""
        if self.random.random() < 0.3:
            answer = yield from self.daemon.call("Read", lambda d: d.store.reader.model_files(NAME), 5.0)
            assert not answer.ok or answer.result == FILES, f"the small files of the model are {answer.result}"
        known = sorted(self.reference.ready)
        if not known:
            return
        number, slow = self.random.choice(known), self.random.random() < 0.5

        def read(daemon: SimulatedDaemon) -> dict[str, bytes]:
            reader = daemon.store.reader
            if not slow:
                with reader.open(NAME, number) as files:
                    return {name: array.tobytes() for name, array in files.arrays.items()}
            found, spans_of = dict[str, bytes](), reader.manifest(NAME, number).spans_of
            with reader.open(NAME, number, ()) as files:  # as DownloadChunks does where the store holds no versions
                for name, array in files.arrays.items():
                    self.schedule.pause(None, self.schedule.now + self.random.random() * 0.2)  # for a client that is slow
                    with reader.reading(NAME, number, spans_of([name])):
                        found[name] = array.tobytes()
            return found

        answer = yield from self.daemon.call("Read", read, 5.0)
        if answer.ok:
            self.counts["versions read"] += 1
            record = self.reference.ready[number]
            content = self.reference.steps[record.epoch, record.step].get(number)
            found = b"".join(answer.result[spec.name] for spec in self.model.specs)
            assert content is None or found == content, f"a reader of version {number} found other bytes"
            if self.daemon.nodes is not None and (held := self.daemon.nodes.tensors(number, layouts(self.model))):
                assert answer.result == held, f"a reader of version {number} found bytes of missing pieces"

    # Peace

    def _make_peace(self) -> None:
        """End all faults, and let every process live."""
        self.schedule.trace("PEACE")
        self.peaceful = True
        if self.daemon.nodes is not None:
            self.daemon.nodes.peaceful = True
        self.medium.plan = self.medium.crash = None
        self.daemon.crashes.clear()
        self.schedule.kill(self.daemon.messages)
        self.network.lost = self.network.doubled = self.network.late = 0.0
        for rank in self.ranks:
            rank.process.stopped_until = min(rank.process.stopped_until, self.schedule.now + 1.0)

    def _publish_in_peace(self) -> None:
        """Publish two steps more, in a small schedule one; the first may find what faults have left."""
        self.counts["schedules reaching peace"] += 1
        for job in (*self.reference.jobs.values(), *self.torn):
            job.fenced = job.fenced or job is not self.job  # so that none of its ranks is started again
        for rank in [each for each in self.ranks if each.job is not self.job]:
            self.ranks.remove(rank)
            rank.end()
        for _ in range(1 if self.is_small else 2):
            self._publish_once_more()
        if self.daemon.store.catalogue.model(NAME).of(UPLOADING):
            # It waits for a rank that went on before the others returned to this step, and that aborts it with its next step.
            self._publish_once_more()
        assert self._steps(self._is_at_rest, _PEACEFUL_STEPS), "work is left in peace"
        self.reference.check_catalogue(self.daemon, restarted=False)
        self.reference.check_folder(self.daemon)

    def _publish_once_more(self) -> None:
        job = self.job
        job.insists, job.stalls = True, 0.0
        job.target = max([job.target, *(rank.step for rank in self.ranks if rank.job is job)]) + 1
        done = self._steps(lambda: job.fenced or self._is_done(job), _PEACEFUL_STEPS)
        if job.fenced:  # by a job that is gone
            self._replace_job()
            self._publish_once_more()
            return
        assert done, f"step {job.target} was not published in {_PEACEFUL_STEPS} steps in peace"
        found = [r for r in self.reference.ready.values() if (r.job, r.step) == (job.name, job.target)]
        assert found, f"ranks have published step {job.target}, which is not READY"

    def _is_at_rest(self) -> bool:
        daemon = self.daemon
        if not daemon.is_up or daemon.intake.uploads():  # a rank that was restarted alone may have begun a step again
            return False
        if daemon.store.lifecycle.partials():
            return False
        return not any(t.process is daemon.process and t.name not in ("leases", "fetch") for t in self.schedule.tasks)

    def _stop_and_restart(self) -> None:
        """Stop the daemon and start it again: it has the same versions, and whole ones."""
        before = self._ready()
        for rank in list(self.ranks):
            rank.end()
        self.ranks.clear()
        life, task = self.daemon.lives, self.daemon.stop()
        if self.random.random() < 0.5:
            assert self._steps(lambda: task.done, _PEACEFUL_STEPS), "the daemon does not stop"
        else:
            self.daemon.process.dead = True
        power = self.random.random() < 0.5
        if power:
            self.medium.counts["power cuts"] += 1
            self._bury(Crash(0, True))
        assert self._steps(lambda: self.daemon.lives > life and self.daemon.is_up, _PEACEFUL_STEPS), "the daemon does not start"
        after = self._ready()  # a power cut may bring back retired versions
        assert after == before or (power and after.items() > before.items()), f"READY were {before}, after a restart {after}"

    def _ready(self) -> dict[int, str]:
        return {record.number: record.fingerprint for record in self.daemon.store.catalogue.model(NAME).of(READY)}


def _network(random: Random) -> Network:
    if random.random() < 0.4:
        return Network()
    return Network(random.choice((0.0, 0.02, 0.2)), random.choice((0.0, 0.05, 0.3)), random.choice((0.05, 0.5)), 0.02)


def _crash(random: Random, most: int) -> Crash:
    at, power = random.randrange(1, most), random.random() < 0.5
    return Crash(at, power, random.choice(("", "", "sync folder", "fsync")))
