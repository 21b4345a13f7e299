"""Manifest, digests and boxes of a READY version, from the daemon."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import xxhash
from resharder.client.errors import CorruptData
from resharder.client.rpc.channel import Channel, unreachable
from resharder.converters.geometry.chunking import Part, cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec, box_shape, box_size, full_box
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import BITS, FileLayout, parse_header
from resharder.converters.wire.backoff import Backoff
from resharder.converters.wire.boxes import spec_from_proto
from resharder.converters.wire.chunk_frame import unframe
from resharder.converters.wire.windows import CHUNK_BYTES, boxes_request
from resharder.v1 import server_pb2, server_pb2_grpc

_DOWNLOAD = "/resharder.v1.ServerService/DownloadChunks"
_DIGEST_TIMEOUT = 600.0
_PATIENCE = 120.0  # seconds without a complete box until a download fails

Needs = Mapping[str, tuple[Box, ...]]


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


def get_manifest(channel: Channel, version: str) -> VersionManifest:
    """Return the manifest of version `models/{model}/versions/{number}`. Raises ResharderError."""
    stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
    answer = channel.call(stub.GetManifest, server_pb2.GetManifestRequest(version=version))
    specs = [spec_from_proto(tensor.spec) for tensor in answer.tensors]
    return VersionManifest(
        answer.version.name,
        answer.version.number,
        answer.version.fingerprint,
        answer.version.folder,
        {spec.name: spec for spec in specs},
        {spec.name: tensor.digest for spec, tensor in zip(specs, answer.tensors, strict=True)},
        tuple(parse_header(Path(file.path).name, file.header, file.size_bytes) for file in answer.files),
        answer.data_address,
        answer.config,
    )


def expected_digests(channel: Channel, manifest: VersionManifest, needs: Needs) -> dict[tuple[str, Box], int]:
    """Return the digests of all needed boxes as the store has them; the manifest has those of whole
    tensors. Raises ResharderError.
    """
    expected: dict[tuple[str, Box], int] = {}
    asked = []
    for name, boxes in needs.items():
        for box in boxes:
            if box == full_box(manifest.specs[name].shape):
                expected[name, box] = manifest.digests[name]
            else:
                asked.append((name, box))
    if asked:
        stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
        answer = channel.call(stub.DigestBoxes, boxes_request(manifest.name, asked), timeout=_DIGEST_TIMEOUT)
        expected |= dict(zip(asked, answer.digests, strict=True))
    return expected


def download(channel: Channel, manifest: VersionManifest, boxes: Sequence[tuple[str, Box]]) -> Iterator[Arrived]:
    """Yield the boxes in parts, in order.

    After a broken connection, the download resumes with the first incomplete box, whose parts are repeated. Raises
    ResharderError.
    """
    done, backoff = 0, Backoff(_PATIENCE)
    while done < len(boxes):
        first = done
        try:
            for position, box, array in _stream(channel, manifest, boxes[first:]):
                if first + position > done:
                    done, backoff = first + position, Backoff(_PATIENCE)
                yield Arrived(first + position, box, array)
            done = len(boxes)
        except grpc.RpcError as error:
            if not (unreachable(error) and backoff.wait()):
                raise channel.error(error) from error


def split_chunk(parts: Sequence[Part], sizes: Sequence[int], data: memoryview) -> Iterator[Arrived]:
    """Yield the parts of a chunk, in its memory.

    Args:
        parts: Parts of the chunk.
        sizes: Bytes of an element, by the position of a part.
        data: Their elements.
    """
    at = 0
    for position, box in parts:
        array = np.frombuffer(data, BITS[sizes[position]], box_size(box), at)
        yield Arrived(position, box, array.reshape(box_shape(box)))
        at += array.nbytes


def _stream(channel: Channel, manifest: VersionManifest, boxes: Sequence[tuple[str, Box]]) -> Iterator[Arrived]:
    sizes = [ITEM_SIZES[manifest.specs[name].dtype] for name, _ in boxes]
    chunks = cut_chunks([box for _, box in boxes], sizes, CHUNK_BYTES)
    ask = channel.grpc.unary_stream(_DOWNLOAD, request_serializer=server_pb2.BoxesRequest.SerializeToString)
    call: Any = channel.begin(ask, boxes_request(manifest.name, boxes))
    try:
        for index, (parts, message) in enumerate(zip(chunks, call, strict=True)):
            header, data, _ = unframe(message)
            if header.index != index or header.checksum != xxhash.xxh3_64_intdigest(data):
                raise CorruptData(
                    f"{manifest.name}: expected chunk {index} with a valid checksum, got chunk {header.index} with "
                    f"checksum {header.checksum:016x}"
                )
            expected = sum(box_size(box) * sizes[position] for position, box in parts)
            if expected != len(data):
                raise CorruptData(f"{manifest.name}: expected {expected} bytes in chunk {index}, got {len(data)}")
            yield from split_chunk(parts, sizes, data)
    finally:
        call.cancel()
