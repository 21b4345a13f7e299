"""Manifest, digests and boxes of a READY version, from the daemon."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from resharder.client.rpc.channel import Channel
from resharder.converters.geometry.layout import Box, Piece, TensorSpec, full_box
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout, parse_header
from resharder.converters.wire.windows import boxes_request
from resharder.v1 import server_pb2, server_pb2_grpc

_DIGEST_TIMEOUT = 600.0

Needs = Mapping[str, tuple[Box, ...]]
Digests = np.ndarray[tuple[int], np.dtype[np.uint64]]
Places = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class VersionManifest:
    """Version as the daemon describes it: HF tensors with their digests, and the files in `folder` on the daemon's host.

    `folder` is empty if they must not be mapped, as while the daemon fetches pieces of the version from nodes.
    """

    name: str
    number: int
    fingerprint: str
    folder: str
    specs: dict[str, TensorSpec]
    digests: dict[str, int]
    files: tuple[FileLayout, ...]
    data_address: str = ""
    """`host:port` of the data port, without host if it is the endpoint's; empty for none."""
    config: bytes = b""
    """Content of its config.json; empty from an older daemon."""


class Arrived(NamedTuple):
    """Elements of `box` as unsigned integers. `box` is a part of the box at `position` of the requested ones."""

    position: int
    box: Box
    array: Array


def get_manifest(channel: Channel, version: str, *, patience: float | None = None) -> VersionManifest:
    """Return the manifest of version `models/{model}/versions/{number}`. Raises ResharderError.

    `patience`: seconds of retries; None is the channel's patience.
    """
    stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
    answer = channel.call(stub.GetManifest, server_pb2.GetManifestRequest(version=version), patience=patience)
    files = _described(tuple((Path(file.path).name, file.header, file.size_bytes) for file in answer.files))
    return VersionManifest(
        answer.version.name,
        answer.version.number,
        answer.version.fingerprint,
        answer.version.folder,
        files.specs,
        {tensor.spec.name: tensor.digest for tensor in answer.tensors},
        files.layouts,
        answer.data_address,
        answer.config,
    )


class _Files(NamedTuple):
    layouts: tuple[FileLayout, ...]
    specs: dict[str, TensorSpec]


@lru_cache(maxsize=16)
def _described(headers: tuple[tuple[str, bytes, int], ...]) -> _Files:
    """Return what headers describe. The versions of a model have the same, and share the objects of their many tensors."""
    layouts = tuple(parse_header(*header) for header in headers)
    return _Files(layouts, {placed.spec.name: placed.spec for file in layouts for placed in file.tensors})


class BoxDigests(Mapping[tuple[str, Box], int]):
    """Digests of boxes, by HF tensor and box."""

    def __init__(self, boxes: "_Boxes", values: Digests) -> None:
        self._boxes, self._values = boxes, values

    def of(self, pieces: Sequence[Piece]) -> Digests:
        """Return the digests of pieces' boxes, in the order of the pieces: uint64. Raises KeyError if a box is missing."""
        return self._values[self._boxes.places(pieces)]

    def __getitem__(self, box: tuple[str, Box]) -> int:
        return int(self._values[self._boxes.place[box]])

    def __iter__(self) -> Iterator[tuple[str, Box]]:
        return iter(self._boxes.place)

    def __len__(self) -> int:
        return len(self._boxes.place)


class _Boxes:
    """Boxes and their places in an array."""

    def __init__(self, boxes: Iterable[tuple[str, Box]]) -> None:
        self.place = {box: place for place, box in enumerate(boxes)}
        self._found: tuple[Sequence[Piece], Places] | None = None

    def places(self, pieces: Sequence[Piece]) -> Places:
        """Return the places of pieces' boxes, which are looked up again for other pieces than the last ones only."""
        found = self._found
        if found is None or found[0] is not pieces:
            places = np.array([self.place[piece.tensor, piece.box] for piece in pieces], np.int64)
            self._found = found = pieces, places
        return found[1]


class NeededDigests:
    """Digests of the boxes that a process needs of a model's versions: looked up once, fetched for each version. Thread-safe.

    Args:
        specs: The HF tensors, by name.
        needs: The needed boxes of each HF tensor.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], needs: Needs) -> None:
        self._specs, self._needs = specs, needs
        boxes = [(name, box) for name, some in needs.items() for box in some]
        self._boxes = _Boxes(boxes)
        is_whole = np.array([box == full_box(specs[name].shape) for name, box in boxes], bool)
        self._whole, self._parts = np.flatnonzero(is_whole), np.flatnonzero(~is_whole)
        self._names = [boxes[place][0] for place in self._whole.tolist()]
        self._request = boxes_request("", [boxes[place] for place in self._parts.tolist()])

    def are_of(self, specs: Mapping[str, TensorSpec], needs: Needs) -> bool:
        """Return whether these are the tensors and needs given; equal ones are others."""
        return self._specs is specs and self._needs is needs

    def of(self, channel: Channel, manifest: VersionManifest) -> BoxDigests:
        """Return the digests of a version's boxes as the store has them.

        The manifest has those of whole tensors. Raises ResharderError.
        """
        values = np.zeros(len(self._boxes.place), np.uint64)
        values[self._whole] = np.fromiter(map(manifest.digests.__getitem__, self._names), np.uint64, len(self._names))
        if len(self._parts):
            request = server_pb2.BoxesRequest()
            request.CopyFrom(self._request)
            request.version = manifest.name
            stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
            answer = channel.call(stub.DigestBoxes, request, timeout=_DIGEST_TIMEOUT)
            values[self._parts] = np.array(answer.digests, np.uint64)
        return BoxDigests(self._boxes, values)


def expected_digests(channel: Channel, manifest: VersionManifest, needs: Needs) -> BoxDigests:
    """Return the digests of all needed boxes as the store has them. Raises ResharderError."""
    return NeededDigests(manifest.specs, needs).of(channel, manifest)
