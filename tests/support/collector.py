"""An OpenTelemetry collector on the loopback that keeps spans received over OTLP/gRPC in memory.

with Collector() as collector:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    collector.wait_for(lambda spans: len(spans) == 3, "three spans")
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.support.observing import wait_until


@dataclass(frozen=True)
class Span:
    """Received span. Times are in nanoseconds; `links` are pairs of trace id and span id."""

    service: str
    trace: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: dict[str, str | int]
    error: str | None
    links: tuple[tuple[str, str], ...]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for group in request.resource_spans:
                service = {a.key: a.value.string_value for a in group.resource.attributes}["service.name"]
                self._spans += [_span(service, span) for scope in group.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def wait_for(self, holds: Callable[[list[Span]], bool], what: str) -> list[Span]:
        try:
            wait_until(lambda: holds(self.spans), what)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; there are {[(s.trace[:4], s.name, s.attributes) for s in self.spans]}") from None
        return self.spans

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.stop(None).wait()


def _span(service: str, span: trace_pb2.Span) -> Span:
    return Span(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {a.key.removeprefix("resharder."): a.value.string_value or a.value.int_value for a in span.attributes},
        span.status.message if span.status.code == trace_pb2.Status.STATUS_CODE_ERROR else None,
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )
