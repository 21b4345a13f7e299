"""A worker's side of the direct path: what ranks may write to, its link to them, and the digests of what then lies there.

A version may be received before it is READY. It is verified against what the ranks sent then; once the version is READY it is
enough to compare those digests with the store's: no memory is read, and nothing is paused.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import grpc
import torch
import xxhash
from resharder.client.direct.base import DirectFailed
from resharder.client.direct.links import TransferLink
from resharder.client.direct.member_calls import declare, finish
from resharder.client.direct.transfer import Tensors
from resharder.client.errors import NotFound, ResharderError
from resharder.client.gpu.digest import CachedDigester
from resharder.client.inference.worker.memory import live_now, read_all
from resharder.client.inference.worker.model_part import ModelPart, Models
from resharder.client.rpc.channel import Channel
from resharder.client.tracing import Timings, timed
from resharder.client.versions.remote import VersionManifest, expected_digests, get_manifest
from resharder.converters.geometry.layout import Box, Layout, Piece, TensorSpec
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.wire.direct import layout_to_proto
from resharder.v1 import direct_pb2, direct_pb2_grpc

logger = logging.getLogger("vllm.resharder.direct")
_UNKNOWN = "MEMORY_UNKNOWN"
_WAIT = 60.0  # seconds; the daemon answers sooner
_POLL_SECONDS = 1.0  # until a version is READY


@dataclass(frozen=True)
class Open:
    """The pieces of all parts that go straight into memory; local names begin with their part's. `names`: those of each part."""

    layout: Layout
    proto: direct_pb2.MemoryLayout
    fingerprint: str
    names: dict[str, frozenset[str]]


@dataclass(frozen=True)
class EarlyVersion:
    """A version received before it is READY. `fingerprint` is reported until then; `digests` of `pieces` are those that the ranks
    sent."""

    version: str
    fingerprint: str
    pieces: tuple[Piece, ...]
    digests: tuple[int, ...]

    @property
    def number(self) -> int:
        return int(self.version.rpartition("/")[2])


def open_memory(parts: Sequence[ModelPart], rank: int) -> Open | None:
    """None where there is nothing yet."""
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
    return Open(layout, proto, xxhash.xxh3_128_hexdigest(proto.SerializeToString(deterministic=True)), names)


