"""Identity, permission and limits of callers, for every RPC and the status page."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog
from resharder.server.rpc.methods import BY_PATH, REPLICATE, Cost, Method, Role
from resharder.server.security import identities, rules
from resharder.server.security.files import Pems, Watched, hash_of, read_pems, read_tokens, server_credentials
from resharder.server.security.limits import Limits
from resharder.server.security.redaction import redact
from resharder.server.security.resources import World, model, resource_of
from resharder.server.security.roles import ALL, Grant, Roles
from resharder.server.security.rules import Resource
from resharder.server.security.settings import Security
from resharder.server.state.errors import DaemonError, PermissionDenied, ResourceExhausted, Unauthenticated

SMALL_BYTES = 1 << 20
READ = BY_PATH["/resharder.v1.ServerService/GetManifest"]
DOWNLOAD = BY_PATH["/resharder.v1.ServerService/DownloadChunks"]
UPLOAD = BY_PATH["/resharder.v1.PublisherService/UploadChunks"]
LOOK = BY_PATH["/resharder.v1.OperatorService/ListEvents"]  # the call whose answer the status page shows
_LOG_AGAIN = 60.0  # seconds between log lines about equal refusals
_NEXT_STEP = ("MEMORY_UNKNOWN", "NOT_OFFERED")  # the caller declares its memory, or takes the staged path
_log = structlog.get_logger("resharder.security")


@dataclass(frozen=True)
class Caller:
    """Identified caller. `name` is used for limits and the log.

    `grants` is None without security, when every call is permitted.
    """

    name: str
    grants: tuple[Grant, ...] | None = None

    @property
    def secured(self) -> bool:
        """Whether the caller's identity is verified."""
        return self.grants is not None


