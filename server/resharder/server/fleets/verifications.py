"""Requests of operators to verify workers' memory. Workers receive them in the answers to their reports."""

import secrets
import threading
import time
from collections.abc import Callable

from resharder.server.fleets.roster import Roster
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import DeadlineExceeded, FailedPrecondition
from resharder.v1 import resources_pb2

_LOOK = 0.1  # longest pause between checks of the answers, in seconds


class Verifications:
    """Requests for verification, one for each server. A newer request replaces an earlier one. Thread-safe."""

    def __init__(self, roster: Roster, clock: Callable[[], float] = time.monotonic) -> None:
        self._roster, self._clock = roster, clock
        self._lock = threading.Lock()
        self._requests: dict[str, str] = {}  # the last one by server

    def requested(self, server: str) -> str:
        """Return the id of a server's last request, or an empty string."""
        with self._lock:
            return self._requests.get(server, "")

    def take(self, server: str, wait_seconds: float) -> Waiting[list[resources_pb2.Verification]]:
        """Return a verification of each worker, by rank, made after this call.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_SERVING, if workers are missing.
            DeadlineExceeded: NO_VERIFICATION.
        """
        known = self._roster.server(server)
        if not known.complete or known.lost_at is not None:
            raise FailedPrecondition(
                "NOT_SERVING",
                f"expected all {known.world_size} workers of server {server} to report, got {len(known.workers)}"
                + (", and its lease ended" if known.lost_at is not None else ""),
            )
        request, deadline = secrets.token_hex(8), self._clock() + wait_seconds
        with self._lock:
            self._requests[server] = request
        while True:
            seen = self._roster.changed.count
            known = self._roster.server(server)
            answered = [one for one in known.verifications if one.request == request]
            if len(answered) == len(known.workers):
                return answered
            if self.requested(server) != request:
                raise FailedPrecondition("NOT_SERVING", f"another verification of server {server} was asked for: try again")
            if self._clock() > deadline:
                raise DeadlineExceeded(
                    "NO_VERIFICATION",
                    f"expected {len(known.workers)} workers of server {server} to verify in {wait_seconds:g} s, "
                    f"{len(answered)} have",
                )
            yield self._roster.changed.pause(seen, _LOOK)
