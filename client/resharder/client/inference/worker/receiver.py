"""A worker's side of the direct path: the memory that ranks write to, the link to the ranks, and the verification.

A version may be received before it is READY. It is verified against the digests that the ranks compute while they send. When the
version is READY, those digests are compared with the store's, without a read of memory or a pause.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import torch
import xxhash
from resharder.client.direct.base import DirectFailed, reason_of
from resharder.client.direct.links import TransferLink
from resharder.client.direct.member_calls import declare, finish
from resharder.client.errors import NotFound, ResharderError
from resharder.client.gpu.digest import CachedDigester
from resharder.client.gpu.streams import on_stream, use_gpu
from resharder.client.gpu.table import Tensors
from resharder.client.inference.worker.memory import live_now, read_all
from resharder.client.inference.worker.model_part import ModelPart, Models
from resharder.client.rpc.channel import Channel
from resharder.client.tracing import Timings, timed
from resharder.client.versions.manifest import BoxDigests, Digests, VersionManifest, get_manifest
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.wire.backoff import Backoff
from resharder.converters.wire.direct import layout_to_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc

logger = logging.getLogger("resharder.inference.direct")
_UNKNOWN, _NOT_OFFERED = "MEMORY_UNKNOWN", "NOT_OFFERED"
_TIMEOUT = 60.0  # seconds; the daemon has shorter bounds
_FIRST_POLL, _LONGEST_POLL = 0.1, 1.0  # seconds between queries whether a version is READY, doubling


@dataclass(frozen=True)
class OpenMemory:
    """The memory that ranks may write to: the boxed pieces of all parts."""

    layout: Layout
    """The pieces. Names of locals are prefixed with the name of their part."""
    proto: direct_pb2.MemoryLayout
    """The layout in its wire form."""
    fingerprint: str
    """Hash of `proto`."""
    names: dict[str, frozenset[str]]
    """Locals of each part, without the prefix."""


@dataclass(frozen=True, eq=False)
class EarlyVersion:
    """A version that is received before it is READY."""

    version: str
    """Full name of the version."""
    fingerprint: str
    """Provisional fingerprint, reported until the version is READY."""
    pieces: tuple[Piece, ...]
    config: bytes
    """Content of its config.json; empty from an older daemon."""
    tensors: str = ""
    """Fingerprint of its tensors; empty from an older daemon."""

    @property
    def number(self) -> int:
        return int(self.version.rpartition("/")[2])


def open_memory(parts: Sequence[ModelPart], rank: int) -> OpenMemory | None:
    """Return the memory that ranks may write to; `None` without boxed pieces, or before routes are decided."""
    if not parts or any(part.route is None for part in parts):
        return None
    pieces: list[Piece] = []
    tensors: dict[str, TensorSpec] = {}
    for part in parts:
        assert part.route is not None
        pieces += [piece._replace(local=f"{part.name}/{piece.local}") for piece in part.route.boxed]
        tensors |= {piece.tensor: part.known.layout.tensors[piece.tensor] for piece in part.route.boxed}
    if not pieces:
        return None
    layout = Layout(tensors, tuple(pieces))
    proto = layout_to_proto(pack({rank: layout}))
    names = {part.name: frozenset(piece.local for piece in part.route.boxed) for part in parts if part.route is not None}
    return OpenMemory(layout, proto, xxhash.xxh3_128_hexdigest(proto.SerializeToString(deterministic=True)), names)


class Receiver:
    """The receiver of one worker.

    Call `join` and `expect` or `expect_early` while the server serves, `receive` while it is paused. `meet` may run beside all.

    Args:
        channel: Channel to the daemon.
        server: The server's id.
        rank: The worker's rank.
        process: The worker process's unique id.
        device: The model's device.
    """

    def __init__(self, channel: Channel, server: str, rank: int, process: str, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._stub = direct_pb2_grpc.DirectServiceStub(channel.grpc)
        self._member = direct_pb2.Member(owner=f"servers/{server}", rank=rank, process=process)
        self._lock = threading.Lock()  # guards `_link`, and is held during a transfer
        self._link: TransferLink | None = None
        self._targets: dict[str, torch.Tensor] = {}
        self._digester: CachedDigester | None = None  # on a GPU only
        self._expected: Digests | None = None  # None until the ranks have sent theirs
        self._expected_source = ""
        self._early: EarlyVersion | None = None  # the version that `expect_early` expects
        self._keeps = False  # whether memory has the frozen tensors of the expected version
        self.kept_bytes = 0
        """Bytes that the last transfer left out, because memory had them already."""
        self.problem = ""
        """Why the last `join` or `receive` returned false."""
        self._finishing: threading.Thread | None = None  # reports the end of the last transfer to the daemon

    @property
    def path(self) -> str:
        """Links of the last transfer: `peer-memory`, `nixl`, `nccl` or `gloo`, joined by `+`; empty without one."""
        return self._link.path if self._link is not None else ""

    def join(self, memory: OpenMemory, models: Models, version: str, install: str) -> bool:
        """Join the transfer of a version and prepare the link.

        Returns:
            Whether the install can use the direct path. Errors of the daemon and of the link are logged.
        """
        if self._finishing is not None:
            self._finishing.join()
        failpoint("worker.direct.join")
        request = direct_pb2.JoinTransferRequest(
            member=self._member,
            version=version,
            install=install,
            memory=memory.fingerprint,
            group=self._link.id if self._link else "",
        )
        try:
            message = self._declaring(memory, lambda: self._call(self._stub.JoinTransfer, request))
            try:  # the slow steps, before the pause
                link = self._link
                if link is None or link.id != message.group:
                    self.close()
                    link = TransferLink(self._channel, message, self._device)
                    self._use(link)
                if self._digester is None and self._device.type == "cuda":
                    self._digester = CachedDigester(memory.layout, self._device, link.complete)
                self._targets = _targets(models, memory)
                link.prepare({}, self._targets)
                if self._digester is not None:
                    self._digester.at(self._targets)
            except Exception as error:  # such as of a compiler of kernels: the store's copy needs none
                self.close()
                self._failed(message.group, reason_of(error))
                return False
        except ResharderError as error:
            self.problem = str(error)
            if error.reason == _NOT_OFFERED:
                logger.info("%s is installed from the store: %s", version, error)
            else:
                logger.warning("%s is installed from the store, the direct path is not available: %s", version, error)
            return False
        return True

    def _call(self, method: Any, request: Any) -> direct_pb2.DirectLink:
        link: direct_pb2.DirectLink = self._channel.call(method, request, timeout=_TIMEOUT, patience=0)
        return link

    def _declaring(self, memory: OpenMemory, ask: Callable[[], direct_pb2.DirectLink]) -> direct_pb2.DirectLink:
        """Ask for a link, once more after the memory was declared if the daemon does not know it. Raises ResharderError."""
        try:
            return ask()
        except ResharderError as error:
            if error.reason != _UNKNOWN:
                raise
        declare(self._channel, self._member, memory.fingerprint, memory.proto, keeps=True)
        return ask()

    def _use(self, link: TransferLink) -> None:
        with self._lock:
            self._link, self._digester, self._targets = link, None, {}

    def meet(self, memory: OpenMemory) -> bool:
        """Try a link to ranks on other hosts, so that later versions can come over it. Waits for the ranks' next version.

        Returns:
            Whether a new link was tried.

        Raises:
            ResharderError: The daemon is away, or refuses.
        """
        link = self._link
        request = direct_pb2.MeetRanksRequest(member=self._member, memory=memory.fingerprint)
        if link is not None:
            request.group, request.seconds = link.id, link.tried_seconds
        message = self._declaring(memory, lambda: self._call(self._stub.MeetRanks, request))
        if link is not None and link.id == message.group:
            return False
        with self._lock:
            if self._link is not link:  # an install has made another
                return False
            self._link, self._digester, self._targets = None, None, {}
        if link is not None:
            link.close()
        if not message.group:
            return False
        try:
            with self._apart():
                made = TransferLink(self._channel, message, self._device)
        except DirectFailed as error:
            logger.info("no link to ranks on other hosts: %s", error)
            self._report_failure(message.group, str(error))
            return False
        with self._lock:
            taken = self._link is None
            if taken:
                self._link = made
        if not taken:
            made.close()
        return taken

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Use a stream of its own, beside those of the engine."""
        if self._device.type != "cuda":
            yield
            return
        use_gpu(self._device)
        with on_stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
            yield

    def expect(self, memory: OpenMemory, expected: BoxDigests) -> None:
        """Set the digests with which `receive` compares: the store's."""
        self._expected, self._early = expected.of(memory.layout.pieces), None
        self._expected_source = "the store's"
        which = self._frozen(memory)
        self._keeps = self._has(memory, which, self._expected[which])

    def expect_early(self, memory: OpenMemory, version: str) -> EarlyVersion:
        """Have `receive` compare with the ranks' digests of a version that is not READY, which they compute while they send.

        Raises:
            ResharderError: The version is not offered.
        """
        if self._link is None:
            raise DirectFailed(f"{version}: there is no link to the ranks")
        request = direct_pb2.GetDigestsRequest(member=self._member, group=self._link.id, version=version, during_transfer=True)
        answer = self._channel.call(self._stub.GetDigests, request, timeout=_TIMEOUT, patience=0)
        pieces = memory.layout.pieces
        self._keeps, which = False, self._frozen(memory)
        if which:
            request.during_transfer, request.frozen = False, True
            still = self._channel.call(self._stub.GetDigests, request, timeout=_TIMEOUT, patience=0)
            self._keeps = self._has(memory, which, _digests_of(version, still, [pieces[i] for i in which]))
        self._expected_source = "the ranks'"
        self._expected = _digests_of(version, answer, pieces) if answer.digests else None  # there already, from older ranks
        self._early = EarlyVersion(version, answer.fingerprint, pieces, answer.config, answer.tensors)
        return self._early

    def _frozen(self, memory: OpenMemory) -> list[int]:
        """Return the positions of pieces of tensors that all ranks call frozen."""
        frozen = self._link.frozen if self._link is not None else frozenset[str]()
        return [i for i, piece in enumerate(memory.layout.pieces) if piece.tensor in frozen] if frozen else []

    def _has(self, memory: OpenMemory, which: Sequence[int], expected: Digests) -> bool:
        """Return whether memory has pieces with these digests already."""
        if not which:
            return False
        pieces, tensors = tuple(memory.layout.pieces[i] for i in which), memory.layout.tensors
        with self._apart():
            if self._device.type == "cuda":
                found = CachedDigester(Layout(tensors, pieces), self._device).at(self._targets).digests()
            else:
                found = read_all(self._targets, pieces, tensors)
        return bool(np.array_equal(np.array(found, np.uint64), expected))

    def receive(self, memory: OpenMemory, models: Models, install: str, timings: Timings) -> bool:
        """Receive all pieces and verify their digests.

        Args:
            memory: The memory that was joined with.
            models: The worker's models, by part.
            install: Id of the install.
            timings: Receives the phases `turn`, `transfer` and `verify`.

        Returns:
            Whether all pieces are received and verified. If not, memory may contain a mix.
        """
        with self._lock:
            return self._receive(memory, models, install, timings)

    def _receive(self, memory: OpenMemory, models: Models, install: str, timings: Timings) -> bool:
        if self._link is None:
            self.problem = "there is no link to the ranks"
            return False
        link, targets, times = self._link, self._targets, [time.monotonic()]
        try:
            request = direct_pb2.TransferRequest(member=self._member, group=link.id, install=install, kept=self._keeps)
            self.kept_bytes = 0
            with timed(timings, "turn"):
                start = self._channel.begin(self._stub.StartTransfer.future, request, timeout=_TIMEOUT)
                link.prepare({}, targets)
                digester = self._digester.at(targets) if self._digester is not None else None
                times.append(time.monotonic())
                try:
                    self._wait(start)
                except ResharderError as error:
                    if error.reason != _NOT_OFFERED or link.over:
                        raise
                    self.problem = str(error)  # of the offer alone: the link is as good as before
                    logger.info("nothing is received over the direct path: %s", error)
                    return False
            kept = bool(start.result().kept)
            failpoint("worker.direct.receive")
            times.append(time.monotonic())
            with self._reported(link.id) as reported:
                with timed(timings, "transfer"), link.watched():
                    durations = link.run(digester, lambda: _check_unchanged(targets, _targets(models, memory)), kept=kept)
                times.append(time.monotonic())
                with timed(timings, "verify"):
                    found = digester.digests() if digester else read_all(targets, memory.layout.pieces, memory.layout.tensors)
                    failpoint("worker.direct.compare")
                    self._check(memory, found, reported())
            times.append(time.monotonic())
        except Exception as error:
            self._drop()
            self._failed(link.id, reason_of(error))
            return False
        failpoint("worker.direct.received")
        phases = zip(("prepare", "queue", "transfer", "verify"), pairwise(times), strict=True)
        self.kept_bytes = link.frozen_size if kept else 0
        size = link.received - self.kept_bytes
        logger.info("received %d bytes: %s", size, ", ".join(f"{phase} {b - a:.4f} s" for phase, (a, b) in phases))
        # On a thread, because requests wait for this install to end.
        self._finishing = threading.Thread(
            target=self._finished, args=(link, durations.total, size), name="resharder-finish", daemon=True
        )
        self._finishing.start()
        return True

    @contextmanager
    def _reported(self, group: str) -> Iterator[Callable[[], Digests]]:
        """Ask for the digests to compare with, beside the block, and yield a function that waits for them.

        The function raises ResharderError if the ranks do not report them.
        """
        if self._expected is not None or (early := self._early) is None:
            yield lambda: self.compared
            return
        request = direct_pb2.GetDigestsRequest(member=self._member, group=group, version=early.version)
        call = self._channel.begin(self._stub.GetDigests.future, request, timeout=_TIMEOUT)

        def reported() -> Digests:
            self._wait(call)
            self._expected = _digests_of(early.version, call.result(), early.pieces)
            return self._expected

        try:
            yield reported
        finally:
            call.cancel()

    @property
    def compared(self) -> Digests:
        """Digests with which a transfer is compared, in the order of the memory's pieces. Raises DirectFailed without any."""
        if self._expected is None:
            raise DirectFailed("there are no digests to compare with")
        return self._expected

    def _wait(self, call: grpc.Future) -> None:
        """Wait for the daemon's answer. Raises `ResharderError`."""
        error = call.exception()  # `result` would raise the call itself, which then refers to its own frames
        if error is not None:
            raise self._channel.error(error) from error

    def _finished(self, link: TransferLink, seconds: float, size: int) -> None:
        try:
            finish(self._channel, self._member, link.id, seconds=seconds, size=size)
        except ResharderError as error:  # the received version is verified nevertheless
            logger.info("cannot report the end of a transfer to the daemon: %s", error)

    def _check(self, memory: OpenMemory, digests: Sequence[int], expected: Digests) -> None:
        """Raise `DirectFailed` if a digest is not the expected one."""
        wrong = _wrong(memory.layout.pieces, np.array(digests, np.uint64), expected)
        if wrong:
            raise DirectFailed(f"{_differ(wrong)} from {self._expected_source} digests", torn=True)

    def _failed(self, group: str, error: str) -> None:
        self.problem = error
        logger.warning("the direct path failed: %s", error)
        self._report_failure(group, error)

    def _report_failure(self, group: str, error: str) -> None:
        try:
            finish(self._channel, self._member, group, error)
        except ResharderError as refusal:
            logger.info("the daemon has already ended group %s: %s", group, refusal)

    def let_go(self) -> None:
        """Close a link that has registered the model's memory, which is about to be unmapped."""
        if "nixl" in self.path:
            self.close()

    def close(self) -> None:
        """Close the link and release its memory."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        """Close the link. The lock is held."""
        link, self._link, self._digester, self._targets = self._link, None, None, {}
        if link is not None:
            link.close()


def _digests_of(version: str, answer: direct_pb2.ReportedDigests, pieces: Sequence[Piece]) -> Digests:
    """Return the ranks' digests of these pieces. Raises DirectFailed if there are not as many."""
    if len(answer.digests) != len(pieces):
        raise DirectFailed(f"{version}: expected {len(pieces)} digests, got {len(answer.digests)}")
    return np.array(answer.digests, np.uint64)


