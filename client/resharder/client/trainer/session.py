"""Registration and lease of one rank, and the versions that it has begun, across restarts of the daemon."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from resharder.client.errors import UNKNOWN_PUBLISHER, DaemonUnreachable, NotFound, ResharderError, UsageError
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.handle import Handle, delivered
from resharder.client.trainer.identity import RankIdentity
from resharder.client.trainer.rank_layout import RankLayout
from resharder.client.trainer.registration import Registration, State, raise_refusal, register
from resharder.client.transport.base import AssignedSlot
from resharder.client.transport.shared_memory import read_nonces
from resharder.converters.failpoints import failpoint
from resharder.v1 import operator_pb2, operator_pb2_grpc, publisher_pb2, publisher_pb2_grpc, resources_pb2

logger = logging.getLogger(__name__)


class PublisherSession:
    """A rank's claim to a model: its registration, the lease, and the newest version to which it has delivered.

    A restarted daemon has lost the registration and every version that was not READY. The rank then registers again with the
    same layout, and aborts versions that can no longer complete.
    """

    def __init__(
        self,
        channel: Channel,
        model: str,
        identity: RankIdentity,
        register_timeout: float,
        *,
        shares: bool = True,
        base: str = "",
    ) -> None:
        """Create a session.

        `shares`: whether the rank may write into files of the daemon or of its host's node. `base`: model that an adapter is
        loaded beside; empty for a model of its own.
        """
        self.identity, self._channel, self._model, self._shares = identity, channel, model, shares
        self._base = base
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._register_timeout = register_timeout
        self._files: Sequence[resources_pb2.ModelFile] = ()
        self._rank_layout: RankLayout | None = None
        self._warnings: Sequence[str] = ()
        self._registration: Registration | None = None
        self._lease: PublisherLease | None = None
        self._attempts = Attempts()
        self._newest: Handle | None = None
        self._lost = ""  # name of the newest version, if a restart of the daemon has lost it
        self._process, self._lock = os.getpid(), threading.RLock()

    @property
    def epoch(self) -> int:
        """Epoch of this job's claim; 0 before a registration."""
        return self._registration.epoch if self._registration else 0

    @property
    def newest(self) -> Handle | None:
        """Newest version that this rank has published."""
        return self._newest

    @property
    def rank_layout(self) -> RankLayout | None:
        """Layout that was registered last."""
        return self._rank_layout

    @property
    def registration(self) -> Registration:
        """Current registration. Raises UsageError before something is attached."""
        if self._registration is None:
            raise UsageError("no model is attached: call attach or attach_tensors first")
        return self._registration

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude other threads while the block runs. Raises UsageError in a forked process, and
        the error that ended the lease.
        """
        if os.getpid() != self._process:
            raise UsageError("this process was forked from the one that called connect: call connect here")
        with self._lock:
            if self._lease is not None and self._lease.lost is not None:
                raise self._lease.lost
            yield

    def register(
        self, files: Sequence[resources_pb2.ModelFile], rank_layout: RankLayout, warnings: Sequence[str] = ()
    ) -> Registration:
        """Register a layout in place of an earlier one. `warnings` are texts for the record of its versions.

        Raises LayoutRejected, OutOfRoom, StaleEpoch and UsageError.
        """
        if not files:
            what = "adapter's" if self._base else "model's"
            raise UsageError(f"the {what} config is missing: pass config to connect, or call attach_config first")
        self._files, self._rank_layout, self._warnings = list(files), rank_layout, list(warnings)
        self._registration = registration = self._registered(rank_layout)
        self._attempts.registered(registration.newest_version)
        if self._lease is not None:
            self._lease.stop()
        self._lease = PublisherLease(
            self._channel, registration, self.identity.rank, self._register_again_if_idle, self.abort_lost
        )
        return registration

    def register_again(self) -> None:
        """Register the same layout with a restarted daemon, which has lost this publisher."""
        if self._rank_layout is None:
            raise UsageError("no model is attached: call attach or attach_tensors first")
        former = self._registration.nonce_files if self._registration is not None else ()
        self._registration = self._registered(self._rank_layout, former)
        if self._lease is not None:
            self._lease.follow(self._registration)
        if self._newest is not None:
            with suppress(ResharderError):
                self._lost = self._newest.name if self._newest.is_gone() else ""

    def _registered(self, rank_layout: RankLayout, former: Sequence[str] = ()) -> Registration:
        return register(
            self._channel,
            self._model,
            self._files,
            self.identity,
            rank_layout,
            shares=self._shares,
            former=former,
            warnings=self._warnings,
            base=self._base,
        )

    def _register_again_if_idle(self) -> None:
        """Register again on the lease's thread, unless a publish is in progress, which registers by itself."""
        if self._lock.acquire(blocking=False):
            try:
                self.register_again()
            finally:
                self._lock.release()

    def assignment(self) -> tuple[AssignedSlot, Sequence[int]]:
        """Return this rank's slot and the registered positions of its boxes, once all ranks have registered.

        Registers again with a daemon that has restarted since this rank's registration.
        """
        end = time.monotonic() + self._register_timeout
        while True:
            try:
                return self.registration.assignment(max(0.0, end - time.monotonic()))
            except NotFound as error:
                if error.reason != UNKNOWN_PUBLISHER or time.monotonic() >= end:
                    raise
            self.register_again()

    def after(self, step: int) -> int:
        """Return `CreateVersionRequest.after` for a step."""
        return self._attempts.after(step)

    def begun(self, step: int, version: resources_pb2.Version) -> None:
        """Record the daemon's answer to the creation of a version, in any state."""
        self._attempts.begun(step, version.number)

    def published(self, handle: Handle) -> None:
        """Record the newest version of this rank."""
        self._newest = handle

    def start_publish(self, step: int) -> None:
        """Abort a version that a restart has lost.

        A lost version of `step` itself is delivered again now, and needs no abort later.
        """
        self.abort_lost()
        if self._newest is not None and self._newest.step == step:
            self._lost = ""

    def abort_lost(self) -> None:
        """Abort versions that can no longer complete.

        They wait for this rank's part of a step that it delivered to a daemon before its restart.
        """
        newest, registration, rank = self._newest, self._registration, self.identity.rank
        if newest is None or registration is None or newest.name != self._lost:
            return
        request = operator_pb2.ListVersionsRequest(model=self._model, page_size=500)
        stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)
        for version in self._channel.call(stub.ListVersions, request).versions:
            same = (version.epoch, version.step) == (registration.epoch, newest.step)
            if same and not delivered(version, rank):
                self.abort(version.name, f"rank {rank} delivered step {newest.step} to a daemon that is gone")

    def abort(self, name: str, reason: str) -> None:
        """Abort a version. Errors are ignored: the daemon also aborts the version when the lease expires."""
        request = publisher_pb2.AbortVersionRequest(version=name, epoch=self.epoch, reason=reason)
        with suppress(ResharderError):
            self._channel.call(self._stub.AbortVersion, request, timeout=5, patience=0)

    def close(self) -> None:
        """Stop renewing the lease."""
        if self._lease is not None:
            self._lease.stop()


