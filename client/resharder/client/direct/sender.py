"""A rank's side of the direct path: it offers the version in its memory and executes the daemon's tasks."""

import logging
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import xxhash
from resharder.client.direct.base import DirectFailed, reason_of
from resharder.client.direct.links import TransferLink, TransferLinks
from resharder.client.direct.member_calls import declare, finish
from resharder.client.direct.nixl_agent import SharedAgent
from resharder.client.errors import ResharderError
from resharder.client.gpu.box_digests import BoxDigests
from resharder.client.gpu.streams import on_stream
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.driver_lock import DRIVER_LOCK
from resharder.client.runtime.host import host_identity
from resharder.client.runtime.switch_interval import short_switch_interval
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.wire.direct import layout_from_proto, layout_to_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc

logger = logging.getLogger(__name__)
_UNKNOWN, _NOT_OFFERED = "MEMORY_UNKNOWN", "NOT_OFFERED"
_GIVEN_UP = 5.0  # seconds until the daemon notices that a version is ABORTED
_HELD = 2.0  # longest time that a delivery is held, in seconds


class Hold:
    """Time for which the delivery to the daemon is held: until workers on the rank's own device have the version.

    Kernels of two processes share a GPU by slices of its time: the delivery's slow down the server's staging and its pause, and
    the transfer itself. Only groups that have taken the version before are waited for, twice as long as they took for it at most.
    """

    def __init__(self, took: Mapping[str, float] | None = None) -> None:
        """`took`: seconds from the last offer until each group had its version; none without such a group."""
        self._left, self._over = set(took or ()), threading.Event()
        self._seconds = min(_HELD, 2 * max((took or {}).values(), default=0.0))

    @property
    def is_due(self) -> bool:
        """Whether a group is waited for."""
        return bool(self._left)

    def end(self, groups: Iterable[str] | None = None) -> None:
        """End the wait for groups that have the version, or will not take it; None for all."""
        self._left.difference_update(list(self._left) if groups is None else groups)
        if not self._left:
            self._over.set()

    def wait(self) -> None:
        """Return when no group is left, or at the end of the bound."""
        if self._left:
            self._over.wait(self._seconds)


