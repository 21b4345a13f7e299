"""Operators' requests to a server's workers: to verify their memory, and to profile an install. The answers are never stored."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from resharder.server.fleets.fleets import Fleets
from resharder.server.infra.change_signal import ChangeSignal, Pause, Waiting
from resharder.server.state.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from resharder.v1 import resources_pb2

MAX_BYTES = 64 << 20  # of one worker's profile
_LOOK = 0.1  # longest pause between checks of the answers, and of the operator's connection, in seconds


class Verifications:
    """Requests for verification, one for each server. A newer request replaces an earlier one. Thread-safe."""

    def __init__(self, fleets: Fleets, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleets, self._clock = fleets, clock
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
        known = self._fleets.server(server)
        if not known.complete or known.lost_at is not None:
            raise FailedPrecondition(
                "NOT_SERVING",
                f"{len(known.workers)} of {known.world_size} workers of server {server} have reported"
                + (", and its lease ended" if known.lost_at is not None else ""),
            )
        request, deadline = secrets.token_hex(8), self._clock() + wait_seconds
        with self._lock:
            self._requests[server] = request
        while True:
            seen = self._fleets.changed.count
            known = self._fleets.server(server)
            answered = [one for one in known.verifications if one.request == request]
            if len(answered) == len(known.workers):
                return answered
            if self.requested(server) != request:
                raise FailedPrecondition("NOT_SERVING", f"another verification of server {server} was asked for: try again")
            if self._clock() > deadline:
                raise DeadlineExceeded(
                    "NO_VERIFICATION",
                    f"{len(answered)} of {len(known.workers)} workers of server {server} have verified after {wait_seconds:g} s",
                )
            yield self._fleets.changed.pause(seen, _LOOK)


@dataclass
class _Waiting:
    """Request that waits. `missing` has the ranks without a profile yet."""

    missing: set[int]
    arrived: deque[resources_pb2.Profile] = field(default_factory=deque)
    changed: ChangeSignal = field(default_factory=ChangeSignal)


class Profiles:
    """Requests for profiles. Thread-safe. Lock order: `_lock` before the fleets'."""

    def __init__(self, fleets: Fleets, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleets, self._clock = fleets, clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], _Waiting] = {}  # by server and install

    def take(self, server: str, wait_seconds: float) -> Iterator[resources_pb2.Profile | Pause]:
        """Order a server to repeat its install, and yield its workers' profiles until the install ends.

        Raises:
            ResourceNotFound: SERVER_UNKNOWN.
            FailedPrecondition: NOT_SERVING.
            DeadlineExceeded: NO_PROFILE.
        """
        deadline = self._clock() + wait_seconds
        with self._lock:  # before a profile can arrive
            install, workers = self._fleets.reinstall(server)
            waiting = self._waiting[server, install] = _Waiting(set(range(workers)))
        try:
            left = workers
            while left or not self._ended(server, install):
                seen = waiting.changed.count
                while waiting.arrived:
                    left -= 1
                    yield waiting.arrived.popleft()
                if left:
                    self._ended(server, install)
                if self._clock() > deadline:
                    missing = f"{left} workers of server {server} have not reported a profile of {install}"
                    raise DeadlineExceeded("NO_PROFILE", missing if left else f"server {server} has not ended {install}")
                yield waiting.changed.pause(seen, _LOOK)
        finally:
            with self._lock:
                del self._waiting[server, install]

    def _ended(self, server: str, install: str) -> bool:
        """Return whether the install has ended. Raises FailedPrecondition (NOT_SERVING) if it failed."""
        known = self._fleets.server(server)
        if (ended := known.ended) is not None and ended.id == install and ended.state == resources_pb2.Install.FAILED:
            raise FailedPrecondition("NOT_SERVING", f"the install that was to be profiled failed: {ended.error}")
        return known.install is None or known.install.id != install or not known.install.active

    def put(self, server: str, profile: resources_pb2.Profile) -> None:
        """Pass a worker's profile to the request that waits for it, if any. Raises InvalidArgument (PROFILE)."""
        if len(profile.trace) + len(profile.table) > MAX_BYTES:
            raise InvalidArgument("PROFILE", f"expected a profile of at most {MAX_BYTES} bytes, got {profile.ByteSize()}")
        with self._lock:
            waiting = self._waiting.get((server, profile.install))
            if waiting is not None and profile.rank in waiting.missing:
                waiting.missing.discard(profile.rank)
                waiting.arrived.append(profile)
                waiting.changed.emit()
