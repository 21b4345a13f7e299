"""Comparison of replicas with their owners, bit for bit.

A rank that drifted (a missed gather, a skipped broadcast, experts' weights updated twice) still has plausible values, and the
choice of senders determines which of them are published. Digests of all ranks' pieces reveal the difference.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from resharder.converters.errors import ReplicasDiffer
from resharder.converters.geometry.layout import Box, Layout, format_box
from resharder.converters.models.tensor_io import read_piece
from resharder.converters.storage.digest import digest, digest_torch
from resharder.converters.storage.files import BITS

_SHOWN = 8


class HeldDigest(NamedTuple):
    """Digest of a rank's piece."""

    tensor: str
    box: Box
    replica: bool
    digest: int


def check_replicas(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ReplicasDiffer, on every rank, if two ranks have different values of one box of an HF tensor.

    A collective of torch's default process group, if there is one. Every rank reads its tensors once and sends a digest of each
    piece to all others.
    """
    held = list(held_digests(layout, tensors))
    everyone: list[list[HeldDigest]] = [held]
    if dist.is_initialized():
        everyone = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, held)
    wrong = differences(everyone)
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ReplicasDiffer("; ".join(wrong[:_SHOWN]) + more)


def held_digests(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> Iterator[HeldDigest]:
    """Yield the digests of one rank's pieces, computed on the tensors' devices."""
    for piece in layout.pieces:
        values, shape = read_piece(tensors, piece), layout.tensors[piece.tensor].shape
        if values.device.type == "cpu":
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
            found = digest(values.view(bits).numpy().view(BITS[values.element_size()]), piece.box, shape)
        else:
            found = digest_torch(values, piece.box, shape)
        yield HeldDigest(piece.tensor, piece.box, piece.replica, found)


def differences(everyone: Sequence[Sequence[HeldDigest]]) -> list[str]:
    """Return a sentence for each box whose digests differ, between ranks or on one rank.

    Args:
        everyone: Digests of each rank's pieces, in order of rank.
    """
    holders: dict[tuple[str, Box], list[tuple[int, HeldDigest]]] = defaultdict(list)
    for rank, pieces in enumerate(everyone):
        for held in pieces:
            holders[held.tensor, held.box].append((rank, held))
    return [_sentence(held) for held in holders.values() if len({found.digest for _, found in held}) > 1]


def _sentence(held: Sequence[tuple[int, HeldDigest]]) -> str:
    owner, expected = next(((rank, found) for rank, found in held if not found.replica), held[0])
    others = sorted({rank for rank, found in held if found.digest != expected.digest})
    shown = ", ".join(map(str, others[:_SHOWN])) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
    where = f"{expected.tensor}{format_box(expected.box)}"
    return f"{where}: the values of its owner, rank {owner}, are not those of rank {shown or owner}"
