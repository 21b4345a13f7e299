"""Whether a folder that comes from elsewhere is the version that it should be, to the last byte."""

import os
from pathlib import Path

from resharder.converters.storage.files import MappedFiles
from resharder.server.infra.filesystem import sync, touching
from resharder.server.state.errors import DataLoss
from resharder.server.store import manifest
from resharder.server.store.digests import digest_tensors
from resharder.server.store.manifest import Manifest
from resharder.server.store.redigest import renew


def proven(folder: Path, name: str, number: int, fingerprint: str) -> Manifest:
    """The manifest of a folder whose files are all that it says, on their medium. Raises DataLoss (CHECKSUM)."""
    what = f"models/{name}/versions/{number}"
    try:
        renew(folder)
        found = manifest.read(folder)
    except manifest.BadManifest as error:
        raise DataLoss("CHECKSUM", f"{what}: {error}") from error
    record = found.record
    if (record.model, record.number, record.fingerprint) != (name, number, fingerprint):
        raise DataLoss("CHECKSUM", f"{what}: expected {fingerprint}, its manifest is that of {record.name}, {record.fingerprint}")
    with touching(folder, "proving"), MappedFiles(folder, found.files) as files:
        digests = digest_tensors(files, min(8, os.cpu_count() or 1))
    wrong = sorted(n for n in digests if digests[n] != found.digests.get(n))
    if wrong:
        raise DataLoss("CHECKSUM", f"{what}: {len(wrong)} tensors are not what was published: {', '.join(wrong[:8])}")
    for path in (*folder.iterdir(), folder):
        sync(path)
    return found
