"""The daemon's store and ingest in a simulated process: calls, the ticks of leases, ends and restarts."""

import traceback
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from resharder.converters.errors import ConversionError
from resharder.server.infra.change_signal import Pause
from resharder.server.infra.medium import MEDIUM, is_refusal, medium_error
from resharder.server.ingest.intake import Intake
from resharder.server.state.errors import DaemonError
from resharder.server.store.store import Store

from tests.simulation.filesystem import ROOT
from tests.simulation.medium import Crash, Medium
from tests.simulation.node_pieces import NodePieces
from tests.simulation.schedule import NOW, Process, Schedule, Task, Wait

STORE = f"{ROOT}/store"
LEASE, PATIENCE = 6.0, 1.0
OK, UNREACHABLE = "OK", "UNREACHABLE"
_LIMIT_BYTES, _CALL_STEPS = 1 << 20, 4000
_VERSION = ("VERSION_UNKNOWN", "MODEL_UNKNOWN")
_CLOSED = ("VERSION_ABORTED", "VERSION_CLOSED", "VERSION_READY", "VERSION_RETIRED")
REASONS: dict[str, tuple[str, ...]] = {
    "CreatePublisher": ("STALE_EPOCH", *MEDIUM),
    "RegisterSlot": ("STALE_EPOCH", "PUBLISHER_UNKNOWN", "LAYOUT_MISMATCH", *MEDIUM),
    "GetAssignment": ("STALE_EPOCH", "PUBLISHER_UNKNOWN", "NOT_REGISTERED", "LAYOUT_MISMATCH", *MEDIUM),
    "RenewLease": ("STALE_EPOCH", "PUBLISHER_UNKNOWN"),
    "CreateVersion": (
        "STALE_EPOCH", "PUBLISHER_UNKNOWN", "NOT_REGISTERED", "VERSION_ABORTED", "TOO_MANY_UPLOADING", *MEDIUM,
    ),
    "UploadChunks": ("STALE_EPOCH", *_VERSION, *_CLOSED, *MEDIUM),
    "ListMissingChunks": ("STALE_EPOCH", *_VERSION, *_CLOSED),
    "ReleaseFiles": ("STALE_EPOCH", *_VERSION),
    "ThawFiles": ("STALE_EPOCH", "NO_ROOM", *_VERSION, *_CLOSED, *MEDIUM),
    "SealSlot": ("STALE_EPOCH", "MISSING_CHUNKS", "SLOT_DIFFERS", *_VERSION, *_CLOSED),
    "WaitVersion": _VERSION,
    "AbortVersion": ("STALE_EPOCH", *_VERSION),
    "RetireVersions": (*_VERSION, *MEDIUM),
    "Read": ("VERSION_GONE", "PIECES_ELSEWHERE", *_VERSION, *MEDIUM),
}  # fmt: skip
"""Reasons that each call may be refused with. Those of a medium need a fault."""
_AT_START = MEDIUM


@dataclass(frozen=True)
class Answer:
    """Answer of a call: `OK` with its result, a reason, or `UNREACHABLE`."""

    reason: str
    result: Any = None
    made: int = 0  # step of the schedule

    @property
    def ok(self) -> bool:
        return self.reason == OK


@dataclass
class Network:
    """Chances of what happens to a message."""

    lost: float = 0.0
    doubled: float = 0.0
    delay: float = 0.05
    late: float = 0.0  # chance of a delay of up to two leases