class PublisherLease:
    """Thread that renews a rank's lease three times per lease. It retries while the daemon does not answer.

    Args:
        channel: Channel to the daemon.
        registration: Registration whose lease is renewed.
        rank: This rank.
        again: Called if a restarted daemon has lost the publisher.
        renewed: Called after every renewal.

    Attributes:
        lost: Error that ended the lease: a newer job has taken over, or a refusal.
    """

    def __init__(
        self, channel: Channel, registration: Registration, rank: int, again: Callable[[], None], renewed: Callable[[], None]
    ) -> None:
        self.lost: ResharderError | None = None
        self._channel, self._registration, self._rank = channel, registration, rank
        self._again, self._renewed = again, renewed
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resharder-lease", daemon=True)
        self._thread.start()

    def follow(self, registration: Registration) -> None:
        """Renew the lease of a newer registration from now on."""
        self._registration = registration

    def stop(self) -> None:
        """End the thread. The lease then expires."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(max(0.05, self._registration.lease_seconds / 3)):
            failpoint("lease.renew")
            readable = read_nonces(self._registration.nonce_files)
            request = publisher_pb2.RenewLeaseRequest(publisher=self._registration.name, rank=self._rank, readable=readable)
            try:
                publisher = self._channel.call(self._stub.RenewLease, request, timeout=10, patience=0)
                raise_refusal(publisher)
                # The daemon has restarted, and another rank has registered with it.
                if publisher.state == State.REGISTERING and self._registration.complete:
                    self._register_again()
                self._renewed()
            except DaemonUnreachable:
                continue
            except NotFound:
                self._register_again()
            except ResharderError as error:
                self._lose(error)
            except Exception:
                logger.exception("cannot renew the rank's lease, trying again")

    def _register_again(self) -> None:
        if self._stopped.is_set():
            return
        try:
            self._again()
        except DaemonUnreachable:
            return
        except ResharderError as error:
            self._lose(error)

    def _lose(self, error: ResharderError) -> None:
        if not self._stopped.is_set():
            self.lost = error
            self._stopped.set()


class Attempts:
    """Versions that a rank has begun during the life of its process, over restarts of the daemon.

    By them, the daemon distinguishes a retry of a step from a late first attempt.
    """

    def __init__(self) -> None:
        self._first: int | None = None
        self._begun = (-1, 0)  # step, number

    def registered(self, newest: int) -> None:
        """Record a registration.

        Args:
            newest: Number of the model's newest version. Versions up to the first registration belong to earlier processes.
        """
        if self._first is None:
            self._first = newest

    def begun(self, step: int, number: int) -> None:
        """Record that the daemon answered with version `number` of `step`, in any state."""
        self._begun = step, number

    def after(self, step: int) -> int:
        """Return `CreateVersionRequest.after` for a step."""
        begun, number = self._begun
        return max(self._first or 0, number if begun == step else 0)
