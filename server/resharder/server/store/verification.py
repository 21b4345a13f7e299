"""Verification of a version's folder against its manifest, bit for bit."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from resharder.converters.storage.digest_1 import digest_1
from resharder.converters.storage.files import MappedFiles
from resharder.server.infra.filesystem import sync, touching, write_file
from resharder.server.state.errors import DataLoss
from resharder.server.store import manifest
from resharder.server.store.digests import digest_tensors
from resharder.server.store.manifest import MANIFEST_FILE, BadManifest, Manifest

_log = structlog.get_logger("resharder.store")


def verify(folder: Path, name: str, number: int, fingerprint: str) -> Manifest:
    """Check that a folder is the version of this fingerprint, sync its files, and return its manifest.

    A manifest of format 1 is replaced as by `redigest`. Raises DataLoss (CHECKSUM) or OSError.
    """
    what = f"models/{name}/versions/{number}"
    try:
        redigest(folder)
        found = manifest.read(folder)
    except BadManifest as error:
        raise DataLoss("CHECKSUM", f"{what}: {error}") from error
    if not found.whole:
        raise DataLoss("CHECKSUM", f"{what}: expected all bytes of the version, its manifest is that of one that lacks pieces")
    record = found.record
    if (record.model, record.number, record.fingerprint) != (name, number, fingerprint):
        raise DataLoss("CHECKSUM", f"{what}: expected {fingerprint}, its manifest is that of {record.name}, {record.fingerprint}")
    with touching(folder, "verifying"), MappedFiles(folder, found.files) as files:
        difference = _difference(found.digests, digest_tensors(files, _threads()))
    if difference:
        raise DataLoss("CHECKSUM", f"{what}: {difference}")
    for path in (*folder.iterdir(), folder):
        sync(path)
    return found


def redigest(folder: Path) -> None:
    """Replace a manifest of format 1 by one of the current format with the same fingerprint.

    Every tensor is verified by its old digest first. A no-op for a manifest of the current format. Raises BadManifest or OSError.
    """
    content = manifest.load(folder)
    if content["format"] != 1:
        return
    found = manifest.parse(folder, content)
    with MappedFiles(folder, found.files) as files:
        difference = _difference(found.digests, _digests_1(files))
        if difference:
            raise BadManifest(f"{folder.name}: {difference}")
        digests = digest_tensors(files, _threads())
    write_file(folder / MANIFEST_FILE, manifest.encode_again(content, digests))
    _log.info("version_digested_anew", version=found.record.name, tensors=len(digests), bytes=found.record.size_bytes)


def _difference(published: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Describe the tensors with other digests than the published ones; empty if there are none."""
    wrong = sorted(name for name in published.keys() | found.keys() if published.get(name) != found.get(name))
    return f"{len(wrong)} tensors are not what was published: {', '.join(wrong[:8])}" if wrong else ""


def _digests_1(files: MappedFiles) -> Mapping[str, int]:
    with ThreadPoolExecutor(_threads(), "digest") as pool:
        return dict(zip(files.arrays, pool.map(digest_1, files.arrays.values()), strict=True))


def _threads() -> int:
    return min(8, os.cpu_count() or 1)