class SimulatedDaemon:
    """One daemon after the other on one store. `crashes` are due in turn, each in a process of its own."""

    def __init__(
        self, schedule: Schedule, medium: Medium, network: Network, crashes: list[Crash], *, shared: bool, chunk: int, keep: int
    ) -> None:
        self.schedule, self.medium, self.network, self.crashes = schedule, medium, network, crashes
        self.messages = Process("network")  # with the messages that are under way for a second time
        self.process = Process("daemon 0")
        self.process.dead = True
        self.lives, self.is_up = 0, False
        self.open: dict[int, Task] = {}  # calls that are not answered
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self._shared, self._chunk, self.keep = shared, chunk, keep
        self.store: Store
        self.nodes: NodePieces | None = None
        self.intake: Intake

    # Process

    def start(self) -> Task:
        """Start the next process."""
        self.lives += 1
        self.process = Process(f"daemon {self.lives}")
        self.medium.begin(self.process, self.crashes.pop(0) if self.crashes else None)
        self.schedule.trace(f"{self.process.name} starts")
        return self.schedule.start(f"{self.process.name} start", self.process, self._open)

    def _open(self) -> None:
        schedule = self.schedule
        try:
            store = Store(
                Path(STORE), limit_bytes=_LIMIT_BYTES, keep_count=self.keep, shared=self._shared, clock=schedule.wall_clock
            )
        except DaemonError as error:
            schedule.trace(f"not started: {error}")
            self._check_reason("start", error.reason, _AT_START, str(error))
            self.counts["starts refused"] += 1
            self.process.dead = True
            return
        if self.nodes is not None:
            self.nodes.attach(store)
        self.store = store
        self.intake = Intake(
            store, lease_seconds=LEASE, chunk_bytes=self._chunk, writer_patience=PATIENCE, threads=1, clock=schedule.monotonic
        )
        self.is_up = True
        schedule.follow("leases", self.process, self._tick())
        if (nodes := self.nodes) is not None:
            schedule.start("fetch", self.process, lambda: nodes.fetch(lambda: self.store if self.is_up else None))

    def end(self) -> None:
        """Clean up after a process that is dead."""
        self.is_up = False
        self.schedule.kill(self.process)
        self.medium.files.end_process(self.process.name)
        self.open.clear()

    def stop(self) -> Task:
        """Shut down as SIGTERM does; the process ends with the task."""

        def stop() -> None:
            self.is_up = False
            self.intake.drain(0.0)
            self.store.close()
            self.process.dead = True

        return self.schedule.start("stop", self.process, stop)

    def _tick(self) -> Generator[Wait, None, None]:
        while True:
            yield None, self.schedule.now + 1.0
            if self.is_up and self.intake.uploads():
                task = self.schedule.start("expire", self.process, self.intake.expire)
                yield task.is_done, None

    # Calls

    def call(self, name: str, function: Callable[["SimulatedDaemon"], Any], patience: float) -> Generator[Wait, None, Answer]:
        """Send a call over the network, and return its answer, or `UNREACHABLE` after `patience` seconds."""
        random, network, schedule = self.schedule.random, self.network, self.schedule
        end = schedule.now + patience
        chance = random.random()
        yield None, schedule.now + random.random() * (2 * LEASE if random.random() < network.late else network.delay)
        if chance >= network.lost and self.is_up:
            task = self._handle(name, function)
            if random.random() < network.doubled:
                schedule.follow("network", self.messages, self._repeat(name, function))
            yield task.is_done, max(end, schedule.now + 1.0)
            if task.done and task.error is None and random.random() >= network.lost:
                answer: Answer = task.result
                if schedule.is_traced:
                    schedule.trace(f"{name} answered {answer.reason}")
                return answer
        else:
            yield None, schedule.now + min(patience, 1.0) * random.random()
        if schedule.is_traced:
            schedule.trace(f"{name} not answered")
        return Answer(UNREACHABLE)

    def _repeat(self, name: str, function: Callable[["SimulatedDaemon"], Any]) -> Generator[Wait, None, None]:
        random = self.schedule.random
        yield None, self.schedule.now + random.random() * (3 * LEASE if random.random() < 0.5 else 0.1)
        if self.is_up:
            self.counts["calls doubled"] += 1
            self._handle(name, function)
        yield NOW

    def _handle(self, name: str, function: Callable[["SimulatedDaemon"], Any]) -> Task:
        self.counts["calls"] += 1
        task = self.schedule.start(name, self.process, lambda: self._answer(name, function))
        self.open[id(task)] = task
        return task

    def _answer(self, name: str, function: Callable[["SimulatedDaemon"], Any]) -> Answer:
        task, reason = self.schedule.current, ""
        try:
            result = function(self)
            if isinstance(result, Generator):
                result = self._drive(result)
            return Answer(OK, result, self.schedule.steps)
        except DaemonError as error:
            reason, message = error.reason, str(error)
        except ConversionError as error:
            reason, message = error.reason, str(error)
        except AssertionError as error:  # of an invariant
            self.violations.append(str(error))
            return Answer("INTERNAL")
        except Exception as error:
            if isinstance(error, OSError) and is_refusal(error):
                reason, message = medium_error(error).reason, str(error)
            else:
                self.violations.append(f"{name} is answered INTERNAL: {traceback.format_exc()}")
                return Answer("INTERNAL")
        finally:
            self.open.pop(id(task), None)
        if self.schedule.is_traced:
            self.schedule.trace(f"{name} refused: {reason}: {message}")
        self._check_reason(name, reason, REASONS[name], message)
        self.counts[reason] += 1
        return Answer(reason)

    def _drive(self, waiting: Generator[Pause, None, Any]) -> Any:
        schedule = self.schedule
        while True:
            try:
                pause = next(waiting)
            except StopIteration as ended:
                return ended.value
            schedule.pause(partial(_has_fired, pause), schedule.now + pause.seconds)

    def _check_reason(self, name: str, reason: str, reasons: "tuple[str, ...] | frozenset[str]", message: str) -> None:
        if reason not in reasons:
            self.violations.append(f"{name} is refused with {reason}, expected one of {sorted(reasons)}: {message}")
        if reason in MEDIUM and not any(kind.endswith(("failed", "short")) for kind in self.medium.counts):
            self.violations.append(f"{name} is refused with {reason}, and no file operation has failed: {message}")

    def check_leases(self) -> None:
        """Raise AssertionError if a version waits for a rank that has been silent for more than three leases."""
        for upload in self.intake.uploads() if self.is_up else ():
            seen = upload.publisher.seen
            open_ranks = [rank for rank in range(upload.publisher.world_size) if rank not in upload._sealed]
            silent = [rank for rank in open_ranks if self.schedule.now - max(upload.created, seen.get(rank, 0.0)) > 3 * LEASE]
            assert not silent, f"{upload.record.name} waits for ranks {silent}, which are silent"

    def check_calls(self) -> None:
        """Raise AssertionError if a call has not been answered for too many steps."""
        for task in self.open.values():
            assert self.schedule.steps - task.begun[1] < _CALL_STEPS, f"{task.name} has no answer after {_CALL_STEPS} steps"


def _has_fired(pause: Pause) -> bool:
    return pause.signal.count != pause.seen
