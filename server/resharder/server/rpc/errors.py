"""Conversion of exceptions to gRPC statuses."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from resharder.converters.errors import ConversionError
from resharder.server.infra.medium import is_refusal, medium_error
from resharder.server.state.errors import DaemonError

DOMAIN = "resharder"
_MESSAGE_CHARACTERS = 2000  # some HTTP/2 peers bound headers to 8 KiB, and the message is in two of them
_log = structlog.get_logger("resharder.rpc")


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
        code, reason, message = grpc.StatusCode.INTERNAL, "INTERNAL", "the daemon failed; its log has the reason"
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
