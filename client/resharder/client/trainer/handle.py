"""Result of `publish`: a handle of the version, for waits and queries."""

import time
from dataclasses import dataclass

from resharder.client.errors import NotFound, ResharderError, VersionAborted, WaitTimeout
from resharder.client.rpc.channel import Channel, bound
from resharder.converters.failpoints import failpoint
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

State = resources_pb2.Version.State


@dataclass(frozen=True)
class Progress:
    """Progress of a version.

    `sealed_slots` of `slots` ranks have delivered their part; both are 0 once the version is READY. `servers_serving` of the
    `servers_following` servers of the model serve it.
    """

    state: str
    received_bytes: int
    size_bytes: int
    sealed_slots: int
    slots: int
    servers_serving: int
    servers_following: int


class Handle:
    """Published version.

    Attributes:
        name: `models/{model}/versions/{number}`.
        version: Number of the version.
        step: The trainer's label.
        trace: W3C traceparent of the version's trace; empty without traces.
        transport: The way that this rank's bytes took: `shared-memory`, `node`, `http` or `grpc`; empty if it had none to send,
            and with `release="transfer"` until they are sent.
        transport_reason: Why a faster way could not be used; empty if it was, or was not to be used.
        failed: Error of an upload that failed after its `publish` had returned, with `release="transfer"`; else None.
        also: Handles of the versions that are READY together with this one, by model.
    """

    def __init__(self, channel: Channel, version: resources_pb2.Version, transport: str = "", transport_reason: str = "") -> None:
        self._channel = channel
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self.name: str = version.name
        self.version: int = version.number
        self.step: int = version.step
        self.trace: str = version.trace
        self.transport, self.transport_reason = transport, transport_reason
        self.failed: ResharderError | None = None
        self.also: dict[str, Handle] = {}

    def wait_ready(self, timeout: float | None = 600.0) -> None:
        """Wait until the version is READY.

        Args:
            timeout: Bound in seconds; None is no bound.

        Raises:
            VersionAborted: The version ended before READY.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: The daemon has restarted and lost the version.
            DaemonUnreachable: The daemon cannot be reached.
        """
        self._wait(bound(timeout), serving=False)

    def wait_serving(self, timeout: float | None = 600.0) -> None:
        """Wait until every live server of the model serves this version or a newer one.

        Args:
            timeout: Bound in seconds; None is no bound.

        Raises:
            VersionAborted: The version ended before READY.
            WaitTimeout: `timeout` seconds have passed.
            NotFound: The daemon has restarted and lost the version.
            DaemonUnreachable: The daemon cannot be reached.
        """
        self._wait(bound(timeout), serving=True)

    def progress(self) -> Progress:
        """Return the version's state, bytes, sealed slots and servers at present."""
        version = self.get()
        done = version.state in (State.READY, State.RETIRED)
        return Progress(
            state=State.Name(version.state),
            received_bytes=version.size_bytes if done else sum(slot.received_bytes for slot in version.slots),
            size_bytes=version.size_bytes,
            sealed_slots=sum(slot.state == resources_pb2.Slot.SEALED for slot in version.slots),
            slots=len(version.slots),
            servers_serving=version.servers_serving,
            servers_following=version.servers_following,
        )

    def get(self, *, serving: bool = False, wait_seconds: float = 0.0) -> resources_pb2.Version:
        """Return the version as a message, after a wait.

        Args:
            serving: Wait until every live server of the model serves it, rather than until it is READY.
            wait_seconds: Bound on the wait.

        Returns:
            The version, in whatever state it is after the wait.
        """
        request = publisher_pb2.WaitVersionRequest(version=self.name, wait_seconds=wait_seconds, serving=serving)
        version: resources_pb2.Version = self._channel.call(self._stub.WaitVersion, request, timeout=wait_seconds + 30)
        return version

    def is_gone(self) -> bool:
        """Return whether the daemon has lost the version in a restart while it was UPLOADING."""
        try:
            self.get()
        except NotFound:
            return True
        return False

    def is_coming(self) -> bool:
        """Return whether the version is READY or can become READY."""
        try:
            return bool(self.get().state != State.ABORTED)
        except NotFound:
            return False

    def _wait(self, timeout: float, *, serving: bool) -> None:
        end = time.monotonic() + timeout
        while True:
            failpoint("handle.wait")
            version = self.get(serving=serving, wait_seconds=max(0.0, min(20.0, end - time.monotonic())))
            if version.state == State.ABORTED:
                raise VersionAborted(f"{self.name} (step {self.step}) was aborted: {version.reason}")
            if version.state == State.UPLOADING and self.failed is not None:
                raise self.failed
            if version.state == State.RETIRED or (version.state == State.READY and not (serving and behind(version))):
                return
            if time.monotonic() >= end:
                wanted = f"served by all {version.servers_following} servers" if serving else "READY"
                raise WaitTimeout(
                    f"{self.name} (step {self.step}) is not {wanted} after {timeout:g} s: it is {State.Name(version.state)} "
                    f"with {sum(s.state == resources_pb2.Slot.SEALED for s in version.slots)} of {len(version.slots)} slots "
                    f"sealed, {version.servers_serving} servers serving"
                )

    def __repr__(self) -> str:
        return f"Handle({self.name}, step={self.step})"


def behind(version: resources_pb2.Version) -> bool:
    """Return whether some servers of the model do not serve the version yet."""
    return bool(version.servers_serving < version.servers_following)


def delivered(version: resources_pb2.Version, rank: int) -> bool:
    """Return whether the daemon has this rank's slot already, so that only digests are compared."""
    sealed = any(slot.rank == rank and slot.state == resources_pb2.Slot.SEALED for slot in version.slots)
    return bool(version.state != State.UPLOADING or sealed)
