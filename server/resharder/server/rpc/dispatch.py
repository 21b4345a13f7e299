"""Wrapper of all RPC methods, between gRPC's event loop and the services.

Before a service gets a call, the wrapper checks its protocol revision, caller, role, message size and resource,
and takes a place (`admission.py`). Services are synchronous and run on a bounded pool, a step at a time:

    unary                  def X(request, call) -> Message | Waiting[Message]
    server stream          def X(request, call) -> Generator[Message | Pause]
    client stream          def X(call) -> Session

A call that waits (a `Pause`), or whose peer is slow, occupies no thread. Exceptions of a service become a status (`abort`).
"""

import asyncio
import contextvars
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.errors import ConversionError
from resharder.server.infra.caller import CALLER
from resharder.server.infra.change_signal import Pause
from resharder.server.infra.medium import is_refusal, medium_error
from resharder.server.rpc.admission import FairPool, Places, model_of_chunk, model_of_request
from resharder.server.rpc.methods import BY_PATH, METHODS, OURS, Cost, Method, Role
from resharder.server.state.errors import DaemonError, FailedPrecondition, InvalidArgument
from resharder.v1.revision import OLDEST, REVISION, named

T = TypeVar("T")
C = TypeVar("C", bound="CallerIdentity")
DOMAIN = "resharder"
THREADS, RENEWAL_THREADS = 60, 4
_INLINE_BYTES = 16 << 10  # parsed on the event loop; larger messages on the pool
_CHECK_AGAIN_SECONDS = 1.0  # a stream ends when its caller loses its role
_RENEWALS = "renewals"  # lane in a pool of their own
_MESSAGE_CHARACTERS = 2000  # some HTTP/2 peers bound headers to 8 KiB, and the message is in two of them
_log = structlog.get_logger("resharder.rpc")


@dataclass(frozen=True)
class Call:
    """Part of a call that services read. `metadata` has the request's headers."""

    metadata: Sequence[tuple[str, str | bytes]] = ()


class Session(Protocol):
    """Service's side of a client stream. Methods are called one at a time, except that `responses` runs beside them."""

    def receive(self, message: Any) -> None:
        """Process one request."""

    def end(self) -> Any:
        """Return the answer after the last request; None for a stream."""

    def responses(self) -> Generator[Any, None, None]:
        """Yield the answers of a stream: messages and pauses."""

    def close(self) -> None:
        """Free the session's resources. Called once, however the call ends."""


class Terms(Protocol):
    """The daemon's term, in `standby/tenure.py`."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Initial metadata of every answer."""

    def check(self, metadata: Iterable[tuple[str, str | bytes]], *, believed: bool) -> None:
        """Check that a call names no higher term, for which the process ends if the caller is believed. Raises a DaemonError."""


class CallerIdentity(Protocol):
    """Caller of a call, as limits and the log need it."""

    @property
    def name(self) -> str:
        """Name of the caller; its address without security."""

    @property
    def secured(self) -> bool:
        """Whether the identity is verified by a certificate or token."""


class Guard(Protocol[C]):
    """Checks of callers, in `security/access.py`, which is above this folder. Every method may raise a DaemonError."""

    def caller(self, context: grpc.ServicerContext) -> C:
        """Identify the caller."""

    def admit(self, method: Method, context: grpc.ServicerContext) -> C:
        """Identify the caller, count the call, and check that one of its roles permits the method."""

    def ends_daemon(self, caller: C) -> bool:
        """Return whether the caller is believed when it says that another daemon has taken over."""

    def check_size(self, method: Method, size: int) -> None:
        """Check the size of a request in bytes."""

    def judge(self, caller: C, method: Method, request: Any) -> Any:
        """Check that the caller may make this request, and return the resource that it concerns."""

    def decide(self, caller: C, method: Method, resource: Any) -> None:
        """Check that the caller may make a call about a resource that `judge` has returned."""

    def open(self, caller: C) -> AbstractContextManager[None]:
        """Count a long call while the context lasts."""

    def redact(self, caller: C, answer: Any) -> None:
        """Remove from an answer, in place, what the caller may not read."""

    def note(self, path: str, peer: str, error: DaemonError) -> None:
        """Log a refused call."""


@dataclass(frozen=True)
class _Done(Generic[T]):
    value: T