class Receiver:
    """Of one worker. `join` is called while the server serves, `receive` while it is paused."""

    def __init__(self, channel: Channel, server: str, rank: int, process: str, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._stub = direct_pb2_grpc.DirectServiceStub(channel.grpc)
        self._member = direct_pb2.Member(owner=f"servers/{server}", rank=rank, process=process)
        self._link: TransferLink | None = None
        self._targets: dict[str, torch.Tensor] = {}
        self._proof: CachedDigester | None = None  # on a GPU
        self._expected: tuple[int, ...] = ()
        self._source = ""  # of what is expected
        self._finishing: threading.Thread | None = None  # tells the daemon of the last transfer

    def join(self, memory: Open, models: Models, version: str, install: str) -> bool:
        """Whether this install can be direct. Never raises for what goes wrong on the way."""
        if self._finishing is not None:
            self._finishing.join()
        request = direct_pb2.JoinTransferRequest(
            member=self._member,
            version=version,
            install=install,
            memory=memory.fingerprint,
            group=self._link.id if self._link else "",
        )
        try:
            message = self._ask(request, memory)
            try:  # what takes its time, before the pause
                if self._link is None or self._link.id != message.group:
                    self.close()
                    self._link = TransferLink(self._channel, message, self._device)
                    if self._device.type == "cuda":
                        self._proof = CachedDigester(memory.layout, self._device, self._link.complete)
                self._targets = _targets(models, memory)
                self._link.prepare({}, self._targets)
                if self._proof is not None:
                    self._proof.at(self._targets)
            except DirectFailed as error:
                self._failed(message.group, str(error))
                return False
        except ResharderError as error:
            logger.info("%s comes over the staged path: %s", version, error)
            return False
        return True

    def _ask(self, request: direct_pb2.JoinTransferRequest, memory: Open) -> direct_pb2.DirectLink:
        def ask() -> direct_pb2.DirectLink:
            link: direct_pb2.DirectLink = self._channel.call(self._stub.JoinTransfer, request, timeout=_WAIT, patience=0)
            return link

        try:
            return ask()
        except ResharderError as error:
            if error.reason != _UNKNOWN:
                raise
        declare(self._channel, self._member, memory.fingerprint, memory.proto)
        return ask()

    def expect(self, memory: Open, expected: Mapping[tuple[str, Box], int]) -> None:
        """What `receive` has to find."""
        self._expected = tuple(expected[piece.tensor, piece.box] for piece in memory.layout.pieces)
        self._source = "the store holds"

    def expect_early(self, memory: Open, version: str) -> EarlyVersion:
        """The same by what the ranks say, of a version that is not READY. Raises ResharderError."""
        if self._link is None:
            raise DirectFailed(f"{version}: there is no link to the ranks")
        request = direct_pb2.GetDigestsRequest(member=self._member, group=self._link.id, version=version)
        said = self._channel.call(self._stub.GetDigests, request, timeout=_WAIT, patience=0)
        if len(said.digests) != len(memory.layout.pieces):
            raise DirectFailed(f"{version}: expected {len(memory.layout.pieces)} digests, got {len(said.digests)}")
        self._expected, self._source = tuple(said.digests), "the ranks said"
        return EarlyVersion(version, said.fingerprint, memory.layout.pieces, self._expected)

    def receive(self, memory: Open, models: Models, install: str, timings: Timings) -> bool:
        """Whether everything is in memory now, by its digests. Where it is not, memory may hold a mix. Adds to `timings`."""
        if self._link is None:
            return False
        link, targets, times = self._link, self._targets, [time.monotonic()]
        try:
            request = direct_pb2.TransferRequest(member=self._member, group=link.id, install=install)
            with timed(timings, "turn"):
                turn = self._stub.StartTransfer.future(request, timeout=_WAIT)
                link.prepare({}, targets)
                proof = self._proof.at(targets) if self._proof is not None else None
                times.append(time.monotonic())
                self._wait(turn)
            times.append(time.monotonic())
            with timed(timings, "transfer"), link.watched():
                took = link.run(proof, lambda: _same(targets, _targets(models, memory)))
            times.append(time.monotonic())
            with timed(timings, "verify"):
                self._check(memory, proof.digests() if proof else read_all(targets, memory.layout.pieces, memory.layout.tensors))
            times.append(time.monotonic())
        except ResharderError as error:
            self._failed(link.id, str(error))
            return False
        parts = zip(("found", "waited for the turn", "transferred", "proven"), pairwise(times), strict=True)
        logger.info("received %d bytes: %s", link.received, ", ".join(f"{what} {b - a:.4f} s" for what, (a, b) in parts))
        # Clients wait: whoever has the next turn hears of it no later for this.
        self._finishing = threading.Thread(target=self._finished, args=(link, took.total), name="resharder-finish", daemon=True)
        self._finishing.start()
        return True

    def _wait(self, turn: grpc.Future) -> None:
        """Raises ResharderError."""
        try:
            turn.result()
        except grpc.RpcError as error:
            raise self._channel.error(error) from error

    def _finished(self, link: TransferLink, seconds: float) -> None:
        try:
            finish(self._channel, self._member, link.id, seconds=seconds, size=link.received)
        except ResharderError as error:  # everything is here and proven all the same
            logger.info("the daemon was not told of the end of a transfer: %s", error)

    def _check(self, memory: Open, digests: Sequence[int]) -> None:
        """Raises DirectFailed."""
        if tuple(digests) != self._expected:
            pieces = zip(memory.layout.pieces, digests, self._expected, strict=True)
            wrong = [piece.tensor for piece, found, wanted in pieces if found != wanted]
            raise DirectFailed(f"{len(wrong)} boxes are not what {self._source}, {wrong[0]} is one", torn=True)

    def _failed(self, group: str, error: str) -> None:
        logger.warning("the direct path fails: %s", error)
        self.close()
        try:
            finish(self._channel, self._member, group, error)
        except ResharderError as unheard:
            logger.info("the daemon has ended group %s already: %s", group, unheard)

    def close(self) -> None:
        """Lets go of the link and its memory."""
        if self._link is not None:
            self._link.close()
        self._link, self._proof, self._targets = None, None, {}


def _targets(models: Models, memory: Open) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, model in models.items():
        found |= {f"{name}/{path}": tensor for path, tensor in live_now(model, memory.names[name]).items()}
    return found


def _same(prepared: Tensors, found: Tensors) -> None:
    """Raises DirectFailed where the model reads other tensors now than those that were prepared before the pause."""
    names = prepared.keys() | found.keys()
    if moved := sorted(name for name in names if prepared.get(name) is not found.get(name)):
        raise DirectFailed(f"{len(moved)} tensors are others than before the pause, {moved[0]} is one")


def compare_with_store(channel: Channel, early: EarlyVersion, held: Callable[[], bool]) -> tuple[VersionManifest, str] | None:
    """Once the version is READY: its manifest, and how the store's copy differs from what the worker holds, or nothing.
    None when `held` says that nobody needs to know any more: so it ends where the version is ABORTED too."""
    while held():
        try:
            manifest = get_manifest(channel, early.version)
            return manifest, _difference_to_store(channel, manifest, early)
        except ResharderError as error:
            if not isinstance(error, NotFound):  # not READY yet
                logger.warning("%s is compared with the store's copy later: %s", early.version, error)
            time.sleep(_POLL_SECONDS)
    return None


def _difference_to_store(channel: Channel, manifest: VersionManifest, early: EarlyVersion) -> str:
    needs: dict[str, dict[Box, None]] = defaultdict(dict)
    for piece in early.pieces:
        needs[piece.tensor][piece.box] = None
    stored = expected_digests(channel, manifest, {name: tuple(boxes) for name, boxes in needs.items()})
    pairs = zip(early.pieces, early.digests, strict=True)
    wrong = [piece.tensor for piece, digest in pairs if stored[piece.tensor, piece.box] != digest]
    return f"{len(wrong)} boxes are not what the store holds, {wrong[0]} is one" if wrong else ""
