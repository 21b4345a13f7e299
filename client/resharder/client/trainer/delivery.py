"""Delivery of one rank's part of a version: create, offer, transfer, seal.

    CreateVersion -> servers may read the rank's memory (direct path) -> the transport delivers the slot's boxes -> SealSlot

A daemon that restarts loses versions that were not READY. A delivery that gets `NotFound` starts over, a few times.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING

from resharder.client import tracing
from resharder.client.errors import (
    TOO_MANY_UPLOADING,
    UNREGISTERED,
    NotFound,
    OutOfRoom,
    ResharderError,
    VersionAborted,
    WaitTimeout,
)
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.handle import Handle, State, delivered
from resharder.client.trainer.session import PublisherSession
from resharder.client.trainer.unchanged import FrozenBoxes
from resharder.client.transport.base import AssignedSlot, Delivered, LiveItems
from resharder.client.transport.host_buffers import digests_of
from resharder.client.transport.selection import TransportSelector, home_of
from resharder.converters.failpoints import failpoint
from resharder.converters.wire.backoff import Backoff
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    import torch
    from resharder.client.direct.sender import Offering, Sender
    from resharder.client.trainer.transfer_copy import BackgroundUpload, TransferCopy
    from resharder.client.transport.base import Item
    from resharder.converters.geometry.layout import Layout

    Read = Callable[[Sequence[int]], Iterable[Item]]
    """Function from positions in the rank's layout to items."""


DEFAULT_WAIT = 2.0
"""Seconds for which a version is held for servers, if `connect` was given no `direct_wait`."""
_LONGEST_HOLD = 30.0  # seconds until a rank ends such an offer itself; the daemon has shorter bounds
_RESTARTS = 3
_REPORT_SECONDS = 5.0  # of a report of files
logger = logging.getLogger(__name__)

Prepare = Callable[[resources_pb2.Version], None]
"""Called with a version before its tensors are read."""

Check = Callable[[], None]
"""Called before the tensors of a version are offered and read. Raises ResharderError if they cannot be."""

Wake = Callable[[Handle], None]
"""Called with a version that this rank has delivered, while its memory is still offered: wakes the servers that take it."""

Then = Callable[[Handle], None]
"""Called at the same time: delivers the versions of other models that are READY together with it."""


def sender_of(
    channel: Channel,
    rank: int,
    layout: "Layout",
    tensors: "Mapping[str, torch.Tensor]",
    direct_wait: float | None,
    frozen: Collection[str] = (),
) -> "Sender | None":
    """Return the sender of a rank's memory on the direct path; None if `direct_wait` is 0."""
    if direct_wait is not None and direct_wait <= 0:
        return None
    from resharder.client.direct.sender import Sender

    return Sender(channel, rank, layout, tensors, chooses=direct_wait is None, frozen=frozen)


def transfer_copy() -> "TransferCopy":
    """Return a copy without a buffer yet. Imports torch."""
    from resharder.client.trainer.transfer_copy import TransferCopy

    return TransferCopy()


