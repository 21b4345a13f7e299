"""An API server of vLLM as a simulated process: the plugin's real control side and gate, around models of vLLM's own parts.

The real code is `attach`, everything in `control/`, the guard of the engine's client, and the hooks that label answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from resharder.client.inference.control import attach as control_side
from resharder.client.inference.control import lease as lease_module
from resharder.client.inference.control.fence import FENCED
from resharder.client.inference.control.gate import Gate, GateMiddleware, Position, ServerLease
from resharder.client.inference.control.labels import VERSION_HEADER, Label, Message
from resharder.client.inference.control.orders import ControlOrder, Outcome
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import joined
from resharder.client.inference.vllm import attach as attach_module
from resharder.client.inference.vllm import outputs
from resharder.client.inference.vllm.route_rules import ROUTES
from resharder.v1.server_pb2 import Order

from tests.simulation.control.daemon_model import Daemon, Link, SimulatedChannel
from tests.simulation.control.engine_model import Call, EngineCore, Output, Running
from tests.simulation.control.event_loop import SimulatedLoop
from tests.simulation.control.replacing import replace, users
from tests.simulation.control.schedule import Process, Schedule
from tests.simulation.control.threads import threading_of

HOLD_SECONDS = 3.0
_IPC_SECONDS = 0.004


class Collector:
    """vLLM's `RequestOutputCollector`: outputs that were not taken yet are merged."""

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._ready = asyncio.Event()

    def put(self, output: Output) -> None:
        self._outputs.append(output)
        self._ready.set()

    def get_nowait(self) -> list[Output] | None:
        taken, self._outputs = self._outputs, []
        self._ready.clear()
        return taken or None

    async def get(self) -> list[Output]:
        while not self._outputs:
            await self._ready.wait()
        taken, self._outputs = self._outputs, []
        self._ready.clear()
        return taken


class RequestState:
    """vLLM's `RequestState`."""

    def __init__(self, queue: Collector) -> None:
        self.queue = queue

    def _new_completion_output(self, output: Output) -> Output:
        return output


class OutputProcessor:
    """vLLM's `OutputProcessor`."""

    def __init__(self) -> None:
        self.request_states: dict[str, RequestState] = {}

    def add_request(self, request: Any, queue: Collector) -> None:
        self.request_states[request.request_id] = RequestState(queue)

    def process_outputs(self, made: list[Output], timestamp: float) -> None:
        for output in made:
            state = self.request_states.get(output.request_id)
            if state is not None:
                state.queue.put(state._new_completion_output(output))
                if output.finished:
                    del self.request_states[output.request_id]


outputs._wrap(OutputProcessor, "add_request", outputs._add_request)
outputs._wrap(OutputProcessor, "process_outputs", outputs._process_outputs)
outputs._wrap(RequestState, "_new_completion_output", outputs._new_completion_output)
outputs._wrap(Collector, "get_nowait", outputs._get_nowait)
outputs._wrap(Collector, "get", outputs._get)


@dataclass
class Request:
    """A client's request and its answer."""

    id: str
    stream: bool
    tokens: int
    sent_at: float
    status: int = 0
    header: str = ""
    made_by: list[int] = field(default_factory=list)
    """Versions that computed its tokens."""
    answered: bool = False
    broken: bool = False
    """Whether the API server ended before it answered."""


class CoreClient:
    """vLLM's client of the engine core: calls arrive in order, and each gets one answer."""

    def __init__(self, api: "ApiServer") -> None:
        self._api = api
        self._sent = self._returned = 0.0

    async def _call_utility_async(self, method: str, *args: Any) -> Any:
        api, answer = self._api, asyncio.get_running_loop().create_future()
        schedule = api.schedule

        def reply(value: Any) -> None:
            self._returned = max(self._returned + 1e-6, schedule.now + api.ipc())
            schedule.at(self._returned, api.process, partial(replied, value), "replies")

        def replied(value: Any) -> None:
            schedule.hazard_point(0.01)
            api.in_loop(lambda: answer.cancelled() or answer.set_result(value))

        def send() -> None:
            self._sent = max(self._sent + 1e-6, schedule.now + api.ipc())
            schedule.at(self._sent, api.core.process, lambda: api.core.receive(Call(api, method, args, reply)), f"ipc {id(self)}")

        read_only = (args[1] if method == FENCED else method).startswith("is_")
        schedule.hazard_point(0.01 if read_only else 0.03)
        schedule.after(0, api.process, send, "sends")  # after the stop, if the process was stopped here
        return await answer

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self._call_utility_async("pause_scheduler", mode, clear_cache)


