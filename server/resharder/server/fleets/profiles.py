"""Profiles on their way from workers to the operator who asked: kept while he waits, and nowhere else."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from resharder.server.fleets.fleets import Fleets
from resharder.server.state.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from resharder.server.state.server import InstallState
from resharder.v1 import resources_pb2

MAX_BYTES = 64 << 20  # of one worker's
_LOOK = 0.1  # seconds; between looks whether the install has ended and the operator is still there


@dataclass
class _Waiting:
    """`missing`: ranks whose profile has not come."""

    missing: set[int]
    arrived: queue.SimpleQueue[resources_pb2.Profile] = field(default_factory=queue.SimpleQueue)

    def next(self) -> resources_pb2.Profile | None:
        """None: none has come for a while."""
        try:
            return self.arrived.get(timeout=_LOOK)
        except queue.Empty:
            return None


class Profiles:
    """Thread-safe. `_lock` comes before the fleets'."""

    def __init__(self, fleets: Fleets) -> None:
        self._fleets = fleets
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], _Waiting] = {}  # by server and install

    def take(self, server: str, wait_seconds: float, alive: Callable[[], bool]) -> Iterator[resources_pb2.Profile]:
        """Has the server install what it serves once more, and yields what its workers say of it; ends when the install has.

        Raises NotFound (SERVER_UNKNOWN), FailedPrecondition (NOT_SERVING), DeadlineExceeded (NO_PROFILE).
        """
        deadline = time.monotonic() + wait_seconds

        def wait_for(what: str) -> None:
            if time.monotonic() > deadline or not alive():
                raise DeadlineExceeded("NO_PROFILE", what)

        with self._lock:  # a profile must not come before it is waited for
            install, workers = self._fleets.reinstall(server)
            waiting = self._waiting[server, install] = _Waiting(set(range(workers)))
        try:
            for left in range(workers, 0, -1):
                while (profile := waiting.next()) is None:
                    self._ended(server, install)
                    wait_for(f"{left} workers of server {server} have not said how they spent {install}")
                yield profile
            while not self._ended(server, install):
                wait_for(f"server {server} has not ended {install}")
                time.sleep(_LOOK)
        finally:
            with self._lock:
                del self._waiting[server, install]

    def _ended(self, server: str, install: str) -> bool:
        """Raises FailedPrecondition (NOT_SERVING) where it failed."""
        known = self._fleets.server(server)
        if (ended := known.ended) is not None and ended.id == install and ended.state == InstallState.FAILED:
            raise FailedPrecondition("NOT_SERVING", f"the install that was to be profiled failed: {ended.error}")
        return known.install is None or known.install.id != install or not known.install.active

    def put(self, server: str, profile: resources_pb2.Profile) -> None:
        """Lets go of one that nobody waits for. Raises InvalidArgument (PROFILE)."""
        if len(profile.trace) + len(profile.table) > MAX_BYTES:
            raise InvalidArgument("PROFILE", f"expected a profile of at most {MAX_BYTES} bytes, got {profile.ByteSize()}")
        with self._lock:
            waiting = self._waiting.get((server, profile.install))
            if waiting is not None and profile.rank in waiting.missing:
                waiting.missing.discard(profile.rank)
                waiting.arrived.put(profile)