class Delivery:
    """Deliveries of the attached tensors.

    Args:
        channel: Channel to the daemon.
        session: This rank's registration.
        transports: Transports to the daemon's store.
        sender: Offers versions on the direct path; None without one.
        staging_timeout: Seconds to wait for capacity among UPLOADING versions.
        direct_wait: Seconds that an offer may outlast READY. None offers versions to servers of this host, and to those with
            a fast link to it, that take them before READY, for `DEFAULT_WAIT` at most.
        check: Checks the model's tensors before each version; None without a model.
        prepare: Makes the tensors of a version before they are offered and read; None if they are ready.
        copy: Copy from which versions are uploaded while the trainer goes on; None to upload from the tensors themselves.
    """

    def __init__(
        self,
        channel: Channel,
        session: PublisherSession,
        transports: TransportSelector,
        sender: "Sender | None",
        *,
        staging_timeout: float,
        direct_wait: float | None,
        check: Check | None = None,
        prepare: Prepare | None = None,
        copy: "TransferCopy | None" = None,
    ) -> None:
        self._channel, self._session, self._transports, self._sender = channel, session, transports, sender
        self._copy, self._frozen = copy, FrozenBoxes(channel)
        self._upload: BackgroundUpload | None = None
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._staging_timeout, self._direct_wait = staging_timeout, direct_wait
        self._check, self._prepare = check, prepare

    @property
    def offers_to_all(self) -> bool:
        """Whether versions are offered on the direct path to all servers, because `direct_wait` is given."""
        return self._sender is not None and self._direct_wait is not None

    def declare(self) -> None:
        """Declare the memory of a new registration for the direct path, if there is one."""
        if self._sender is None:
            return
        try:
            self._sender.declare(self._session.registration.name)
        except ResharderError as error:
            if self._direct_wait is not None:
                raise
            logger.warning("servers take the staged path, for the direct path is not available: %s", error)
            self._close_sender()

    def release(self) -> None:
        """Have workers unmap memory that they read on the direct path."""
        if self._sender is not None:
            self._sender.release()

    def finish_upload(self) -> None:
        """Wait for the upload of the version before, which goes on after its `publish`. Raises its error, once."""
        upload, self._upload = self._upload, None
        if upload is not None:
            upload.finish()

    def expect_abort(self) -> None:
        """Expect the upload in progress to fail, because its version is aborted on purpose."""
        if self._upload is not None:
            self._upload.ignore()

    def close(self) -> None:
        """Wait for the upload in progress, `staging_timeout` at most, and release what the paths keep."""
        upload, self._upload = self._upload, None
        if upload is None or upload.wait(self._staging_timeout):
            self._transports.close()
        self._close_sender()

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def deliver(
        self,
        step: int,
        read: "Read",
        timings: tracing.Timings,
        *,
        direct: bool,
        once: bool,
        wake: Wake | None = None,
        then: Then | None = None,
        base_version: int = 0,
    ) -> Handle:
        """Deliver this rank's part of a version.

        Args:
            step: Label of the version.
            read: Returns the tensors.
            timings: Durations of phases are appended to it.
            direct: Offer the version on the direct path.
            once: Whether `read` can be called only once, so that the delivery cannot start over.
            wake: Wakes servers that sleep until the version is READY; None if they are awake.
            then: Delivers versions that are READY together with this one; None if there are none.
            base_version: Version of the base that an adapter was trained on; 0 if it is not known.

        Raises as `Publisher.publish`; the version is then aborted.
        """
        restarts = 0 if once else _RESTARTS
        self._transports.stop_preparation()
        while True:
            slot, positions, version = self._begin(step, timings, direct, base_version)
            handle: Handle | None = None
            try:
                self._prepared(version, slot.rank, timings)
                with self._offered(version, direct, servers_sleep=wake is not None) as offering:
                    copied = self._copied(slot, positions, version, read, timings)
                    if copied is None:
                        if offering is not None and offering.hold.is_due and slot.boxes:
                            with tracing.timed(timings, "hold"):
                                offering.hold.wait()
                        made = Handle(self._channel, version)
                        self._send(slot, version, partial(read, positions), timings, made)
                        handle = made  # until here a restarted daemon does not know the version, and the delivery starts over
                    else:
                        handle = self._send_later(slot, version, copied, timings)
                    if then is not None:
                        with self._aborting(version, slot.rank), self._expecting_abort():
                            then(handle)
                    if wake is not None:
                        wake(handle)
                    return handle
            except NotFound:
                if not restarts or handle is not None:
                    raise
            restarts -= 1
            timings.clear()

    def _begin(
        self, step: int, timings: tracing.Timings, direct: bool, base_version: int
    ) -> tuple[AssignedSlot, Sequence[int], resources_pb2.Version]:
        """Return the slot, the positions of its boxes and the version to fill. Registers again with a restarted daemon."""
        restarts = _RESTARTS
        while True:
            try:
                with tracing.timed(timings, "create"):
                    slot, positions = self._session.assignment()
                    return slot, positions, self._create_version(step, direct, base_version)
            except (NotFound, WaitTimeout) as error:
                if error.reason not in UNREGISTERED or not restarts:
                    raise
            restarts -= 1
            self._session.register_again()

    def _prepared(self, version: resources_pb2.Version, rank: int, timings: tracing.Timings) -> None:
        if version.state == State.ABORTED:
            return
        with self._aborting(version, rank):
            if self._check is not None:
                self._check()
            if self._prepare is not None:
                with tracing.timed(timings, "quantise"):
                    self._prepare(version)

    @contextmanager
    def _aborting(self, version: resources_pb2.Version, rank: int) -> Iterator[None]:
        """Abort the version if the block raises, unless the daemon has this rank's slot already."""
        try:
            yield
        except BaseException as error:
            if not delivered(version, rank):
                self._session.abort(version.name, f"rank {rank}: {type(error).__name__}: {error}"[:500])
            raise

    @contextmanager
    def _expecting_abort(self) -> Iterator[None]:
        """Expect the upload in progress to fail if the block raises, since its version is aborted then."""
        try:
            yield
        except BaseException:
            self.expect_abort()
            raise

    def _create_version(self, step: int, direct: bool, base_version: int) -> resources_pb2.Version:
        request = publisher_pb2.CreateVersionRequest(
            publisher=self._session.registration.name,
            rank=self._session.identity.rank,
            step=step,
            withheld=not direct or self._sender is None,
            after=self._session.after(step),
            skipped=self._session.identity.skipped,
            base_version=base_version,
        )
        failpoint("deliver.begin")
        backoff = Backoff(self._staging_timeout, longest=1.0)
        while True:
            try:
                version: resources_pb2.Version = self._channel.call(self._stub.CreateVersion, request)
                failpoint("deliver.begun")
                self._session.begun(step, version)
                return version
            except OutOfRoom as error:
                if error.reason != TOO_MANY_UPLOADING or not backoff.wait():
                    raise

    @contextmanager
    def _offered(self, version: resources_pb2.Version, direct: bool, *, servers_sleep: bool) -> "Iterator[Offering | None]":
        """Offer the rank's memory to servers during the block, and afterwards until no server is expected to read it."""
        if not direct or self._sender is None or version.state == State.ABORTED:
            yield None
            return
        name, wait, default = self._session.registration.name, self._direct_wait, self._direct_wait is None
        early = self._copy is not None and not servers_sleep
        offering = self._sender.offer(
            name,
            version.name,
            DEFAULT_WAIT if wait is None else wait,
            servers_sleep=servers_sleep,
            ahead_only=default or early,
        )
        try:
            yield offering
            offering.wait(_LONGEST_HOLD if wait is None else self._staging_timeout + wait)
        except BaseException:
            offering.give_up()
            raise

    def _copied(
        self,
        slot: AssignedSlot,
        positions: Sequence[int],
        version: resources_pb2.Version,
        read: "Read",
        timings: tracing.Timings,
    ) -> "LiveItems | None":
        """Return copies of the items, to be uploaded later; None if they are to be uploaded now."""
        if self._copy is None or not slot.boxes or version.state == State.ABORTED or delivered(version, slot.rank):
            return None
        items = read(positions)
        if not isinstance(items, LiveItems):
            return None
        with self._aborting(version, slot.rank), tracing.timed(timings, "copy"):
            return self._copy.take(items)

    def _send_later(
        self, slot: AssignedSlot, version: resources_pb2.Version, copied: "LiveItems", timings: tracing.Timings
    ) -> Handle:
        """Begin to upload a copy on another thread, and return the version's handle."""
        assert self._copy is not None
        handle, reading = Handle(self._channel, version), self._copy.reading()

        def upload() -> None:
            try:
                with reading:
                    self._send(slot, version, lambda: copied, timings, handle)
            except ResharderError as error:
                handle.failed = error
                raise

        from resharder.client.trainer.transfer_copy import BackgroundUpload

        self._upload = BackgroundUpload(f"{version.name} (step {version.step})", upload)
        return handle

    def _send(
        self,
        slot: AssignedSlot,
        version: resources_pb2.Version,
        read: "Callable[[], Iterable[Item]]",
        timings: tracing.Timings,
        handle: Handle,
    ) -> None:
        """Deliver and seal a slot; the handle then has the way that it took."""
        if version.state == State.ABORTED:
            raise VersionAborted(f"{version.name} (step {version.step}) was aborted: {version.reason}")
        tracing.link(version.trace)
        if not slot.boxes:
            return
        with self._aborting(version, slot.rank):
            with tracing.timed(timings, "deliver"):
                if delivered(version, slot.rank):
                    done, unchanged = Delivered(digests_of(slot, read()), ""), False
                else:
                    done, unchanged = self._transfer(slot, version, read())
            request = publisher_pb2.SealSlotRequest(
                version=version.name,
                epoch=version.epoch,
                rank=slot.rank,
                digests=done.digests,
                mapped=done.mapped,
                timings=timings,
                unchanged=unchanged,
            )
            failpoint("deliver.seal")
            self._channel.call(partial(self._stub.SealSlot, metadata=tracing.metadata()), request, timeout=300)
            failpoint("deliver.sealed")
            if slot.frozen_boxes:
                self._frozen.sealed(version, slot, done.digests)
        handle.transport, handle.transport_reason = done.way, done.reason

    def _transfer(self, slot: AssignedSlot, version: resources_pb2.Version, items: "Iterable[Item]") -> tuple[Delivered, bool]:
        """Deliver a slot, and return whether its frozen boxes are unchanged and were not sent."""
        reach = self._session.registration.store, self._session.registration.data_address
        with FileReleases(self._channel, version, slot.rank) as releases:
            if not slot.frozen_boxes:
                return self._transports.select_for(version, slot, *reach).deliver(version, slot, items, releases), False
            assert isinstance(items, LiveItems)  # tensors that are given one by one are not declared as frozen
            home = home_of(version, slot)
            parts = slot.parted(home.gathers if home is not None else None)
            frozen = self._transports.select_for(version, parts.frozen, *reach, frozen=True)
            ways = frozen, self._transports.select_for(version, parts.rest, *reach)
            return self._frozen.deliver(version, slot, items, ways, releases, releases.keep_frozen)


