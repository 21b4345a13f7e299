"""What the daemon refuses, and the one place where that becomes a gRPC status.

DaemonError
├── InvalidArgument      what came is malformed, whatever the state
├── NotFound
├── AlreadyExists        the same key with other content
├── FailedPrecondition   right call, wrong time: fenced epoch, missing chunks, layouts that do not tile
├── ResourceExhausted    no room, too many versions STAGING, too many calls of one model or caller
├── DataLoss             bytes that are not the bytes that were sent
├── Unavailable          not now: no version yet, draining
├── DeadlineExceeded     waited as long as asked
├── Unauthenticated      nobody that the daemon knows
└── PermissionDenied     somebody who may not
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import grpc
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.errors import ConversionError

DOMAIN = "resharder"

# docs/protocol.md says when each is sent, and with which status.
Reason = Literal[
    "BOX", "CHECKSUM", "CHUNK", "CHUNK_BYTES", "CHUNK_INDEX", "CHUNK_LENGTH", "CONTROL", "DIGESTS", "DRAINING", "FLEET_MODEL",
    "JOB", "LAYOUT_MISMATCH", "MISSING_CHUNKS", "MODEL_AMBIGUOUS", "MODEL_FILE", "MODEL_NAME", "MODEL_UNKNOWN", "NAME",
    "NOT_REGISTERED", "NO_ROOM", "NO_VERSION", "ORDER", "PAGE_SIZE", "PAGE_TOKEN", "PROTOCOL", "PUBLISHER_UNKNOWN", "RANK",
    "REGISTRATION_FAILED", "RESOURCE_NAME", "SERVER_ELSEWHERE", "SERVER_UNKNOWN", "SLOT_DIFFERS", "STALE_EPOCH", "STEP",
    "TENSORS", "TENSOR_MISMATCH", "TOO_MANY_BOXES", "TOO_MANY_CALLS", "TOO_MANY_STAGING", "UNKNOWN_TENSOR", "VERSION_ABORTED",
    "VERSION_CLOSED", "VERSION_GONE", "VERSION_READY", "VERSION_RETIRED", "VERSION_UNKNOWN", "WAIT_SECONDS", "WORKER",
    "WORLD_SIZE", "STORE_FILESYSTEM", "STORE_LOCKED", "STORE_OWNER",
    "ARCHIVE_FAILED", "KEEP", "NOT_ARCHIVED", "NO_ARCHIVE", "VERSION_DIFFERS",
    "MESSAGE", "MESSAGE_TOO_LARGE", "NOT_ALLOWED", "NO_IDENTITY", "TOKEN_UNKNOWN", "TOO_FAST",
    "MEMORY_UNKNOWN", "NOT_OFFERED", "TOO_MANY_KEYS",
    "CHECK_UNKNOWN", "FLEET_UNKNOWN", "KV_FLEET", "MAX_SKEW", "MOTION", "NOTHING_TO_DECIDE", "NOT_SERVING", "SERVE_AHEAD",
    "NO_EARLIER", "NO_PROFILE", "NO_VERIFICATION", "PAUSE_MODE", "POWER", "PROFILE",
    "UPDATE_MASK", "VERSION", "VERSION_NOT_READY", "WANT",
]  # fmt: skip
_log = structlog.get_logger("resharder.rpc")
_listeners: list[Callable[[str], None]] = []


def on_refusal(listener: Callable[[str], None]) -> None:
    """`listener(reason)` is called for every call that is refused."""
    _listeners.append(listener)


class DaemonError(Exception):
    """The message says what was expected and what came; `reason` is its stable name."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class InvalidArgument(DaemonError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(DaemonError):
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(DaemonError):
    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(DaemonError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(DaemonError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DataLoss(DaemonError):
    code = grpc.StatusCode.DATA_LOSS


class Unavailable(DaemonError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(DaemonError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(DaemonError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(DaemonError):
    code = grpc.StatusCode.PERMISSION_DENIED


def abort(context: grpc.ServicerContext, error: Exception) -> None:
    """Ends the call with the status of `error`. Always raises."""
    reason: str
    if isinstance(error, DaemonError):
        code, reason, message = error.code, error.reason, str(error)
    elif isinstance(error, ConversionError):
        code, reason, message = grpc.StatusCode.INVALID_ARGUMENT, error.reason, str(error)
    else:
        _log.error("call_failed", exc_info=error)
        code, reason, message = grpc.StatusCode.INTERNAL, "INTERNAL", "the daemon failed; its log says why"
    for listener in _listeners:
        listener(reason)
    # Some HTTP/2 peers bound headers to 8 KiB, and the message travels in two of them.
    message = message if len(message) <= 2000 else message[:2000] + " …"
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, message)


class ErrorInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Turns exceptions of every servicer into statuses with an ErrorInfo."""

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        if handler is None:
            return None
        kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        wrap = _wrap_stream if handler.response_streaming else _wrap_unary
        return make(wrap(getattr(handler, kind)), handler.request_deserializer, handler.response_serializer)


def _wrap_unary(behavior: Callable[..., Any]) -> Callable[..., Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return behavior(request, context)
        except grpc.RpcError:  # the peer is gone
            raise
        except Exception as error:
            return abort(context, error)

    return call


def _wrap_stream(behavior: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from behavior(request, context)
        except grpc.RpcError:
            raise
        except Exception as error:
            abort(context, error)

    return call
