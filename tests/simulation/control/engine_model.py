"""A model of vLLM's engine core and its workers, behind the plugin's own fence.

The core executes one call after the other, as vLLM's does. It checks what must hold whenever something changes the
engine, and whenever a token is computed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from resharder.client.inference.control.fence import FENCED, Fence
from resharder.client.inference.engine import STAY_PAUSED, WEIGHTS, SleepState
from resharder.client.inference.version_page import Journal
from resharder.client.inference.vllm.engine_core import resharder_fenced
from resharder.server.state.errors import ResourceNotFound
from resharder.server.state.server import Worker
from resharder.v1 import resources_pb2

from tests.simulation.control.daemon_model import Daemon, Link
from tests.simulation.control.schedule import Process, Schedule

_REPORT_SECONDS = 2.0
_STEP_SECONDS = 0.05


class Later:
    """The answer to a call that takes time."""

    def __init__(self) -> None:
        self.answered: Callable[[Any], None] = lambda value: None


class Caller(Protocol):
    """A process with a client of the engine core."""

    process: Process
    granted_until: float
    """End of the lease that the daemon granted last."""

    def take_outputs(self, outputs: "list[Output]", computed: float) -> None:
        """Take the outputs of one step."""


@dataclass
class Call:
    caller: Caller
    method: str
    args: Sequence[Any]
    reply: Callable[[Any], None]


@dataclass
class Output:
    """Tokens of one request, as the engine core sends them. `made_by` is what the labels must name."""

    request_id: str
    new_token_ids: list[int]
    made_by: list[int]
    finished: bool
    pooling_output: None = None


@dataclass
class Running:
    """A request. Once begun, it is stepped also while no other request begins."""

    caller: Caller

    id: str
    tokens_left: int
    begun: bool = False


class PageModel:
    """The server's page: the real journal, in memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._journal = clock, Journal()

    def write(self, rank: int, version: int) -> None:
        self._journal = self._journal.changed(rank, version, self._clock())

    def read(self) -> Journal:
        return self._journal

    @property
    def version(self) -> int:
        return self._journal.version


@dataclass
class WorkerModel:
    """A worker: `holds` is 0 while its weights are torn, dropped or not loaded."""

    rank: int
    nonce: str
    holds: int = 0
    dropped: bool = False
    applied: str = ""
    staging: str = ""
    staged: tuple[str, int] = ("", 0)
    latest: Worker | None = None
    installed: Worker | None = None


@dataclass(eq=False)
class EngineCore:
    """The engine core of one server's life, and its workers."""

    schedule: Schedule
    daemon: Daemon
    server: str
    process: Process
    workers: list[WorkerModel]
    failures: list[str]
    """Steps that fail: `stage` or `apply`, once for each entry."""
    inbox: deque[Call] = field(default_factory=deque)
    busy: bool = False
    paused: str = ""
    """`new` while no request begins (vLLM's PAUSED_NEW), `all` while nothing is scheduled (PAUSED_ALL)."""
    requests: dict[str, Running] = field(default_factory=dict)
    cached: set[int] = field(default_factory=set)
    """Versions that computed the entries of the caches."""
    when_applied: Callable[[Caller], None] | None = None
    """Called once, when the workers have applied a version, before the caller gets the answer."""
    highest: int = 0
    """Highest term of any call so far."""

    def __post_init__(self) -> None:
        self._clock = lambda: self.schedule.now
        self._resharder_fences = {"": Fence(self._clock)}
        self.page = PageModel(self._clock)
        for worker in self.workers:
            self.page.write(worker.rank, 0)
        self.slumber = SleepState()
        self.link = Link(self.daemon, self.process)
        self._token: Sequence[Any] | None = None
        self._caller: Caller | None = None
        self._draining: list[Later] = []
        self._stepping = False

    # Calls

    def receive(self, call: Call) -> None:
        """Take a call from the socket."""
        self.inbox.append(call)
        self._work()

    def _work(self) -> None:
        while self.inbox and not self.busy:
            call = self.inbox.popleft()
            self._token = call.args[0] if call.method == FENCED else None
            self._caller = call.caller
            if self._token is not None:
                self.highest = max(self.highest, self._token[0])
            answer = getattr(self, call.method)(*call.args)
            if isinstance(answer, Later):
                answer.answered = call.reply
            else:
                call.reply(answer)

    resharder_fenced = resharder_fenced

    def _acts(self, what: str, *, leased: bool = True) -> None:
        """Check that the caller may change the engine now."""
        if self._token is None or self._caller is None:
            self.schedule.fail(f"{what}: expected a token")
        by, late = self._caller.process.name, self.schedule.now - self._caller.granted_until
        self.schedule.trace(f"{what} by {by}, term {self._token[0] & 0xFFFF}")
        if self._token[0] != self.highest:
            self.schedule.fail(f"{what} by {by}: an order of an older term has no effect")
        if leased and late >= 0:
            self.schedule.fail(f"{what} by {by}: its lease ended {late:.3f} s ago")

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Later | None:
        """Pause, as vLLM 0.32 does: only `keep` stops requests that have begun."""
        self._acts(f"pause ({mode})")
        self.paused = "all" if mode == "keep" else "new"
        if mode == "abort":
            self.abort(list(self.requests.values()))
        self._drained()
        if self._idle:
            return None
        self._step_soon()
        self._draining.append(Later())
        return self._draining[-1]

    @property
    def _idle(self) -> bool:
        """Whether no step can begin while the engine is paused as it is."""
        return self.paused == "all" or not any(request.begun for request in self.requests.values())

    def resume_scheduler(self) -> None:
        self._acts("resume")
        self.check_caches()
        self.paused = ""
        self._step_soon()

    def is_scheduler_paused(self) -> bool:
        return bool(self.paused)

    def is_sleeping(self) -> bool:
        return bool(self.paused or self.slumber.tags)

    def sleep(self, level: int, mode: str) -> Later | None:
        """Pause as `pause_scheduler` does, then sleep."""
        self._acts(f"sleep at level {level} ({mode})")
        pausing = self.pause_scheduler(mode, True)
        if pausing is None:
            self._fall_asleep(level)
            return None
        later = Later()

        def paused(answer: None) -> None:
            self._fall_asleep(level)
            later.answered(None)

        pausing.answered = paused
        return later

    def _fall_asleep(self, level: int) -> None:
        self.cached.clear()
        if self.slumber.tags:
            return
        self.slumber.begin(level)
        for worker in self.workers if level == 2 else ():
            worker.applied, worker.dropped = "", True
            self._hold(worker, 0)
            self._report(worker, resources_pb2.Worker.EMPTY, installed=True)

    def wake_up(self, tags: list[str]) -> None:
        self._acts("wake")
        self.slumber.end(tags)
        if STAY_PAUSED not in tags and not self.slumber.tags:
            self.check_caches()
            self.paused = ""
            self._step_soon()

    def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        self._acts("reset of the caches")
        self.cached.clear()
        for request in self.requests.values():
            request.begun = False
        self._drained()
        return True

    def reset_mm_cache(self) -> None: ...
    def reset_encoder_cache(self) -> None: ...

    def collective_rpc(self, method: str, timeout: None, args: Sequence[Any]) -> Any:
        if method == "resharder_describe":
            self._begin_reports()
            return [self._answer(worker) for worker in self.workers]
        self._acts(method.removeprefix("resharder_"), leased=method == "resharder_apply")
        if method == "resharder_apply":
            return self._apply(args[0])
        for worker in self.workers:
            if method == "resharder_stage":
                self._stage(worker, args[0], int(args[1].rpartition("/")[2]))
            elif args[0] in (worker.staging, worker.staged[0]):
                worker.staging, worker.staged = "", ("", 0)
                worker.latest = worker.installed
        return [self._answer(worker) for worker in self.workers]

    def _answer(self, worker: WorkerModel, error: str = "") -> dict[str, Any]:
        power, asleep = self.slumber.power, sorted(self.slumber.tags)
        about = {"version": worker.holds, "power": int(power), "asleep": asleep, "dropped": worker.dropped}
        return {"ok": not error, "rank": worker.rank, "error": error, **about}

    # Installs

    def _hold(self, worker: WorkerModel, version: int) -> None:
        worker.holds = version
        self.page.write(worker.rank, version)

    def _fails(self, step: str) -> bool:
        if step in self.failures:
            self.failures.remove(step)
            self.schedule.trace(f"{step} fails")
            return True
        return False

    def _stage(self, worker: WorkerModel, install: str, version: int) -> None:
        if install in (worker.staging, worker.staged[0]):
            return
        worker.staging, worker.staged = install, ("", 0)

        def staged() -> None:
            if worker.staging != install:
                return
            worker.staging = ""
            if self._fails("stage"):
                self._report(worker, resources_pb2.Worker.FAILED, install=install, error="it was not staged")
                return
            worker.staged = install, version
            self._report(worker, resources_pb2.Worker.STAGED, version=version, install=install)

        self.schedule.after(0.02 + 0.4 * self.schedule.random.random(), self.process, staged)

    def _apply(self, install: str) -> Any:
        if all(worker.applied == install for worker in self.workers):
            return [self._answer(worker) for worker in self.workers]
        if WEIGHTS in self.slumber.tags or any(worker.staged[0] != install for worker in self.workers):
            return [self._answer(worker, f"{install} is not staged") for worker in self.workers]
        if not self.paused or not self._idle:
            self.schedule.fail("weights are written into a paused engine only")
        self.busy, later, caller = True, Later(), self._caller
        assert caller is not None
        answers: list[dict[str, Any]] = []

        def install_into(worker: WorkerModel) -> None:
            version = worker.staged[1]
            worker.staged = "", 0
            if self._fails("apply"):
                self._report(worker, resources_pb2.Worker.FAILED, install=install, error="it was torn")
                answers.append(self._answer(worker, "it was torn"))
                return
            worker.applied, worker.dropped = install, False
            self._hold(worker, version)
            self._report(worker, resources_pb2.Worker.APPLIED, version=version, install=install, installed=True)
            answers.append(self._answer(worker))

        def done() -> None:
            self.busy = False
            act, self.when_applied = self.when_applied, None
            if act is not None:
                act(caller)
            later.answered(answers)
            self._work()

        random, longest = self.schedule.random, 0.0
        for worker in self.workers:
            worker.applied = ""
            self._hold(worker, 0)
            took = 0.02 + 0.3 * random.random()
            longest = max(longest, took)
            self.schedule.after(took, self.process, lambda worker=worker: install_into(worker))  # type: ignore[misc]
        self.schedule.after(longest + 1e-3, self.process, done)
        return later

    def check_caches(self) -> None:
        """Check that the caches have entries of the installed version alone: what begins to run now may use them."""
        if not self.cached <= {self.installed}:
            self.schedule.fail(f"the engine runs version {self.installed} on caches of versions {sorted(self.cached)}")

    # Requests

    @property
    def installed(self) -> int:
        """The version that all workers hold; 0 for none."""
        versions = {worker.holds for worker in self.workers}
        return versions.pop() if len(versions) == 1 else 0

    def submit(self, request: Running) -> None:
        self.requests[request.id] = request
        self._step_soon()

    def drop_requests_of(self, caller: Caller) -> None:
        """Drop the requests of a client that is gone."""
        self.requests = {id: request for id, request in self.requests.items() if request.caller is not caller}
        self._drained()

    def abort(self, requests: list[Running]) -> None:
        for request in requests:
            del self.requests[request.id]
            request.caller.take_outputs([Output(request.id, [], [], True)], self.schedule.now)

    def _step_soon(self) -> None:
        if not self._stepping and self.requests and not (self.paused and self._idle):
            self._stepping = True
            self.schedule.after(_STEP_SECONDS * (0.5 + self.schedule.random.random()), self.process, self._step)

    def _step(self) -> None:
        self._stepping = False
        for request in self.requests.values() if not self.paused else ():
            request.begun = True
        if self._idle or self.busy:
            return
        version, now = self.installed, self.schedule.now
        if not version:
            self.schedule.fail(f"no token is computed from torn or dropped weights: {self.workers}")
        if self.slumber.tags:
            self.schedule.fail("no token is computed asleep")
        self.check_caches()
        self.cached.add(version)
        outputs: dict[int, tuple[Caller, list[Output]]] = {}
        for request in [request for request in self.requests.values() if request.begun]:
            request.tokens_left -= 1
            if not request.tokens_left:
                del self.requests[request.id]
            _, made = outputs.setdefault(id(request.caller), (request.caller, []))
            made.append(Output(request.id, [1], [version], not request.tokens_left))
        for caller, made in outputs.values():
            caller.take_outputs(made, now)
        self._drained()
        self._step_soon()

    def _drained(self) -> None:
        """Answer pauses that wait until the engine is idle."""
        if self._idle:
            draining, self._draining = self._draining, []
            for later in draining:
                later.answered(None)

    # Reports

    def booted(self, version: int) -> None:
        """Load a version, as at the start of a server."""
        for worker in self.workers:
            self._hold(worker, version)
            self._report(worker, resources_pb2.Worker.BOOTED, version=version, installed=True)
        self._begin_reports()

    def _begin_reports(self) -> None:
        if not getattr(self, "_reports", False):
            self._reports = True
            self._periodically()

    def _periodically(self) -> None:
        for worker in self.workers:
            self._send(worker)
        self.schedule.after(_REPORT_SECONDS, self.process, self._periodically)

    def _report(
        self,
        worker: WorkerModel,
        state: resources_pb2.Worker.State,
        *,
        version: int = 0,
        install: str = "",
        error: str = "",
        installed: bool = False,
    ) -> None:
        fingerprint = f"fingerprint {worker.holds}" if worker.holds else ""
        worker.latest = Worker(worker.rank, state, version, install, error, worker.nonce, fingerprint)
        if installed or (state == resources_pb2.Worker.FAILED and not worker.holds):
            worker.installed = worker.latest
        self._send(worker)

    def _send(self, worker: WorkerModel) -> None:
        report = worker.latest
        if report is None:
            return

        def answered(result: Any) -> None:
            if isinstance(result, ResourceNotFound):
                self.daemon.call(self.link, lambda: self.daemon.claim(self.server, boot=False), lambda claim: None)
                worker.latest = worker.installed

        self.daemon.call(self.link, lambda: self.daemon.fleets.report_worker(self.server, report), answered)
