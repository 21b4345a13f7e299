"""Interface of the checks of callers, which `security/access.py` implements."""

from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import grpc
from resharder.server.rpc.methods import Method
from resharder.server.state.errors import DaemonError

C = TypeVar("C", bound="CallerIdentity")


class CallerIdentity(Protocol):
    """Caller of a call, as limits and the log need it."""

    @property
    def name(self) -> str:
        """Name of the caller; its address without security."""

    @property
    def secured(self) -> bool:
        """Whether the identity is verified by a certificate or token."""


class Guard(Protocol[C]):
    """Checks of callers. Every method may raise a DaemonError."""

    def caller(self, context: grpc.ServicerContext) -> C:
        """Identify the caller."""

    def admit(self, method: Method, context: grpc.ServicerContext) -> C:
        """Identify the caller, count the call, and check that one of its roles permits the method."""

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
