"""`resharder.json`, the manifest in a version's folder: reading, encoding, and verification of the folder, bit for bit.

The manifest is written last, so a folder with a valid one is complete. Its `blake3` field is the hash of all its other fields.
Its fingerprint, which identifies the version, is the blake3 of the manifest as first written. Format 1 has the digests of
protocol revision 1, and its fingerprint is also the hash of the rest; `redigest` converts it to format 2. Format 3 is
format 2 of a version whose files lack pieces (`partial.py`): it is replaced by format 2 once they are complete.
"""

import errno
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.json_input import is_file_name, parse_json
from resharder.converters.storage.digest_1 import digest_1
from resharder.converters.storage.files import FileLayout, MappedFiles, check_one_file_each, parse_header
from resharder.converters.wire.pieces import PieceSpan
from resharder.server.infra.filesystem import sync, touching, write_file
from resharder.server.state.errors import DataLoss
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.digests import digest_tensors

MANIFEST_FILE = "resharder.json"
FORMAT, PARTIAL_FORMAT = 2, 3
_NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
_HASH = {1: "fingerprint", 2: "blake3", 3: "blake3"}
"""Field of each format that has the blake3 of all other fields."""
_CACHED = 2  # manifests; a large one takes some 50 MiB
_log = structlog.get_logger("resharder.store")


@dataclass(frozen=True)
class Manifest:
    """A READY version: its safetensors files, the digest of each tensor, and the names of its other files."""

    record: VersionRecord
    files: tuple[FileLayout, ...]
    digests: dict[str, int]
    other_files: tuple[str, ...]
    whole: bool = True
    """Whether its folder had all bytes when this was read; otherwise `partial.py` names the pieces."""

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """Spec of each tensor by its name."""
        return {placed.spec.name: placed.spec for file in self.files for placed in file.tensors}

    @cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """File and first byte of each tensor by its name."""
        return {placed.spec.name: (file.path, placed.offset) for file in self.files for placed in file.tensors}

    def spans_of(self, tensors: Iterable[str]) -> list[PieceSpan]:
        """Return the bytes of tensors."""
        found = ((*self.places[name], self.specs[name].size) for name in tensors)
        return [PieceSpan(file, start, start + size) for file, start, size in found]


class BadManifest(ValueError):
    """Folder that is not a complete version. The message names the folder or file and the difference."""


def encode(
    record: VersionRecord, files: Mapping[str, bytes], sizes: Mapping[str, int], digests: Mapping[str, int], *, whole: bool = True
) -> tuple[bytes, str]:
    """Encode a manifest and return it with its fingerprint.

    `files` maps each file to its content (safetensors files: the header), `sizes` to its size in bytes. `whole`: whether the
    files have all bytes.
    """
    content: dict[str, Any] = {
        "format": FORMAT if whole else PARTIAL_FORMAT,
        "version": {k: v for k, v in asdict(record).items() if k not in ("fingerprint", "state", "reason", "end_time")},
        "files": {name: {"size": sizes[name], "blake3": blake3(files[name]).hexdigest()} for name in sorted(files)},
        "digests": _hexadecimal(digests),
    }
    content["fingerprint"] = _blake3(content)
    return _encoded(content), str(content["fingerprint"])


def encode_again(content: Mapping[str, Any], digests: Mapping[str, int]) -> bytes:
    """Encode the content that `load` returned in the current format, with new digests and the same fingerprint."""
    return _encoded({**content, "format": FORMAT, "digests": _hexadecimal(digests)})


def encode_whole(content: Mapping[str, Any]) -> bytes:
    """Encode the content of format 3 that `load` returned as that of a whole version, with the same fingerprint."""
    return _encoded({**content, "format": FORMAT})


def encode_partial(content: Mapping[str, Any]) -> bytes:
    """Encode the content that `load` returned as that of a version whose files lack pieces, with the same fingerprint."""
    return _encoded({**content, "format": PARTIAL_FORMAT})


def _encoded(content: Mapping[str, Any]) -> bytes:
    field = _HASH[FORMAT]
    return _canonical({**content, field: _blake3(content, without=field)})


