"""In front of every call: whether its client speaks a revision of the protocol that this daemon understands."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
from resharder.server.state.errors import FailedPrecondition, abort
from resharder.v1.revision import OLDEST, REVISION, named

_OURS = "/resharder.v1."


def refusal(metadata: tuple[tuple[str, str | bytes], ...]) -> str:
    """Why calls with this metadata are refused; empty for those that may pass, and for clients that are not Resharder's."""
    agent = next((value for key, value in metadata if key == "user-agent"), "")
    client = named(agent if isinstance(agent, str) else "")
    if client is None or OLDEST <= client[1] <= REVISION:
        return ""
    release, revision = client
    takes = f"{OLDEST} to {REVISION}" if OLDEST < REVISION else str(REVISION)
    mend = "upgrade the daemon first" if revision > REVISION else "upgrade the client"
    return f"expected revision {takes} of the protocol, the client's is {revision} (release {release}): {mend}"


class ProtocolInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]
    """Health checks and reflection are for everybody."""

    def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None], details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(details)
        why = refusal(tuple(details.invocation_metadata or ())) if details.method.startswith(_OURS) else ""
        if handler is None or not why:
            return handler
        shape = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
        make = getattr(grpc, f"{shape}_rpc_method_handler")
        return make(_streaming(why) if handler.response_streaming else _unary(why), None, handler.response_serializer)


def _unary(why: str) -> Callable[..., Any]:
    return lambda request, context: abort(context, FailedPrecondition("PROTOCOL", why))


def _streaming(why: str) -> Callable[..., Iterator[Any]]:
    def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        abort(context, FailedPrecondition("PROTOCOL", why))
        yield  # a generator, as gRPC expects it

    return answer
