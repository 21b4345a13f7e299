"""Errors that clients of the daemon raise: one tree.

ResharderError
├── UsageError            the call itself cannot work: a missing argument, a wrong index, a folder that is not empty
├── DaemonUnreachable     no answer within the time given
├── WaitTimeout           the daemon answers, but the wait (for a version, for other ranks) has ended without a result
├── Refused               the daemon refuses; `reason` is the cause
│   ├── LayoutRejected    the slots do not tile the model, or one of them is invalid
│   ├── StaleEpoch        a newer job has claimed the model: this one can no longer write
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
└── ConversionError       a model, layout or checkpoint that cannot be converted; also a ValueError
    ├── LayoutError       a layout with a hole, an overlap, or a shape that does not fit
    ├── ReplicasDiffer    ranks hold different values of the same elements
    ├── UnknownTensor     a name that the model's table, or its checkpoint, lacks
    └── UnsupportedModel  an architecture or parallel layout that is not verified
"""

import re

import grpc
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.errors import (
    ConversionError,
    LayoutError,
    ReplicasDiffer,
    ResharderError,
    UnknownTensor,
    UnsupportedModel,
)

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
    reason = "USAGE"


class DaemonUnreachable(ResharderError):
    reason = "UNREACHABLE"


class WaitTimeout(ResharderError):
    reason = "TIMEOUT"


class Refused(ResharderError):
    reason = "REFUSED"


class LayoutRejected(Refused):
    reason = "LAYOUT_MISMATCH"


class StaleEpoch(Refused):
    reason = "STALE_EPOCH"


class Conflict(Refused):
    reason = "CONFLICT"


class OutOfRoom(Refused):
    reason = "NO_ROOM"


class StoreFailed(Refused):
    reason = "STORE_FAILED"


class MessageTooLarge(Refused):
    reason = "MESSAGE_TOO_LARGE"


class AccessDenied(Refused):
    reason = "NOT_ALLOWED"


class NotFound(Refused):
    reason = "NOT_FOUND"


class CorruptData(Refused):
    reason = "CHECKSUM"


class VersionAborted(ResharderError):
    reason = "ABORTED"


class StaleParameters(ResharderError):
    reason = "STALE_PARAMETERS"


class ServersNotAsleep(ResharderError):
    reason = "NOT_ASLEEP"


class GenerationEnded(ResharderError):
    reason = "GENERATION_ENDED"


TOO_FAST = "TOO_FAST"
TOO_MANY_CALLS = "TOO_MANY_CALLS"
TOO_MANY_UPLOADING = "TOO_MANY_UPLOADING"
NO_VERSION = "NO_VERSION"
UNREGISTERED = ("PUBLISHER_UNKNOWN", "NOT_REGISTERED")

_BY_REASON: dict[str, type[ResharderError]] = {
    "STALE_EPOCH": StaleEpoch,
    "LAYOUT_MISMATCH": LayoutRejected,
    "TENSOR_MISMATCH": LayoutRejected,
    "NOT_REGISTERED": WaitTimeout,
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


# gRPC's own refusal, which it makes before the daemon sees the message.
_TOO_LARGE = re.compile(r"(?:Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")


def error_of(error: grpc.RpcError, endpoint: str) -> ResharderError:
    """The typed form of a failed call."""
    code, details = error.code(), error.details() or ""
    reason = reason_of(error)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not reason and (found := _TOO_LARGE.search(details)):
        size, limit = found.groups()
        return MessageTooLarge(
            f"expected a message of at most {limit} bytes, the limit of the daemon at {endpoint}, got {size}: "
            f"start it with RESHARDERD_MAX_MESSAGE_BYTES={size} or more, or split the model over more ranks"
        )
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, Refused)
    if kind is DaemonUnreachable and not reason:
        return DaemonUnreachable(
            f"expected a Resharder daemon at {endpoint}, got {code.name}: {details}; is resharderd running there, and do its "
            "TLS and this client's (RESHARDER_TLS_CA, _CERT, _KEY) fit?"
        )
    return kind(f"{details} [{reason or code.name}]", reason or code.name)


def refusal(name: str, said: str) -> ResharderError:
    """The typed form of a resource's `REASON: message`."""
    reason, _, message = said.partition(": ")
    return _BY_REASON.get(reason, Refused)(f"{name}: {message} [{reason}]", reason)


def reason_of(error: grpc.RpcError) -> str:
    """The reason of the google.rpc.ErrorInfo in the call's trailing metadata; empty if there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info) and info.domain == DOMAIN:
                    return str(info.reason)
    return ""