def _targets(models: Models, memory: OpenMemory) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, model in models.items():
        found |= {f"{name}/{path}": tensor for path, tensor in live_now(model, memory.names[name]).items()}
    return found


def _check_unchanged(prepared: Tensors, found: Tensors) -> None:
    """Raise `DirectFailed` if the model's tensors are not the ones that were prepared before the pause."""
    names = prepared.keys() | found.keys()
    if moved := sorted(name for name in names if prepared.get(name) is not found.get(name)):
        raise DirectFailed(f"{len(moved)} tensors are not those from before the pause, e.g. {moved[0]}")


def compare_with_store(
    channel: Channel,
    early: EarlyVersion,
    digests: Digests,
    stored: Callable[[VersionManifest], BoxDigests],
    is_current: Callable[[], bool],
) -> tuple[VersionManifest, str] | None:
    """Wait until an early version is READY and compare its digests with the store's.

    Args:
        channel: Channel to the daemon.
        early: The version that the worker received.
        digests: The ranks' digests of its pieces.
        stored: Returns the store's digests of the boxes that the worker needs. Raises ResharderError.
        is_current: Returns whether the worker still has the version. The wait for a version that is
            ABORTED ends when the daemon replaces it.

    Returns:
        The version's manifest and the difference, empty if there is none; `None` if `is_current` returned false.
    """
    pauses = Backoff(math.inf, _FIRST_POLL, _LONGEST_POLL)
    while is_current():
        try:
            manifest = get_manifest(channel, early.version)
            return manifest, _compared(early.pieces, digests, stored(manifest))
        except ResharderError as error:
            if not isinstance(error, NotFound):  # not READY yet
                logger.warning("cannot compare %s with the store, retrying: %s", early.version, error)
            pauses.wait()
    return None


def _compared(pieces: Sequence[Piece], digests: Digests, stored: BoxDigests) -> str:
    """Return the difference. What cannot be compared, as a box that the store's version lacks, differs: it is not proven."""
    try:
        return _difference(pieces, digests, stored)
    except ResharderError:
        raise
    except Exception as error:
        return f"it cannot be compared with the store's version: {reason_of(error)}"


def _difference(pieces: Sequence[Piece], digests: Digests, stored: BoxDigests) -> str:
    wrong = _wrong(pieces, digests, stored.of(pieces))
    return f"{_differ(wrong)} from the store's digests" if wrong else ""


def _wrong(pieces: Sequence[Piece], found: Digests, expected: Digests) -> list[str]:
    """Return the tensor of each piece whose digests differ. Raises ValueError unless there is one for each piece."""
    if not len(pieces) == len(found) == len(expected):
        raise ValueError(f"expected {len(pieces)} digests, got {len(found)} and {len(expected)}")
    return [pieces[i].tensor for i in np.flatnonzero(found != expected).tolist()]


def _differ(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} boxes, e.g. of {tensors[0]}, differ"
