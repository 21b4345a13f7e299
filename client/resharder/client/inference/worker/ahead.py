"""A version that a worker holds before it is READY: what it was proven by, and how that compares with the store's copy later.

What the worker holds has been proven to be what the ranks said that they sent, so it is enough to compare that with the store's
digests of the same boxes: no memory is read, and nothing is paused.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from resharder.client.errors import NotFound, ResharderError
from resharder.client.rpc.channel import Channel
from resharder.client.versions.remote import Manifest, expected_digests, get_manifest
from resharder.converters.geometry.layout import Box, Piece

logger = logging.getLogger("vllm.resharder.direct")
_ASK = 1.0  # seconds


@dataclass(frozen=True)
class Ahead:
    """`fingerprint`: what the worker says that it holds until the version is READY. `digests`: what the ranks say of `pieces`."""

    version: str
    fingerprint: str
    pieces: tuple[Piece, ...]
    digests: tuple[int, ...]

    @property
    def number(self) -> int:
        return int(self.version.rpartition("/")[2])


def compare(channel: Channel, ahead: Ahead, held: Callable[[], bool]) -> tuple[Manifest, str] | None:
    """Once the version is READY: its manifest, and how the store's copy differs from what the worker holds, or nothing.
    None when `held` says that nobody needs to know any more: so it ends where the version is ABORTED too."""
    while held():
        try:
            manifest = get_manifest(channel, ahead.version)
            return manifest, _difference(channel, manifest, ahead)
        except ResharderError as error:
            if not isinstance(error, NotFound):  # not READY yet
                logger.warning("%s is compared with the store's copy later: %s", ahead.version, error)
            time.sleep(_ASK)
    return None


def _difference(channel: Channel, manifest: Manifest, ahead: Ahead) -> str:
    needs: dict[str, dict[Box, None]] = defaultdict(dict)
    for piece in ahead.pieces:
        needs[piece.tensor][piece.box] = None
    stored = expected_digests(channel, manifest, {name: tuple(boxes) for name, boxes in needs.items()})
    pairs = zip(ahead.pieces, ahead.digests, strict=True)
    wrong = [piece.tensor for piece, digest in pairs if stored[piece.tensor, piece.box] != digest]
    return f"{len(wrong)} boxes are not what the store holds, {wrong[0]} is one" if wrong else ""
