"""Errors of calls; `rpc/dispatch.py` converts them to gRPC statuses.

DaemonError
├── InvalidArgument      malformed request, in any state
├── ResourceNotFound     no such model, version, publisher, server, fleet, …
├── AlreadyExists        same key with different content
├── FailedPrecondition   not possible in this state: fenced epoch, missing chunks, layouts that do not tile
├── ResourceExhausted    no capacity: store, medium, descriptors, UPLOADING versions, calls
├── DataLoss             received bytes differ from those sent
├── Unavailable          try again: no version yet, draining, failing medium
├── DeadlineExceeded     not done within the requested time
├── Unauthenticated      unknown caller
└── PermissionDenied     no role for the call
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import grpc

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

# docs/errors.md lists when each is sent, and with which status.
Reason = Literal[
    "BASE", "BOX", "CHECKSUM", "CHUNK", "CHUNK_BYTES", "CHUNK_INDEX", "CHUNK_LENGTH", "CONTROL", "DAEMON_REPLACED",
    "DIGESTS", "DRAINING", "FLEET_MODEL",
    "JOB", "LAYOUT_MISMATCH", "MAXIMA", "MAXIMA_MISSING", "MISSING_CHUNKS", "MODEL_AMBIGUOUS", "MODEL_FILE",
    "MODEL_NAME", "MODEL_UNKNOWN", "NAME",
    "NOT_REGISTERED", "NO_ROOM", "NO_VERSION", "ORDER", "PAGE_SIZE", "PAGE_TOKEN", "PROTOCOL", "PUBLISHER_UNKNOWN", "RANK",
    "REGISTRATION_FAILED", "RESOURCE_NAME", "SERVER_ELSEWHERE", "SERVER_LEFT", "SERVER_UNKNOWN", "SLOT_DIFFERS",
    "STALE_EPOCH", "STEP",
    "TENSORS", "TENSOR_MISMATCH", "TOO_MANY_BOXES", "TOO_MANY_CALLS", "TOO_MANY_UPLOADING", "UNKNOWN_TENSOR", "VERSION_ABORTED",
    "VERSION_CLOSED", "VERSION_GONE", "VERSION_READY", "VERSION_RETIRED", "VERSION_UNKNOWN", "WAIT_SECONDS", "WORKER",
    "WORLD_SIZE", "NO_DESCRIPTORS",
    "STORE_FAILED", "STORE_FULL", "STORE_FILESYSTEM", "STORE_IN_USE", "STORE_LOCKED", "STORE_OWNER",
    "ARCHIVE_FAILED", "KEEP", "NOT_ARCHIVED", "NO_ARCHIVE", "READ_ONLY", "VERSION_DIFFERS",
    "MESSAGE", "MESSAGE_TOO_LARGE", "NOT_ALLOWED", "NO_IDENTITY", "TOKEN_UNKNOWN", "TOO_FAST",
    "MEMORY_UNKNOWN", "NOT_OFFERED", "TOO_MANY_KEYS",
    "BASE_BINDING", "BASE_SERVER",
    "CHECK_UNKNOWN", "FLEET_UNKNOWN", "KV_FLEET", "MAX_SKEW", "STRATEGY", "NOTHING_TO_DECIDE", "NOT_SERVING", "SERVE_AHEAD",
    "NO_EARLIER", "NO_PROFILE", "NO_VERIFICATION", "PAUSE_MODE", "POWER", "PROFILE",
    "NODE", "NODE_REPLACED", "NODE_UNKNOWN", "PIECES_ELSEWHERE", "REGISTRY_WANTED", "SNAPSHOTS_DIFFER",
    "FLEET_IN_USE", "NOT_LOST", "UPDATE_MASK", "VERSION", "VERSION_NOT_READY", "TARGET",
]  # fmt: skip


class DaemonError(Exception):
    """Refusal of a call.

    The message states what was expected and what came; clients match on `reason`, which is stable across releases. `code` is the
    gRPC status of each subclass.
    """

    code = grpc.StatusCode.INTERNAL

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class InvalidArgument(DaemonError):
    """Malformed request. The same request fails in every state of the daemon."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class ResourceNotFound(DaemonError):
    """Request that names a resource which does not exist, or no longer exists."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(DaemonError):
    """Request that repeats an earlier one with different content."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(DaemonError):
    """Request that is not possible in the current state."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhausted(DaemonError):
    """Request for which a bound leaves no capacity: of the store, its medium, descriptors, or calls."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DataLoss(DaemonError):
    """Received or stored bytes that differ from those sent."""

    code = grpc.StatusCode.DATA_LOSS


class Unavailable(DaemonError):
    """Temporary failure. The same request may succeed later."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(DaemonError):
    """Condition that was not met within the seconds that the request allows."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Unauthenticated(DaemonError):
    """Call without a known identity."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(DaemonError):
    """Call for which the caller has no role."""

    code = grpc.StatusCode.PERMISSION_DENIED


def unknown_server(id: str) -> ResourceNotFound:
    """Return the error for an id that no server has claimed since the daemon started, or whose server was dropped."""
    return ResourceNotFound("SERVER_UNKNOWN", f"server {id!r} is unknown: it has to claim its id first")


def unknown_value(enumeration: "EnumTypeWrapper", value: int, what: str) -> str:
    """Return why a value is none of an enumeration of the protocol; empty if it is one, and not 0."""
    if value and value in enumeration.values():
        return ""
    names = listed(name for name, number in enumeration.items() if number)
    return f"expected {what} of {names}, got {value}"


def listed(values: Iterable[object], most: int = 20) -> str:
    """Return values as text for a message: "1, 2, 3", or "none"; after `most` values, the number of the others."""
    texts = [str(value) for value in values]
    others = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + others or "none"
