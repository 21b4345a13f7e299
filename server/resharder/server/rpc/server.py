"""The gRPC server: `grpc.aio` on an event loop in its own thread."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc
from resharder.server.infra.descriptors import log_loop_error
from resharder.server.rpc.dispatch import Dispatcher
from resharder.server.rpc.methods import OURS, SERVICES

OUR_SERVICES = tuple(service for service in SERVICES if service.startswith(OURS))
_RAW_REQUESTS, _RAW_RESPONSES = {"UploadChunks"}, {"DownloadChunks"}  # chunks have frames of their own
AddPort = Callable[[Any], int]


class RpcServer:
    """gRPC server that accepts calls from `start` to `stop`.

    Args:
        dispatcher: Wrapper of all methods, closed with the server.
        services: Each service with the generated function that adds it to a server.
        add_port: Function that binds the address. The constructor raises its errors.
        options: Channel options of gRPC.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        services: Mapping[Any, Callable[[Any, Any], None]],
        add_port: AddPort,
        options: list[tuple[str, Any]],
    ) -> None:
        self._dispatcher = dispatcher
        self._health = health.aio.HealthServicer()
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}
        for service, add in services.items():
            for path, handler in _handlers(service, add).items():
                name = path.rpartition("/")[2]
                parse = None if name in _RAW_REQUESTS else handler.request_deserializer
                serialize = None if name in _RAW_RESPONSES else handler.response_serializer
                shape = (handler.request_streaming, handler.response_streaming)
                self.handlers[path] = dispatcher.handler(path, getattr(service, name), parse, serialize, shape)
        names = (*OUR_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        native = {
            self._health: health_pb2_grpc.add_HealthServicer_to_server,
            reflection.aio.ReflectionServicer(names): reflection_pb2_grpc.add_ServerReflectionServicer_to_server,
        }
        for service, add in native.items():
            for path, handler in _handlers(service, add).items():
                self.handlers[path] = dispatcher.native(path, handler)
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(log_loop_error)
        self._thread = threading.Thread(target=self.loop.run_forever, name="rpc-loop", daemon=True)
        self._thread.start()
        try:
            self._server = self.run(self._make(add_port, options))
        except BaseException:
            self._end_loop()
            raise

    async def _make(self, add_port: AddPort, options: list[tuple[str, Any]]) -> Any:
        server = grpc.aio.server(options=options)
        for service in SERVICES:
            found = {path.rpartition("/")[2]: h for path, h in self.handlers.items() if path.startswith(f"/{service}/")}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, found),))
        add_port(server)
        return server

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop and return its result. Deadlocks on the loop's own thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def start(self) -> None:
        """Accept calls, and report SERVING to health checks."""
        self.run(self._server.start())
        self.report(serving=True)

    def report(self, *, serving: bool) -> None:
        """Report SERVING or NOT_SERVING to health checks. Calls continue."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *OUR_SERVICES):
            self.run(self._health.set(name, state))

    def drain(self) -> None:
        """Report NOT_SERVING to health checks. Calls continue."""
        self.run(self._health.enter_graceful_shutdown())

    def stop(self, grace: float) -> None:
        """End all calls, after at most `grace` seconds."""
        self.run(self._server.stop(grace))
        self._dispatcher.close()
        self._end_loop()

    def _end_loop(self) -> None:
        self.run(self._end_tasks())  # grpc.aio leaves those of calls that end with the server
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Collector:
    """Stand-in for a server that collects the handlers that a generated function adds."""

    def __init__(self) -> None:
        self.handlers: dict[str, grpc.RpcMethodHandler] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


def _handlers(service: Any, add: Callable[[Any, Any], None]) -> dict[str, grpc.RpcMethodHandler]:
    collector = _Collector()
    add(service, collector)
    return collector.handlers
