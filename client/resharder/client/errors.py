"""Errors that clients of the daemon raise, as one tree.

ResharderError
├── UsageError            invalid use: a missing argument, a wrong index, a folder that is not empty
├── DaemonUnreachable     no answer within the time given
├── WaitTimeout           the daemon answers, but the wait (for a version, for other ranks) has ended without a result
├── Refused               the daemon refuses; `reason` is the cause
│   ├── LayoutRejected    the slots do not tile the model, or one of them is invalid
│   ├── StaleEpoch        a newer job has taken over the model: this one can no longer write
│   ├── Conflict          it exists with other content: other bytes of (epoch, step), another registration of this rank
│   ├── OutOfRoom         the store has no capacity for the model, its medium is full, or too many versions are UPLOADING
│   ├── StoreFailed       a file operation of the daemon failed; it may succeed when the medium works again
│   ├── MessageTooLarge   one message exceeds the daemon's bound: a registration of very many tensors
│   ├── AccessDenied      no valid certificate or token, or one without the role
│   ├── NotFound          no such model, version, publisher or server
│   └── CorruptData       received bytes differ from those sent
├── VersionAborted        the version will never be READY
├── StaleParameters       this rank's parameters are older than those of other ranks
├── ServersNotAsleep      a generation has ended, and servers may still occupy the GPUs: parameters were not brought back
├── GenerationEnded       another rank has left the generation with an error
├── NotServed             a version is published, and a server does not serve it
└── ConversionError       a model, layout or checkpoint that cannot be converted; also a ValueError
    ├── LayoutError       a layout with a hole or an overlap, or a tensor whose shape or dtype does not fit
    ├── ReplicasDiffer    ranks with different values of the same elements
    ├── UnknownTensor     a tensor name that the model's table or the checkpoint lacks
    └── UnsupportedModel  an architecture or parallel layout that is not verified
"""

import re
from http import HTTPStatus

import grpc
from google.rpc import error_details_pb2, status_pb2
from resharder.client.rpc.reachability import cause_of
from resharder.converters.errors import (
    ConversionError,
    LayoutError,
    ReplicasDiffer,
    ResharderError,
    UnknownTensor,
    UnsupportedModel,
)
from resharder.converters.printable import printable
from resharder.converters.wire.endpoint import PROXY, proxy_address

__all__ = [
    "AccessDenied",
    "Conflict",
    "ConversionError",
    "CorruptData",
    "DaemonUnreachable",
    "GenerationEnded",
    "LayoutError",
    "LayoutRejected",
    "MessageTooLarge",
    "NotFound",
    "NotServed",
    "OutOfRoom",
    "Refused",
    "ReplicasDiffer",
    "ResharderError",
    "ServersNotAsleep",
    "StaleEpoch",
    "StaleParameters",
    "StoreFailed",
    "UnknownTensor",
    "UnsupportedModel",
    "UsageError",
    "VersionAborted",
    "WaitTimeout",
]

DOMAIN = "resharder"


class UsageError(ResharderError):
    """Invalid use of the API: a missing argument, a wrong index, a folder that is not empty."""

    reason = "USAGE"


class DaemonUnreachable(ResharderError):
    """No answer of the daemon within the time given. The call may be repeated."""

    reason = "UNREACHABLE"


class WaitTimeout(ResharderError):
    """The daemon answered, but the wait ended without a result; the same wait may succeed later."""

    reason = "TIMEOUT"


class Refused(ResharderError):
    """The daemon refused the call; `reason` is its reason (docs/errors.md). Also raised for reasons
    without a class of their own.
    """

    reason = "REFUSED"


class LayoutRejected(Refused):
    """The slots of all ranks do not tile the model, or a rank's slot is invalid. The message names the tensor."""

    reason = "LAYOUT_MISMATCH"


class StaleEpoch(Refused):
    """A newer job has taken over the model; this job can no longer write."""

    reason = "STALE_EPOCH"


class Conflict(Refused):
    """The resource exists with other content: other bytes of (epoch, step), or another registration of this rank."""

    reason = "CONFLICT"


class OutOfRoom(Refused):
    """The store has no capacity for the model, its medium is full, or too many versions are UPLOADING."""

    reason = "NO_ROOM"


class StoreFailed(Refused):
    """A file operation of the daemon failed. It may succeed when the medium works again."""

    reason = "STORE_FAILED"


class MessageTooLarge(Refused):
    """One message exceeds the daemon's bound, as may a registration of very many tensors."""

    reason = "MESSAGE_TOO_LARGE"


class AccessDenied(Refused):
    """No valid certificate or token, or one without the role that the call needs."""

    reason = "NOT_ALLOWED"


class NotFound(Refused):
    """No such model, version, publisher or server."""

    reason = "NOT_FOUND"


class CorruptData(Refused):
    """Received bytes differ from those sent. Nothing is changed."""

    reason = "CHECKSUM"