class EngineClient:
    """vLLM's `AsyncLLM`, as far as the control side uses it."""

    def __init__(self, api: "ApiServer", world_size: int) -> None:
        self.engine_core = CoreClient(api)
        parallel = SimpleNamespace(
            world_size_across_dp=world_size,
            data_parallel_external_lb=False,
            data_parallel_hybrid_lb=False,
            enable_eplb=False,
            data_parallel_size=1,
        )
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            lora_config=None,
            quant_config=None,
            speculative_config=None,
            model_config=SimpleNamespace(model="org/model"),
            kv_transfer_config=None,
            device_config=SimpleNamespace(device_type="cpu"),
        )

    async def _call(self, method: str, *args: Any) -> Any:
        return await self.engine_core._call_utility_async(method, *args)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        raise NotImplementedError("the control side pauses the engine core itself")

    async def resume_generation(self) -> None:
        await self._call("resume_scheduler")

    async def is_paused(self) -> bool:
        return bool(await self._call("is_scheduler_paused"))

    async def sleep(self, level: int, mode: str) -> None:
        await self._call("sleep", level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        await self._call("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return bool(await self._call("is_sleeping"))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> Any:
        return await self._call("collective_rpc", method, None, args)

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        return bool(await self._call("reset_prefix_cache", reset_running_requests, reset_connector))

    async def reset_mm_cache(self) -> None:
        await self._call("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._call("reset_encoder_cache")


class ObservedGate(Gate):
    """A gate that reports each opening."""

    opened: Callable[[int], None] = staticmethod(lambda version: None)

    def _move(self, position: Position) -> None:
        super()._move(position)
        if position is Position.OPEN:
            self.opened(self.version)


class ApiServer:
    """One API server: process, event loop, gate, control side, routes."""

    def __init__(self, schedule: Schedule, daemon: Daemon, core: EngineCore, process: Process, strict: bool) -> None:
        self.schedule, self.core, self.process, self._strict = schedule, core, process, strict
        self.loop = SimulatedLoop(schedule, process)
        self.granted_until = float("-inf")
        self.link = Link(daemon, process, self._granted)
        self.lease = ServerLease(schedule.monotonic)
        self.gate = ObservedGate(hold_seconds=HOLD_SECONDS, lease=self.lease, clock=schedule.monotonic)
        self.gate.opened = self._opened  # type: ignore[method-assign]
        self.control: Any = None
        self.carry_out: Callable[[ControlOrder], Awaitable[Outcome | None]]
        self.processor = OutputProcessor()
        self.processor.resharder = outputs._Source(core.page, True, schedule.monotonic)  # type: ignore[attr-defined,arg-type]
        self.engine = EngineClient(self, len(core.workers))
        self.middleware = GateMiddleware(self._app, self.gate, ROUTES, lambda: core.page.version)  # type: ignore[arg-type]
        self.handle: Any = None
        self.admitted: Callable[[ApiServer], None] = lambda api: None
        """Called when the gate has admitted a request."""
        self._requests: dict[str, Request] = {}
        self._outputs_at = 0.0
        process.program = self
        process.when_killed.append(self._died)
        self.in_loop(lambda: self.loop.create_task(self._attach()))

    async def _attach(self) -> None:
        settings = PluginSettings("daemon:1", self.core.server)
        self.handle = await attach_module.attach(self.engine, settings, gate=self.gate, address=self.process.name)

    def ipc(self) -> float:
        """Draw the latency of a message between this process and the engine core."""
        random = self.schedule.random
        return _IPC_SECONDS * random.random() * (60 if self.schedule.hazard and random.random() < 0.02 else 1)

    def in_loop(self, act: Callable[[], object]) -> None:
        """Run `act` on the event loop, as after a message arrived."""
        if self.process.alive:
            self.loop.call_soon(act, context=Context())

    def _died(self) -> None:
        for request in self._requests.values():
            request.broken = True
        self.schedule.after(self.ipc(), self.core.process, lambda: self.core.drop_requests_of(self))

    # Invariants

    def _granted(self, until: float) -> None:
        self.granted_until = max(self.granted_until, until)

    @property
    def leads(self) -> bool:
        """Whether this side has executed the newest LEAD that the engine has seen."""
        return self.control is not None and self.control.state.led == self.core.highest

    def _opened(self, version: int) -> None:
        if self.process.alive:
            self.schedule.trace(f"gate open on version {version}")
            self._check_open(version)

    def _check_open(self, version: int) -> None:
        if self.leads and self.core.process.alive and self.core.installed != version:
            self.schedule.fail(f"the leader's gate is open on {version}: {self.core.workers}")
        # A paused engine's caches are checked when it resumes. Until the next leader's LEAD arrives, this side counts as leading.
        if self.leads and self.core.process.alive and not self.core.paused:
            self.core.check_caches()
        # A process that was stopped since acts on the time before; one that was not has had no reason to read the clock again.
        late = max(self.process.read_at, self.process.event_at) - self.granted_until
        if self._strict and late >= 0:
            self.schedule.fail(f"a gate is open {late:.3f} s after its lease, where versions must not mix")

    @property
    def admits(self) -> int:
        """The version on which a request that came now would be admitted; 0 for none."""
        if not self.process.alive or self.process.stopped or self.gate._position is not Position.OPEN:
            return 0
        ended = self.lease.strict and (self.schedule.now >= self.lease.until or self.lease.lapses != self.gate._lapses)
        return 0 if ended else self.gate.version

    async def check_and_carry_out(self, order: ControlOrder) -> "Outcome | None":
        """Check that the stream that delivered an order last has not ended before the order begins."""
        stream = self.link.delivered.get((order.kind, order.install, order.version, order.term))
        if self.process.alive and stream is not self.handle._thread._call:
            self.schedule.fail(f"{self.process.name} begins {Order.Kind.Name(order.kind)} of a stream that has ended")
        return await self.carry_out(order)

    # Requests

    def serve(self, request: Request) -> None:
        """Take a client's request from the socket."""
        self._requests[request.id] = request
        self.in_loop(lambda: self.loop.create_task(self._serve(request)))

    async def _serve(self, request: Request) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                headers = dict(message["headers"])
                request.header = headers[VERSION_HEADER.lower().encode()].decode()
            elif request.stream and request.status == 200 and not _labelled(message["body"]):
                self.schedule.fail(f"{request.id}: an event does not name the versions of its tokens: {message['body']!r}")
            await asyncio.sleep(0)

        await self.middleware({"type": "http", "method": "POST", "path": "/v1/completions", "request": request}, _receive, send)
        if request.status == 200 and not request.stream and request.made_by:
            expected = str(Label(joined(request.made_by)))
            if request.header != expected:
                self.schedule.fail(f"{request.id}: the header is {request.header!r}, the tokens are of {expected!r}")
        request.answered = True
        del self._requests[request.id]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        request: Request = scope["request"]
        self._check_open(self.gate.version)
        self.admitted(self)
        queue = Collector()
        self.processor.add_request(SimpleNamespace(request_id=request.id), queue)
        self.schedule.after(self.ipc(), self.core.process, lambda: self.core.submit(Running(self, request.id, request.tokens)))
        if request.stream:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        finished = False
        while not finished:
            taken = await queue.get()
            made, finished = [v for output in taken for v in output.made_by], taken[-1].finished
            request.made_by += made
            if request.stream:
                body = b'data: {"made_by": "%s"}\n\n' % str(Label(tuple(sorted(set(made))))).encode()
                await send({"type": "http.response.body", "body": body, "more_body": not finished})
        if not request.stream:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    def take_outputs(self, made: list[Output], computed: float) -> None:
        """Send outputs of the engine core to this process."""
        self._outputs_at = max(self._outputs_at + 1e-6, self.schedule.now + self.ipc())
        process = partial(self.in_loop, partial(self.processor.process_outputs, made, computed))
        self.schedule.at(self._outputs_at, self.process, process, "outputs")


async def _receive() -> Message:
    return {"type": "http.request"}


def _labelled(event: bytes) -> bool:
    """Whether the label of an event with tokens names exactly the versions that made them."""
    label, _, made_by = event.partition(b', "made_by": ')
    versions = made_by.removesuffix(b"}\n\n")
    return not made_by or versions == b'""' or label.endswith(b'"resharder_versions": ' + versions)


@contextmanager
def simulated_modules(schedule: Schedule) -> Iterator[None]:
    """Replace what the plugin's modules take from the system: clocks, threads, channels. Yield while it is in effect."""
    executor = control_side.OrderExecutor

    def made(*args: Any, **options: Any) -> Any:
        assert schedule.running is not None
        api: ApiServer = schedule.running.program
        api.control = executor(*args, **options | {"journal": api.core.page.read})
        api.carry_out, api.control.carry_out = api.control.carry_out, api.check_and_carry_out
        return api.control

    def channel(endpoint: str) -> SimulatedChannel:
        assert schedule.running is not None
        return SimulatedChannel(schedule.running.program.link)

    clocks = SimpleNamespace(monotonic=schedule.monotonic, time=schedule.wall)
    replaced = [
        (lease_module, "time", clocks),
        (lease_module, "threading", threading_of(schedule)),
        (control_side, "Channel", channel),
        (control_side, "OrderExecutor", made),
        *((module, "replace", replace) for module in users()),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name_, value in replaced:
        setattr(module, name_, value)
    try:
        yield
    finally:
        for module, name_, value in before:
            setattr(module, name_, value)