class Dispatcher:
    """Factory of gRPC handlers.

    Args:
        guard: Checks of callers.
        model_of: Function that returns the model of a server, or an empty name.
        refused: Called with the reason of every refusal.
        terms: The daemon's term; None for none.
        waits: Places of each waiting method.
        transfers: Places of each heavy method.
    """

    def __init__(
        self,
        guard: Guard[Any],
        model_of: Callable[[str], str],
        refused: Callable[[str], None],
        *,
        terms: Terms | None = None,
        waits: int,
        transfers: int,
        threads: int = THREADS,
        renewal_threads: int = RENEWAL_THREADS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guard, self._model_of, self.refused, self.clock = guard, model_of, refused, clock
        self.terms = terms
        count = {Cost.WAIT: waits, Cost.TRANSFER: transfers}
        self._places = {method.path: Places(method.name, count[method.cost]) for method in METHODS if method.cost.long}
        self._pool, self._renewals = FairPool(threads, "rpc"), FairPool(renewal_threads, "renewals")

    def close(self) -> None:
        """Refuse further steps. Running ones are not waited for."""
        self._pool.shutdown()
        self._renewals.shutdown()

    def handler(self, path: str, behavior: Any, parse: Any, serialize: Any, shape: tuple[bool, bool]) -> grpc.RpcMethodHandler:
        """Return the handler of a service's method. `shape`: whether requests and responses are streams."""
        entry = _Entry(self, BY_PATH[path], behavior, parse, serialize or bytes)
        match shape:
            case (False, False):
                return grpc.unary_unary_rpc_method_handler(entry.unary)
            case (False, True):
                return grpc.unary_stream_rpc_method_handler(entry.stream)
            case (True, False):
                return grpc.stream_unary_rpc_method_handler(entry.collect)
        return grpc.stream_stream_rpc_method_handler(entry.converse)

    def native(self, path: str, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """Return the handler of an asynchronous service of gRPC, behind the same checks."""
        entry = _Entry(self, BY_PATH[path], None, None, None)
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        wrapped = entry.around(getattr(handler, shape))
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(wrapped, handler.request_deserializer, handler.response_serializer)

    # On the event loop

    def submit(self, method: Method, lane: str, step: Callable[[], T]) -> Future[T]:
        """Queue a step of a call on the pool, with the current context variables. Renewals have threads of their own."""
        context = contextvars.copy_context()
        if method.cost is Cost.RENEWAL:
            return self._renewals.submit(_RENEWALS, lambda: context.run(step))
        return self._pool.submit(f"{method.cost.name} {lane}", lambda: context.run(step))

    async def wait(self, pause: Pause) -> None:
        """Return when the pause's signal fires or its time has passed, without occupying a thread."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the server has stopped, and closed its loop
                loop.call_soon_threadsafe(changed.set)

        pause.signal.connect(wake)
        try:
            if pause.signal.count == pause.seen:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), pause.seconds)
        finally:
            pause.signal.disconnect(wake)

    def lane(self, method: Method, caller: CallerIdentity, context: grpc.ServicerContext, request: Any) -> str:
        """Return the lane of a call: the model that it names, else its caller, which without security is a connection."""
        named = "" if caller.secured and hasattr(request, "subject") else self._named(request)
        return named or (caller.name if caller.secured else context.peer())

    def _named(self, request: Any) -> str:
        if isinstance(request, bytes):
            return model_of_chunk(request)
        server = getattr(request, "control", "") and request.server.removeprefix("servers/")
        return self._model_of(server) if server else model_of_request(request)

    @property
    def guard(self) -> Guard[Any]:
        """Checks of callers."""
        return self._guard

    def place(self, method: Method, lane: str) -> AbstractContextManager[None] | None:
        """Return a context that occupies a place of a long method, and may raise ResourceExhausted; None for other methods."""
        places = self._places.get(method.path)
        return places.place(lane) if places else None


class _Entry:
    """One method in its four shapes. Requests are bytes until their caller is admitted."""

    def __init__(self, dispatcher: Dispatcher, method: Method, behavior: Any, parse: Any, serialize: Any) -> None:
        self._d, self._method, self._behavior = dispatcher, method, behavior
        self._parse, self._serialize = parse, serialize

    def around(self, behavior: Any) -> Any:
        async def called(request: Any, context: Any) -> Any:
            async with self._admitted(context) as (caller, held):
                self._take_place(caller, context, request, held)
                return await behavior(request, context)

        async def streamed(request: Any, context: Any) -> None:
            async with self._admitted(context) as (caller, held):
                self._take_place(caller, context, request, held)
                async for answer in behavior(request, context):
                    await context.write(answer)

        return streamed if inspect.isasyncgenfunction(behavior) else called

    async def unary(self, request: bytes, context: Any) -> bytes:
        async with self._admitted(context) as (caller, held):
            message = await self._parsed(caller, context, request)
            self._d.guard.judge(caller, self._method, message)
            lane = self._take_place(caller, context, message, held)
            drive = _Drive(self._d, self._method, lane)
            answered = await drive.step(lambda: self._begin(caller, message, context))
            if isinstance(answered, bytes):
                return answered
            result = await drive.run(answered, self._d.wait)
            return await drive.step(lambda: self._packed(caller, result))
        raise AssertionError("an aborted call does not return")

    def _begin(self, caller: Any, message: Any, context: Any) -> Any:
        found = self._behavior(message, Call(context.invocation_metadata() or ()))
        return found if isinstance(found, Generator) else self._packed(caller, found)

    def _packed(self, caller: Any, message: Any) -> bytes:
        self._d.guard.redact(caller, message)
        packed: bytes = self._serialize(message)
        return packed

    async def stream(self, request: bytes, context: Any) -> None:
        async with self._admitted(context) as (caller, held):
            message = await self._parsed(caller, context, request)
            self._d.guard.judge(caller, self._method, message)
            drive = _Drive(self._d, self._method, self._take_place(caller, context, message, held))
            call = Call(context.invocation_metadata() or ())
            await self._answer(drive, await drive.step(lambda: self._behavior(message, call)), context)

    async def _answer(self, drive: "_Drive", generator: Generator[Any, None, None], context: Any) -> None:
        """Write the generator's answers. The next one is computed after gRPC has taken the previous one."""

        async def each(item: Any) -> None:
            await (self._d.wait(item) if isinstance(item, Pause) else context.write(item))

        await drive.run(generator, each, self._pack_item)

    def _pack_item(self, item: Any) -> Any:
        return item if isinstance(item, Pause) else self._serialize(item)

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        async with self._admitted(context) as (caller, held):
            drive = _Drive(self._d, self._method, "")
            call = Call(context.invocation_metadata() or ())
            session: Session = self._behavior(call)
            try:
                async for message in self._messages(caller, context, requests, drive, held):
                    await drive.step(lambda message=message: session.receive(message))  # type: ignore[misc]
                return await drive.step(lambda: self._packed(caller, session.end()))
            finally:
                drive.afterwards(session.close)
        raise AssertionError("an aborted call does not return")

    async def converse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async with self._admitted(context) as (caller, held):
            inward = _Drive(self._d, self._method, "")
            session: Session = self._behavior(Call(context.invocation_metadata() or ()))
            messages = self._messages(caller, context, requests, inward, held)
            first = await anext(messages, None)
            if first is None:
                return

            async def receive() -> None:
                async for message in messages:
                    await inward.step(lambda message=message: session.receive(message))  # type: ignore[misc]

            def received(reader: "asyncio.Task[None]") -> None:
                if not reader.cancelled():
                    reader.exception()  # raised below, unless the call is over
                    inward.afterwards(session.end)

            reader: asyncio.Task[None] | None = None
            try:
                await inward.step(lambda: session.receive(first))
                reader = asyncio.create_task(receive())
                reader.add_done_callback(received)
                await self._answer(_Drive(self._d, self._method, inward.lane), session.responses(), context)
                if reader.done():
                    reader.result()
            finally:
                if reader is not None:
                    reader.cancel()
                inward.afterwards(session.close)

    @asynccontextmanager
    async def _admitted(self, context: Any) -> AsyncIterator[tuple[Any, ExitStack]]:
        """Admit a caller and hold its place while the context lasts. Ends the call with the status of any exception inside."""
        with ExitStack() as held:
            try:
                terms = self._d.terms if self._method.service.startswith(OURS) else None
                if terms is not None:
                    await context.send_initial_metadata(terms.metadata)
                if self._method.service.startswith(OURS):
                    check_revision(context.invocation_metadata() or ())
                caller = self._d.guard.admit(self._method, context)
                if terms is not None and Role.VIEWER not in self._method.who:  # who only looks ends no daemon
                    believed = self._d.guard.ends_daemon(caller)
                    terms.check(context.invocation_metadata() or (), believed=believed)
                CALLER.set(caller.name if caller.secured else "")
                if self._method.cost.long:
                    held.enter_context(self._d.guard.open(caller))
                yield caller, held
            except (grpc.RpcError, grpc.aio.BaseError):  # the peer is gone, or `abort` was called
                raise
            except Exception as error:
                if isinstance(error, DaemonError):
                    self._d.guard.note(self._method.path, context.peer(), error)
                await abort(context, error, self._d.refused)

    def _take_place(self, caller: Any, context: Any, message: Any, held: ExitStack) -> str:
        lane = self._d.lane(self._method, caller, context, message)
        if (place := self._d.place(self._method, lane)) is not None:
            held.enter_context(place)
        return lane

    async def _messages(
        self, caller: Any, context: Any, requests: AsyncIterator[bytes], drive: "_Drive", held: ExitStack
    ) -> AsyncIterator[Any]:
        """Yield the messages of a stream. The first message names the resource; until it arrives, the lane is the caller."""
        resource, checked = None, 0.0
        waiting = held.enter_context(ExitStack())
        if (place := self._d.place(self._method, caller.name if caller.secured else context.peer())) is not None:
            waiting.enter_context(place)
        async for request in requests:
            message = await self._parsed(caller, context, request)
            if not checked:
                resource, checked = self._d.guard.judge(caller, self._method, message), self._d.clock()
                waiting.close()
                drive.lane = self._take_place(caller, context, message, held)
            elif self._d.clock() > checked + _CHECK_AGAIN_SECONDS:
                self._d.guard.decide(self._d.guard.caller(context), self._method, resource)
                checked = self._d.clock()
            yield message

    async def _parsed(self, caller: Any, context: Any, request: bytes) -> Any:
        """Parse a request. Raises ResourceExhausted (MESSAGE_TOO_LARGE), InvalidArgument (MESSAGE)."""
        self._d.guard.check_size(self._method, len(request))
        if self._parse is None:
            return request
        try:
            if len(request) <= _INLINE_BYTES:
                return self._parse(request)
            lane = caller.name if caller.secured else context.peer()
            return await asyncio.wrap_future(self._d.submit(self._method, lane, lambda: self._parse(request)))
        except DecodeError as error:
            raise InvalidArgument("MESSAGE", "expected a message of this method, got bytes that do not parse") from error


class _Drive:
    """Driver of one call's steps on the pool, one after the other."""

    def __init__(self, dispatcher: Dispatcher, method: Method, lane: str) -> None:
        self._d, self._method, self.lane = dispatcher, method, lane
        self._last: Future[Any] | None = None

    async def step(self, step: Callable[[], T]) -> T:
        future = self._last = self._d.submit(self._method, self.lane, step)
        return await asyncio.wrap_future(future)

    async def run(
        self,
        generator: Generator[Any, None, Any],
        each: Callable[[Any], Awaitable[None]],
        convert: Callable[[Any], Any] = lambda item: item,
    ) -> Any:
        """Await `each` of the generator's items, and return its result. Closes the generator, also if the call is cancelled."""

        def advance() -> Any:
            try:
                return convert(next(generator))
            except StopIteration as ended:
                return _Done(ended.value)

        try:
            while not isinstance(item := await self.step(advance), _Done):
                await each(item)
            return item.value
        finally:
            self.afterwards(generator.close)

    def afterwards(self, step: Callable[[], object]) -> None:
        """Run `step` once the last step has ended, which a cancelled call does not wait for."""
        bound = partial(contextvars.copy_context().run, step)
        run: Callable[[object], object] = lambda _: self._d.submit(self._method, self.lane, bound)  # noqa: E731
        if self._last is None:
            run(None)
        else:
            self._last.add_done_callback(run)


def refusal(metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    """Return why calls with this metadata are refused; empty for supported revisions and for other clients."""
    agent = next((value for key, value in metadata if key == "user-agent"), "")
    client = named(agent if isinstance(agent, str) else "")
    if client is None or OLDEST <= client[1] <= REVISION:
        return ""
    release, revision = client
    takes = f"{OLDEST} to {REVISION}" if OLDEST < REVISION else str(REVISION)
    advice = "upgrade the daemon first" if revision > REVISION else "upgrade the client"
    return f"expected revision {takes} of the protocol, the client's is {revision} (release {release}): {advice}"


def check_revision(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Raise FailedPrecondition (PROTOCOL) for a client of an unsupported revision."""
    if why := refusal(tuple(metadata)):
        raise FailedPrecondition("PROTOCOL", why)


async def abort(context: Any, error: Exception, refused: Callable[[str], None]) -> None:
    """End the call with the status of `error`, after calling `refused(reason)`. Always raises.

    The status has an ErrorInfo with the reason. An exception that is no refusal is logged, and becomes INTERNAL without its text.
    """
    reason: str
    if isinstance(error, OSError) and is_refusal(error):
        error = medium_error(error)
    if isinstance(error, DaemonError):
        code, reason, message = error.code, error.reason, str(error)
    elif isinstance(error, ConversionError):
        code, reason, message = grpc.StatusCode.INVALID_ARGUMENT, error.reason, str(error)
    else:
        _log.error("call_failed", exc_info=error)
        code, reason, message = grpc.StatusCode.INTERNAL, "INTERNAL", "the daemon failed: its log has the reason"
    refused(reason)
    message = message if len(message) <= _MESSAGE_CHARACTERS else message[:_MESSAGE_CHARACTERS] + " …"
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    try:
        await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))
    except grpc.aio.AbortError as ended:
        asyncio.get_running_loop().call_soon(_drop_traceback, ended)
        raise


def _drop_traceback(error: BaseException) -> None:
    """Free the frames of a call that has ended, and what they refer to, without a collection of garbage.

    gRPC keeps the exception of `abort` in the call's state, to which these frames refer; so does the future of a step, with the
    exception that the step has raised.
    """
    error.__traceback__ = None
    if error.__context__ is not None:
        _drop_traceback(error.__context__)