class FileReleases:
    """Closes files on a thread, since unmapping many small pages takes long, and reports them to the daemon.

    A report has all files that were written during the one before. The daemon, or the node that has a file, digests it once all
    of its writers have closed it. Without a report, this happens after the last seal: errors are therefore ignored, and end the
    reports. Use it as a context, whose end does not wait.
    """

    def __init__(self, channel: Channel, version: resources_pb2.Version, rank: int) -> None:
        self._channel, self._version, self._rank = channel, version, rank
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._thread = ThreadPoolExecutor(1, "resharder-release")
        self._written: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self._reports, self._unchanged = True, False

    def release(self, file: str, close: Callable[[], None]) -> None:
        """Call `close`, then report the file. Returns at once."""
        self._written.put((file, close))
        self._thread.submit(self._release)

    def keep_frozen(self) -> None:
        """Report the files of the rank's frozen boxes, which it leaves as they are. Returns at once."""
        self._unchanged = True
        self._thread.submit(self._release)

    def _release(self) -> None:
        """Close and report the files that wait, which may be none: an earlier call has taken them."""
        files = []
        for _ in range(self._written.qsize()):
            file, close = self._written.get()
            close()
            files.append(file)
        unchanged, self._unchanged = self._unchanged, False
        if not (files or unchanged) or not self._reports:
            return
        request = publisher_pb2.ReleaseFilesRequest(
            version=self._version.name, epoch=self._version.epoch, rank=self._rank, files=files, unchanged=unchanged
        )
        try:
            self._channel.call(self._stub.ReleaseFiles, request, timeout=_REPORT_SECONDS, patience=0)
        except ResharderError as error:  # also of a daemon without this call
            logger.debug("%s are not reported as written: %s", ", ".join(files), error)
            self._reports = False

    def __enter__(self) -> "FileReleases":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._reports = False  # the version is aborted
        self._thread.shutdown(wait=False)
