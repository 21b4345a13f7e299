"""A worker's side of the direct path: what ranks may write to, its link to them, and the digests of what then lies there."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from resharder.client.channel import Channel
from resharder.client.direct.group import DirectFailed
from resharder.client.direct.meeting import Link, declare, finish
from resharder.client.direct.proof import Proof
from resharder.client.errors import ResharderError
from resharder.client.vllm.install import live_tensors, read_all
from resharder.client.vllm.parts import Models, Part
from resharder.converters.direct_messages import layout_to_proto
from resharder.converters.layout import Box, Layout, Piece, TensorSpec
from resharder.converters.packed import pack
from resharder.v1 import direct_pb2, direct_pb2_grpc

logger = logging.getLogger("vllm.resharder.direct")
_UNKNOWN = "MEMORY_UNKNOWN"
_WAIT = 60.0  # seconds; the daemon answers sooner


@dataclass(frozen=True)
class Open:
    """The pieces of all parts that go straight into memory; local names begin with their part's."""

    layout: Layout
    proto: direct_pb2.MemoryLayout
    fingerprint: str


def open_memory(parts: Sequence[Part], rank: int) -> Open | None:
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
    return Open(layout, proto, xxhash.xxh3_128_hexdigest(proto.SerializeToString(deterministic=True)))


class Receiver:
    """Of one worker. `join` is called while the server serves, `receive` while it is paused."""

    def __init__(self, channel: Channel, server: str, rank: int, process: str, device: torch.device) -> None:
        self._channel, self._device = channel, device
        self._stub = direct_pb2_grpc.DirectServiceStub(channel.grpc)
        self._member = direct_pb2.Member(owner=f"servers/{server}", rank=rank, process=process)
        self._link: Link | None = None
        self._proof: tuple[list[int], Proof] | None = None

    def join(self, memory: Open, models: Models, version: str, install: str) -> bool:
        """Whether this install can be direct. Never raises for what goes wrong on the way."""
        request = direct_pb2.JoinTransferRequest(
            member=self._member,
            version=version,
            install=install,
            memory=memory.fingerprint,
            group=self._link.id if self._link else "",
        )
        try:
            message = self._ask(request, memory)
            if self._link is None or self._link.id != message.group:
                self.close()
                try:
                    self._link = Link(self._channel, message, self._device)
                    self._link.prepare({}, _targets(models))
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

    def receive(
        self, memory: Open, models: Models, install: str, expected: Mapping[tuple[str, Box], int]
    ) -> dict[str, list[int]] | None:
        """The digests of what then lies in memory, by part and in the order of its boxes, all as expected. None where it went
        wrong: memory may hold a mix then."""
        if self._link is None:
            return None
        link, targets = self._link, _targets(models)
        try:
            link.prepare({}, targets)
            request = direct_pb2.TransferRequest(member=self._member, group=link.id, install=install)
            self._channel.call(self._stub.StartTransfer, request, timeout=_WAIT, patience=0)
            took = link.run()
            digests = self._digests(memory.layout, targets)
            wrong = [p for p, found in zip(memory.layout.pieces, digests, strict=True) if found != expected[p.tensor, p.box]]
            if wrong:
                raise DirectFailed(f"{len(wrong)} boxes are not what the store holds, {wrong[0].tensor} is one", torn=True)
            finish(self._channel, self._member, link.id, seconds=took.total, size=link.received)
        except ResharderError as error:
            self._failed(link.id, str(error))
            return None
        logger.info("received %d bytes: %s", link.received, took)
        found: dict[str, list[int]] = {name: [] for name in models}
        for piece, value in zip(memory.layout.pieces, digests, strict=True):
            found[piece.local.partition("/")[0]].append(value)
        return found

    def _digests(self, layout: Layout, targets: Mapping[str, torch.Tensor]) -> list[int]:
        if self._device.type != "cuda":
            return read_all(targets, layout.pieces, layout.tensors)
        where = [targets[piece.local].data_ptr() for piece in layout.pieces]
        if self._proof is None or self._proof[0] != where:
            self._proof = where, Proof(layout, targets, self._device)
        return self._proof[1].digests()

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
        self._link = self._proof = None


def _targets(models: Models) -> dict[str, torch.Tensor]:
    return {f"{name}/{path}": tensor for name, model in models.items() for path, tensor in live_tensors(model).items()}
