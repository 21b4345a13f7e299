"""Versions that an earlier release has stored or archived, digested as this one does."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from resharder.converters.storage.digest_1 import digest_1
from resharder.converters.storage.files import MappedFiles
from resharder.server.infra.filesystem import write_file
from resharder.server.store import manifest
from resharder.server.store.digests import digest_tensors
from resharder.server.store.manifest import FORMAT, MANIFEST_FILE, BadManifest

_log = structlog.get_logger("resharder.store")


def renew(folder: Path) -> None:
    """Replaces a manifest of format 1 by one of this format, under the same fingerprint, and leaves one of this format as it is.
    Every tensor is proven by its old digest first. Raises BadManifest, OSError."""
    content = manifest.load(folder)
    if content["format"] == FORMAT:
        return
    found, threads = manifest.parse(folder, content), min(8, os.cpu_count() or 1)
    with MappedFiles(folder, found.files) as files:
        old = _digests_1(files, threads)
        wrong = sorted(name for name in old.keys() | found.digests.keys() if old.get(name) != found.digests.get(name))
        if wrong:
            raise BadManifest(f"{folder.name}: {len(wrong)} tensors are not what was published: {', '.join(wrong[:8])}")
        digests = digest_tensors(files, threads)
    write_file(folder / MANIFEST_FILE, manifest.encode_again(content, digests))
    _log.info("version_digested_anew", version=found.record.name, tensors=len(digests), bytes=found.record.size_bytes)


def _digests_1(files: MappedFiles, threads: int) -> Mapping[str, int]:
    with ThreadPoolExecutor(threads, "digest") as pool:
        return dict(zip(files.arrays, pool.map(digest_1, files.arrays.values()), strict=True))