class Offering:
    """Offer of one version, on a thread of its own.

    Its work follows the current stream's pending work, and runs beside later work of that stream, which delivers to the daemon.
    """

    def __init__(self, sender: "Sender", request: direct_pb2.OfferVersionRequest, hold: Hold) -> None:
        stream = sender.beside()
        self._calls: list[Any] = []
        self.hold = hold
        """The hold of this version's delivery."""

        def run() -> None:
            try:
                with stream:
                    sender.serve(request, self._calls, hold)
            finally:
                hold.end()

        self._thread = threading.Thread(target=run, name="resharder-offer", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        """Return when the tensors may change: when no server needs the offer.

        After `seconds`, ends the offer.
        """
        self._thread.join(min(seconds, threading.TIMEOUT_MAX))
        for call in self._calls:
            call.cancel()
        self._thread.join()

    def give_up(self) -> None:
        """End the offer, because the version will not be complete."""
        self.wait(_GIVEN_UP)


class Sender:
    """Sender of one attached model. A failed transfer raises no error: servers then take the staged path.

    With `chooses`, versions are offered to the servers of this host, and to those elsewhere whose link is fast; without, to all.
    `frozen` are HF tensors that the rank does not expect to change.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        layout: Layout,
        tensors: Mapping[str, torch.Tensor],
        *,
        chooses: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        self._host = host_identity() if chooses else ""
        self._channel, self._rank, self._tensors, self._process = channel, rank, tensors, uuid.uuid4().hex
        self._device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        self._layout = layout_to_proto(pack({rank: layout}))
        self._links, self._nixl = TransferLinks(tensors, self._device), SharedAgent(self._device)
        self._memory = xxhash.xxh3_128_hexdigest(self._layout.SerializeToString(deterministic=True))
        self._frozen = [number for number, spec in enumerate(self._layout.tensors) if spec.name in frozen]
        self._sent: dict[str, BoxDigests] = {}  # by group, from its first DIGEST task on
        self._still: dict[str, BoxDigests] = {}  # of frozen boxes alone
        self._due: set[str] = set()  # groups whose digests are due with the next transfer
        self._hold, self._offered_at = Hold(), 0.0
        self._took: dict[str, float] = {}  # seconds until groups on this device had the last version, ahead of READY
        self._buffers: torch.Tensor | None = None
        self._allocating = threading.Lock()
        self._stream: Any = None

    def declare(self, publisher: str) -> None:
        """Declare the layout. Raises ResharderError."""
        failpoint("sender.declare")
        declare(self._channel, self._member(publisher), self._memory, self._layout, self._host, frozen=self._frozen)

    def offer(
        self,
        publisher: str,
        version: str,
        wait_seconds: float,
        *,
        servers_sleep: bool = False,
        ahead_only: bool = False,
    ) -> Offering:
        """Offer a version on a new thread. The tensors are read until the offer ends. There may be one offer at a time.

        Args:
            publisher: Name of the publisher.
            version: Name of the version.
            wait_seconds: Seconds for which the tensors stay unchanged after the version is READY, while servers are expected.
            servers_sleep: Do not end the offer before a server is expected.
            ahead_only: End the offer as soon as no server is left that takes the version before it is READY, and at most
                `wait_seconds` after the first rank has delivered.
        """
        request = direct_pb2.OfferVersionRequest(
            member=self._member(publisher),
            version=version,
            memory=self._memory,
            wait_seconds=wait_seconds,
            servers_sleep=servers_sleep,
            ahead_only=ahead_only,
            host=self._host,
            elsewhere=bool(self._host),
        )
        return Offering(self, request, Hold(self._took if ahead_only and not servers_sleep else None))

    def beside(self) -> AbstractContextManager[Any]:
        """Return the context of a separate stream, ordered after the current stream's pending work."""
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return on_stream(self._stream)

    def serve(self, request: direct_pb2.OfferVersionRequest, calls: list[Any], hold: Hold) -> None:
        """Execute the tasks of an offer, beside the delivery's Python code.

        Its calls are appended to `calls`, for cancellation by other threads. `hold` ends as groups have the version.
        """
        self._hold, self._offered_at, self._took = hold, time.monotonic(), {}
        try:
            with short_switch_interval():
                try:
                    self._serve(request, calls)
                except ResharderError as error:
                    if error.reason != _UNKNOWN:
                        raise
                    self.declare(request.member.owner)
                    self._serve(request, calls)
        except ResharderError as error:
            expected = request.ahead_only and error.reason == _NOT_OFFERED  # it ended at once, for no server would take it
            logger.log(
                logging.INFO if expected else logging.WARNING, "servers take the staged path for %s: %s", request.version, error
            )

    def _serve(self, request: direct_pb2.OfferVersionRequest, calls: list[Any]) -> None:
        failpoint("sender.offer")
        call = self._channel.begin(direct_pb2_grpc.DirectServiceStub(self._channel.grpc).OfferVersion, request)
        calls.append(call)
        self._due.clear()
        try:
            self._links.prepare(partial(self._failed, request.member))  # now rather than while servers wait
            for task in self._channel.stream(call):
                try:
                    self._execute(request, task)
                except Exception as error:  # such as of a compiler of kernels: without a reason, the rank would be called gone
                    self._failed(request.member, task.group or task.link.group, error)
        finally:
            call.cancel()

    def _execute(self, request: direct_pb2.OfferVersionRequest, task: direct_pb2.DirectTask) -> None:
        match task.kind:
            case direct_pb2.DirectTask.LINK:
                self._meet(request.member, task.link)
            case direct_pb2.DirectTask.RUN:
                self._run(request, task.group, kept=task.kept)
            case direct_pb2.DirectTask.DROP:
                self._drop(task.group)
            case direct_pb2.DirectTask.DIGEST:
                self._digest(request, task)

    def _meet(self, member: direct_pb2.Member, message: direct_pb2.DirectLink) -> None:
        failpoint("sender.link")
        make = partial(TransferLink, self._channel, message, self._device, self._tensors, self._staging, self._nixl)
        self._links.meet(message.group, make, partial(self._failed, member))

    def _staging(self, size: int) -> torch.Tensor:
        """Return the memory for packing, which all links share. Raises RuntimeError if there is not enough."""
        with self._allocating:
            if self._buffers is None or self._buffers.numel() < size:
                self._buffers = torch.empty(size, dtype=torch.uint8, device=self._device)
            return self._buffers

    def _run(self, request: direct_pb2.OfferVersionRequest, group: str, *, kept: bool) -> None:
        """Send over a group. Digests that are due are computed and reported once all boxes are posted."""
        ahead = group in self._due
        self._due.discard(group)
        failpoint("sender.run")
        link = self._links.get(group)
        with DRIVER_LOCK.priority():  # over the delivery, which continues
            took = link.run(meanwhile=partial(self._report, request, group) if ahead else None, kept=kept)
        if ahead and link.shares_device:
            self._took[group] = time.monotonic() - self._offered_at
        self._hold.end([group])
        logger.debug("sent over group %s: %s", group, took)
        finish(self._channel, request.member, group, seconds=took.total)

    def _digest(self, request: direct_pb2.OfferVersionRequest, task: direct_pb2.DirectTask) -> None:
        if task.HasField("sent"):
            self._sent[task.group] = BoxDigests(layout_from_proto(task.sent, self._rank), self._device)
        if task.group not in self._sent:
            raise DirectFailed(f"rank {self._rank}: the first DIGEST task of group {task.group} has no boxes")
        if task.frozen:
            if task.group not in self._still:
                self._still[task.group] = self._sent[task.group].of(self._links.get(task.group).frozen)
            self._report(request, task.group, frozen=True)
        elif task.during_transfer:
            self._sent[task.group].prepare(self._tensors)
            self._due.add(task.group)
        else:
            self._report(request, task.group)

    def _report(self, request: direct_pb2.OfferVersionRequest, group: str, *, frozen: bool = False) -> None:
        """Compute the digests of the boxes that are sent over a group, or of frozen ones alone, and report them.

        Raises DirectFailed and LayoutError.
        """
        failpoint("sender.digest")
        digests = (self._still if frozen else self._sent)[group].digests(self._tensors)
        put = direct_pb2.PutDigestsRequest(
            member=request.member, group=group, version=request.version, digests=digests, frozen=frozen
        )
        try:
            self._channel.call(direct_pb2_grpc.DirectServiceStub(self._channel.grpc).PutDigests, put, timeout=60, patience=0)
        except ResharderError as error:
            raise DirectFailed(f"the digests of {request.version} could not be reported: {error}") from error

    def _failed(self, member: direct_pb2.Member, group: str, error: Exception) -> None:
        logger.warning("a transfer over the direct path failed: %s", reason_of(error))
        self._drop(group)
        try:
            finish(self._channel, member, group, reason_of(error))
        except ResharderError as unheard:
            logger.info("the daemon has ended group %s already: %s", group, unheard)

    def _drop(self, group: str) -> None:
        self._sent.pop(group, None)
        self._still.pop(group, None)
        self._due.discard(group)
        self._hold.end([group])
        self._links.drop(group)

    def release(self) -> None:
        """Have workers unmap the tensors' memory, which may then be freed, while nothing is offered."""
        self._links.release()

    def close(self) -> None:
        """Drop all links, and the memory for packing."""
        self._sent.clear()
        self._still.clear()
        self._links.close()
        self._nixl.close()
        self._buffers = None

    def _member(self, publisher: str) -> direct_pb2.Member:
        return direct_pb2.Member(owner=publisher, rank=self._rank, process=self._process)