class VersionAborted(ResharderError):
    """The version ended before READY and will never be READY."""

    reason = "ABORTED"


class StaleParameters(ResharderError):
    """This rank's parameters are older than those of other ranks (megatron-core's `overlap_param_gather`)."""

    reason = "STALE_PARAMETERS"


class ServersNotAsleep(ResharderError):
    """A generation has ended while servers may still occupy the GPUs. Parameters were not brought back."""

    reason = "NOT_ASLEEP"


class GenerationEnded(ResharderError):
    """Another rank has left the generation with an error."""

    reason = "GENERATION_ENDED"


class NotServed(ResharderError):
    """A version is published, and a server does not serve it: refused, failed, or not in time."""

    reason = "NOT_SERVED"


TOO_FAST = "TOO_FAST"
TOO_MANY_CALLS = "TOO_MANY_CALLS"
TOO_MANY_UPLOADING = "TOO_MANY_UPLOADING"
NO_VERSION = "NO_VERSION"
MAXIMA_MISSING = "MAXIMA_MISSING"
DAEMON_REPLACED = "DAEMON_REPLACED"
DATA_PORT = "DATA_PORT"
"""Reason of errors of a read: the daemon answers, and its data port cannot be reached, or answers something else."""
UNKNOWN_PUBLISHER = "PUBLISHER_UNKNOWN"
UNREGISTERED = (UNKNOWN_PUBLISHER, "NOT_REGISTERED")

_BY_REASON: dict[str, type[ResharderError]] = {
    "STALE_EPOCH": StaleEpoch,
    "LAYOUT_MISMATCH": LayoutRejected,
    "TENSOR_MISMATCH": LayoutRejected,
    "NOT_REGISTERED": WaitTimeout,
    MAXIMA_MISSING: WaitTimeout,
    "NO_PROFILE": WaitTimeout,
    "NO_VERIFICATION": WaitTimeout,
    "NO_ROOM": OutOfRoom,
    NO_VERSION: WaitTimeout,
    TOO_MANY_CALLS: WaitTimeout,
    TOO_FAST: WaitTimeout,
    "STORE_FAILED": StoreFailed,
    "MESSAGE_TOO_LARGE": MessageTooLarge,
    "VERSION_ABORTED": VersionAborted,
}
_BY_CODE: dict[grpc.StatusCode, type[ResharderError]] = {
    grpc.StatusCode.UNAVAILABLE: DaemonUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DaemonUnreachable,
    grpc.StatusCode.ALREADY_EXISTS: Conflict,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OutOfRoom,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: AccessDenied,
    grpc.StatusCode.PERMISSION_DENIED: AccessDenied,
    grpc.StatusCode.DATA_LOSS: CorruptData,
}


_BY_STATUS: dict[int, type[ResharderError]] = {
    HTTPStatus.UNAUTHORIZED: AccessDenied,
    HTTPStatus.FORBIDDEN: AccessDenied,
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.UNPROCESSABLE_ENTITY: CorruptData,
}


# Message of gRPC itself, which refuses the call before it reaches the daemon's code.
_TOO_LARGE = re.compile(r"(?:Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")


def error_of(error: grpc.RpcError, endpoint: str) -> ResharderError:
    """Return the typed form of a failed call to the daemon at `endpoint`."""
    code, details = error.code(), printable(error.details() or "")  # names and reasons of others: they end in logs and tracebacks
    reason = reason_of(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason and (found := _TOO_LARGE.search(details)):
        size, limit = found.groups()
        return MessageTooLarge(
            f"expected a message of at most {limit} bytes, the limit of the daemon at {endpoint}, got {size}: "
            f"start it with RESHARDERD_MAX_MESSAGE_BYTES={size} or more, or split the model over more ranks"
        )
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, Refused)
    if kind is DaemonUnreachable and not reason:
        proxy = proxy_address()
        what, hint = cause_of(details, proxy)
        through = f" through the proxy {proxy} ({PROXY})" if proxy else ""
        return DaemonUnreachable(f"cannot reach a Resharder daemon at {endpoint}{through}: {code.name}: {what}; {hint}")
    return kind(f"{details} [{reason or code.name}]", reason or code.name)


def refusal(name: str, text: str) -> ResharderError:
    """Return the typed form of a resource's `REASON: message`; `name` is the resource's."""
    reason, _, message = printable(text).partition(": ")
    return _BY_REASON.get(reason, Refused)(f"{name}: {message} [{reason}]", reason)


def refusal_of_port(text: str, status: int, reason: str) -> ResharderError:
    """Return the typed form of a refusal of the daemon's data port: of its HTTP status, and the reason that it names, or none."""
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(status, Refused)
    return kind(printable(text), reason or DATA_PORT)


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of the google.rpc.ErrorInfo in the call's trailing metadata; an empty string if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return str(info.reason)
    return ""