class Access:
    """Checks of callers. Thread-safe. The constructor raises SecurityFilesError."""

    def __init__(
        self,
        security: Security | None,
        limits: Limits,
        max_message_bytes: int,
        world: World,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._most, self._world, self._clock = limits, max_message_bytes, world, clock
        self._logged_at: dict[tuple[str, str], float] = {}
        self._roles: Roles | None = None
        self._tokens: Watched[dict[str, str]] | None = None
        if security is not None:
            self._roles = Roles(security.roles)
            if tokens := security.tokens:
                self._tokens = Watched([tokens], lambda: read_tokens(tokens))

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Identify a caller. Raises Unauthenticated (NO_IDENTITY, TOKEN_UNKNOWN)."""
        peer = context.peer()
        if self._roles is None:
            return Caller(peer)
        headers = [str(value) for key, value in context.invocation_metadata() if key == "authorization"]
        return self._known(identities.of_grpc(context.auth_context()), headers, peer.rpartition(":")[0])

    def _known(self, names: Sequence[str], headers: Sequence[str], host: str) -> Caller:
        assert self._roles is not None
        if token := identities.bearer(headers):
            name = self._tokens.value.get(hash_of(token)) if self._tokens else None
            if name is None:
                raise Unauthenticated("TOKEN_UNKNOWN", "the token is not in the daemon's list")
            names = [f"token:{name}", *names]
        if not names:
            raise Unauthenticated(
                "NO_IDENTITY", "the call has neither a client certificate nor a token (authorization: Bearer …)"
            )
        return Caller(f"{names[0]}@{host}", self._roles.of(names))

    def admit(self, method: Method, context: grpc.ServicerContext) -> Caller:
        """Identify the caller, count the call, and check that one of its roles permits the method.

        Raises Unauthenticated (NO_IDENTITY, TOKEN_UNKNOWN), ResourceExhausted (TOO_FAST), PermissionDenied (NOT_ALLOWED).
        """
        caller = self.caller(context) if method.who else Caller(context.peer())
        self._limits.begin(caller.name, method.cost is Cost.RENEWAL)
        if caller.grants is not None and (refusal := rules.lacks_role(caller.grants, method)):
            raise _not_allowed(caller, method, refusal)
        return caller

    def ends_daemon(self, caller: Caller) -> bool:
        """Return whether the daemon ends if the caller names a higher term: that of a node, or of an operator of everything."""
        return caller.grants is None or any(
            grant.role is Role.NODE or (grant.role is Role.OPERATOR and grant.of == ALL) for grant in caller.grants
        )

    def check_size(self, method: Method, size: int) -> None:
        """Check the size of a request. Raises ResourceExhausted (MESSAGE_TOO_LARGE)."""
        most = self._most if method.large else min(self._most, SMALL_BYTES)
        if size > most:
            raise ResourceExhausted("MESSAGE_TOO_LARGE", f"expected a {method.name} request of at most {most} bytes, got {size}")

    def judge(self, caller: Caller, method: Method, request: Any) -> Resource:
        """Check that the caller may make a request, and return the request's resource.

        Raises PermissionDenied (NOT_ALLOWED), ResourceNotFound (SERVER_UNKNOWN), InvalidArgument (MODEL_AMBIGUOUS).
        """
        if caller.grants is None:
            return Resource()
        if method is READ and request.replica:
            method = REPLICATE
        resource = resource_of(method, request, self._world)
        self.decide(caller, method, resource)
        return resource

    def decide(self, caller: Caller, method: Method, resource: Resource) -> None:
        """Check that the caller may make a call about a resource. Raises PermissionDenied (NOT_ALLOWED)."""
        if caller.grants is not None and (refusal := rules.decide(caller.grants, method, resource)):
            raise _not_allowed(caller, method, refusal)

    def open(self, caller: Caller) -> AbstractContextManager[None]:
        """Count a long call while the context lasts. Raises ResourceExhausted (TOO_MANY_CALLS)."""
        return self._limits.open(caller.name)

    def redact(self, caller: Caller, answer: Any) -> None:
        """Remove from an answer, in place, what the caller may not read. A no-op without security."""
        grants = caller.grants
        if grants is None:
            return

        def reads(name: str) -> bool:
            return not rules.decide(grants, READ, model(name, self._world))

        redact(answer, any(grant.role is Role.VIEWER for grant in grants), reads)

    def viewer(self, headers: Sequence[str], certificate: Mapping[str, Any] | None, host: str) -> Caller:
        """Identify an HTTP client by its `Authorization` headers and `SSLSocket.getpeercert()`.

        Raises Unauthenticated (NO_IDENTITY, TOKEN_UNKNOWN), ResourceExhausted (TOO_FAST), PermissionDenied (NOT_ALLOWED).
        """
        caller = self._of_http(headers, certificate, host)
        if caller.grants is not None and (refusal := rules.lacks_role(caller.grants, LOOK)):
            raise PermissionDenied("NOT_ALLOWED", f"{caller.name} may not read the status: {refusal}")
        return caller

    def reading(
        self, headers: Sequence[str], certificate: Mapping[str, Any] | None, host: str, name: str
    ) -> AbstractContextManager[bool]:
        """Admit and count an HTTP client that reads versions of a model, which needs the roles of DownloadChunks.

        The context's value is whether it may read a version that nodes replicate before READY.
        Raises as `viewer` does, and ResourceExhausted (TOO_MANY_CALLS).
        """
        return self._moving(DOWNLOAD, self._of_http(headers, certificate, host), name)

    def writing(
        self, headers: Sequence[str], certificate: Mapping[str, Any] | None, host: str, name: str
    ) -> AbstractContextManager[bool]:
        """Admit and count an HTTP client that writes a version of a model, which needs the roles of UploadChunks.

        Raises as `reading` does.
        """
        return self._moving(UPLOAD, self._of_http(headers, certificate, host), name)

    @contextmanager
    def _moving(self, method: Method, caller: Caller, name: str) -> Iterator[bool]:
        replicates = True
        if caller.grants is not None:
            resource = model(name, self._world)
            self.decide(caller, method, resource)
            replicates = not rules.decide(caller.grants, REPLICATE, resource)
        with self._limits.open(caller.name):
            yield replicates

    def _of_http(self, headers: Sequence[str], certificate: Mapping[str, Any] | None, host: str) -> Caller:
        caller = Caller(host) if self._roles is None else self._known(identities.of_ssl(certificate), headers, host)
        self._limits.begin(caller.name)
        return caller

    def note(self, method: str, peer: str, error: DaemonError) -> None:
        """Log a refused call, at most once a minute for a method and host; not one that leads to the caller's next step."""
        if error.reason in _NEXT_STEP:
            return
        now, key = self._clock(), (method, peer.rpartition(":")[0])
        if now - self._logged_at.get(key, -_LOG_AGAIN) < _LOG_AGAIN:
            return
        if len(self._logged_at) > 1000:
            self._logged_at.clear()
        self._logged_at[key] = now
        _log.warning("call_refused", method=method, peer=peer, reason=error.reason, message=str(error)[:500])


def _not_allowed(caller: Caller, method: Method, refusal: str) -> PermissionDenied:
    return PermissionDenied("NOT_ALLOWED", f"{caller.name} may not call {method.name}: {refusal}")


def watched_pems(security: Security) -> Watched[Pems]:
    """Return the contents of the PEM files, read again when they change. Raises SecurityFilesError."""
    files = (security.certificate, security.key, security.client_ca)
    return Watched([path for path in files if path is not None], lambda: read_pems(*files))


def add_port(server: grpc.Server, listen: str, security: Security | None) -> int:
    """Add a port to a gRPC server. Raises RuntimeError if it cannot listen, SecurityFilesError."""
    if security is None:
        return int(server.add_insecure_port(listen))
    return int(server.add_secure_port(listen, server_credentials(watched_pems(security))))
