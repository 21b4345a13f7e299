"""Manifest, digests and boxes of a READY version, from the daemon."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from resharder.client.rpc.channel import Channel
from resharder.converters.geometry.layout import Box, TensorSpec, full_box
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import FileLayout, parse_header
from resharder.converters.wire.boxes import spec_from_proto
from resharder.converters.wire.windows import boxes_request
from resharder.v1 import server_pb2, server_pb2_grpc

_DIGEST_TIMEOUT = 600.0

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


def get_manifest(channel: Channel, version: str, *, patience: float | None = None) -> VersionManifest:
    """Return the manifest of version `models/{model}/versions/{number}`. Raises ResharderError.

    `patience`: seconds of retries; None is the channel's patience.
    """
    stub = server_pb2_grpc.ServerServiceStub(channel.grpc)
    answer = channel.call(stub.GetManifest, server_pb2.GetManifestRequest(version=version), patience=patience)
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
