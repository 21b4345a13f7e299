"""Versions for tests of the data port's readers."""

from collections.abc import Iterator
from contextlib import contextmanager

from resharder.client.inference.worker.source import Mirror
from resharder.client.rpc.channel import Channel
from resharder.client.versions.manifest import VersionManifest, get_manifest
from resharder.converters.geometry.layout import Box, Range, TensorSpec, full_box

from tests.support.daemon import Daemon
from tests.support.publishing import Job, random_weights, whole

SPECS = [TensorSpec("big", "BF16", (9 << 10, 2048)), TensorSpec("small", "F32", (7,)), TensorSpec("one", "F32", ())]
SMALL = [TensorSpec("a", "BF16", (64, 32))]
COLUMN = (Range(0, 64), Range(0, 8))


def publish(daemon: Daemon, step: int, specs: list[TensorSpec] = SPECS, job: str = "job") -> int:
    """Publish random weights and return the number of the version."""
    return Job(daemon.channel, specs, [whole(specs)], job=job).connect().publish(step, random_weights(specs, step)).number


def manifest_of(channel: Channel, number: int = 1) -> VersionManifest:
    return get_manifest(channel, f"models/policy/versions/{number}")


@contextmanager
def mirror(manifest: VersionManifest) -> Iterator[list[int]]:
    made = Mirror("/dev/shm")
    try:
        yield [int(file.path) for file in made.prepare(manifest.files)]
    finally:
        made.close()


def all_boxes(manifest: VersionManifest) -> list[tuple[str, Box]]:
    return [(name, full_box(spec.shape)) for name, spec in manifest.specs.items()]