def _hexadecimal(digests: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{value:016x}" for name, value in sorted(digests.items())}


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _blake3(content: Mapping[str, Any], without: str = "") -> str:
    return str(blake3(_canonical({k: v for k, v in content.items() if k != without})).hexdigest())


def load(folder: Path) -> dict[str, Any]:
    """Return the fields of a manifest of any format.

    Raises BadManifest, or OSError if the manifest cannot be read.
    """
    try:
        content: dict[str, Any] = parse_json((folder / MANIFEST_FILE).read_bytes())
        field = _HASH.get(content["format"])
        if field is None:
            raise BadManifest(f"{folder.name}: expected a manifest of format {FORMAT} or older, found {content['format']!r}")
        if content[field] != _blake3(content, without=field):
            raise BadManifest(f"{folder.name}: the manifest is not the one that was written")
    except BadManifest:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadManifest(f"{folder.name}: {error!r}") from error
    return content


def read(folder: Path) -> Manifest:
    """Read the manifest of a version's folder and check it against the sizes and headers of the files.

    Raises BadManifest (also for an older format, which has digests of another kind), or OSError.
    """
    content = load(folder)
    if content["format"] not in (FORMAT, PARTIAL_FORMAT):
        raise BadManifest(f"{folder.name}: expected a manifest of format {FORMAT}, found {content['format']}")
    return parse(folder, content)


def parse(folder: Path, content: Mapping[str, Any]) -> Manifest:
    """Check the content returned by `load` against the sizes and headers of the files.

    Raises BadManifest or OSError.
    """
    try:
        layouts, others = [], []
        for name, entry in content["files"].items():
            if not is_file_name(name):
                raise BadManifest(f"{folder.name}: expected plain file names, found {name[:80]!r}")
            start = _check_file(folder / name, entry)
            if name.endswith(".safetensors"):
                layouts.append(parse_header(name, start, entry["size"]))
            else:
                others.append(name)
        check_one_file_each(layouts)
        version = dict(content["version"])
        slots = tuple((int(rank), str(digest)) for rank, digest in version.pop("slots"))
        record = VersionRecord.of(version | {"state": READY, "fingerprint": content["fingerprint"], "slots": slots})
        digests = {name: int(value, 16) for name, value in content["digests"].items()}
    except BadManifest:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadManifest(f"{folder.name}: {error!r}") from error
    except OSError as error:
        if error.errno not in _NO_SUCH_FILE:  # of the medium, not of the manifest
            raise
        raise BadManifest(f"{folder.name}: {error!r}") from error
    return Manifest(record, tuple(layouts), digests, tuple(others), content["format"] != PARTIAL_FORMAT)


def _check_file(path: Path, entry: Mapping[str, Any]) -> bytes:
    """Return the content of a checked file; for a safetensors file, its header."""
    size = path.stat().st_size
    if size != entry["size"]:
        raise BadManifest(f"{path.name}: expected {entry['size']} bytes, found {size}")
    with path.open("rb") as file:
        start = file.read(8) if path.suffix == ".safetensors" else file.read()
        if path.suffix == ".safetensors":
            start += file.read(min(int.from_bytes(start, "little"), size))
    if blake3(start).hexdigest() != entry["blake3"]:
        raise BadManifest(f"{path.name}: not the content that was written")
    return start


class ManifestCache:
    """Last two manifests of READY versions that were read. Callers must hold the lock of the catalogue."""

    def __init__(self) -> None:
        self._manifests: OrderedDict[tuple[str, int], Manifest] = OrderedDict()

    def get(self, model: str, number: int) -> Manifest | None:
        """Return a manifest, or None if it is not cached."""
        return self._manifests.get((model, number))

    def add(self, model: str, number: int, manifest: Manifest) -> None:
        """Add a manifest, in place of the oldest one if the cache is full."""
        self._manifests[model, number] = manifest
        while len(self._manifests) > _CACHED:
            self._manifests.popitem(last=False)

    def remove(self, model: str, number: int) -> None:
        """Remove a manifest; a no-op if it is not cached."""
        self._manifests.pop((model, number), None)


def verify(folder: Path, name: str, number: int, fingerprint: str) -> Manifest:
    """Check that a folder is the version of this fingerprint, sync its files, and return its manifest.

    A manifest of format 1 is replaced as by `redigest`. Raises DataLoss (CHECKSUM) or OSError.
    """
    what = f"models/{name}/versions/{number}"
    try:
        redigest(folder)
        found = read(folder)
    except BadManifest as error:
        raise DataLoss("CHECKSUM", f"{what}: {error}") from error
    if not found.whole:
        raise DataLoss("CHECKSUM", f"{what}: its manifest is that of a version that lacks pieces")
    record = found.record
    if (record.model, record.number, record.fingerprint) != (name, number, fingerprint):
        raise DataLoss(
            "CHECKSUM", f"{what}: its manifest is that of {record.name} with fingerprint {record.fingerprint}, not {fingerprint}"
        )
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
    content = load(folder)
    if content["format"] != 1:
        return
    found = parse(folder, content)
    with MappedFiles(folder, found.files) as files:
        difference = _difference(found.digests, _digests_1(files))
        if difference:
            raise BadManifest(f"{folder.name}: {difference}")
        digests = digest_tensors(files, _threads())
    write_file(folder / MANIFEST_FILE, encode_again(content, digests))
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
