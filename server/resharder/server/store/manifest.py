"""What the daemon knows of one version, and `resharder.json`, the manifest that says it in the version's folder.

The manifest is written last, so a folder with a valid one is complete. Its `blake3` is that of everything else in it. Its
fingerprint, by which the version is known, is the blake3 of the manifest as first written. Format 1 has the digests of protocol
revision 1, and its fingerprint is also the hash of the rest; `renewal.py` makes format 2 of it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from blake3 import blake3
from resharder.converters.storage.files import FileLayout, parse_header

MANIFEST_FILE = "resharder.json"
FORMAT = 2
_HASH = {1: "fingerprint", 2: "blake3"}
"""The field of a format that has the blake3 of the rest."""

UPLOADING, READY, RETIRED, ABORTED = "UPLOADING", "READY", "RETIRED", "ABORTED"


@dataclass(frozen=True)
class VersionRecord:
    """Times are seconds since 1970. `slots` has the blake3 of each rank's digests, so that a repeated seal can be compared."""

    model: str
    number: int
    state: str
    epoch: int
    step: int
    job: str
    size_bytes: int
    tensor_count: int
    create_time: float
    ready_time: float = 0.0
    fingerprint: str = ""
    reason: str = ""
    slots: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        return f"models/{self.model}/versions/{self.number}"

    @property
    def ahead_fingerprint(self) -> str:
        """What servers hold it by until it is READY."""
        return f"ahead-{blake3(f'{self.job}/{self.epoch}/{self.number}/{self.create_time!r}'.encode()).hexdigest()[:32]}"

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> Self:
        """What was written down of one, also by a later release that knows more of it. Raises TypeError where something lacks."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in said.items() if name in known})


@dataclass(frozen=True)
class Manifest:
    """A READY version: its safetensors files, the digest of each tensor, and the names of its other files."""

    record: VersionRecord
    files: tuple[FileLayout, ...]
    digests: dict[str, int]
    other_files: tuple[str, ...]


class BadManifest(ValueError):
    """The folder is no complete version; the message says why."""


def encode(
    record: VersionRecord, files: Mapping[str, bytes], sizes: Mapping[str, int], digests: Mapping[str, int]
) -> tuple[bytes, str]:
    """(manifest, fingerprint). `files` has every file's content (of safetensors files: the header), `sizes` the sizes."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": {k: v for k, v in asdict(record).items() if k not in ("fingerprint", "state", "reason")},
        "files": {name: {"size": sizes[name], "blake3": blake3(files[name]).hexdigest()} for name in sorted(files)},
        "digests": _hexadecimal(digests),
    }
    content["fingerprint"] = _blake3(content)
    return _encoded(content), str(content["fingerprint"])


def encode_again(content: Mapping[str, Any], digests: Mapping[str, int]) -> bytes:
    """The manifest that `load` gave, in this format and with these digests, under the same fingerprint."""
    return _encoded({**content, "format": FORMAT, "digests": _hexadecimal(digests)})


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
    """What a manifest of any format has in it, as it was written. Raises BadManifest, OSError where it cannot be read."""
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_bytes())
        field = _HASH.get(content["format"])
        if field is None:
            raise BadManifest(f"{folder.name}: expected a manifest of format {FORMAT} or older, found {content['format']!r}")
        if content[field] != _blake3(content, without=field):
            raise BadManifest(f"{folder.name}: the manifest is not the one that was written")
    except BadManifest:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"{folder.name}: {error!r}") from error
    return content


def read(folder: Path) -> Manifest:
    """The manifest of a version's folder, checked against its files' sizes and headers. Raises BadManifest, also for one of an
    older format, with digests of another kind; OSError."""
    content = load(folder)
    if content["format"] != FORMAT:
        raise BadManifest(f"{folder.name}: expected a manifest of format {FORMAT}, found {content['format']}")
    return parse(folder, content)


def parse(folder: Path, content: Mapping[str, Any]) -> Manifest:
    """What `load` gave, checked against the files' sizes and headers. Raises BadManifest, OSError."""
    try:
        layouts, others = [], []
        for name, said in content["files"].items():
            start = _check_file(folder / name, said)
            if name.endswith(".safetensors"):
                layouts.append(parse_header(name, start, said["size"]))
            else:
                others.append(name)
        version = dict(content["version"])
        slots = tuple((int(rank), str(digest)) for rank, digest in version.pop("slots"))
        record = VersionRecord.of(version | {"state": READY, "fingerprint": content["fingerprint"], "slots": slots})
        digests = {name: int(value, 16) for name, value in content["digests"].items()}
    except BadManifest:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifest(f"{folder.name}: {error!r}") from error
    return Manifest(record, tuple(layouts), digests, tuple(others))


def _check_file(path: Path, said: Mapping[str, Any]) -> bytes:
    """The file's content, of a safetensors file its header."""
    size = path.stat().st_size
    if size != said["size"]:
        raise BadManifest(f"{path.name}: expected {said['size']} bytes, found {size}")
    with path.open("rb") as file:
        start = file.read(8) if path.suffix == ".safetensors" else file.read()
        if path.suffix == ".safetensors":
            start += file.read(min(int.from_bytes(start, "little"), size))
    if blake3(start).hexdigest() != said["blake3"]:
        raise BadManifest(f"{path.name}: not the content that was written")
    return start
