"""Files and messages that another program has damaged or made up, and the code that reads them.

A target makes valid content, spoils a part of it, and reads it with the real code. It returns `accepted` or the name of the
documented error; any other exception, and any change of other data, is a fault.
"""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from resharder.client.errors import UsageError
from resharder.client.inference import version_page
from resharder.client.tools.check import read_config
from resharder.client.versions.source import open_source
from resharder.converters.errors import ConversionError
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.storage.files import INDEX_FILE, MappedFiles, index_json, lay_out
from resharder.converters.wire.chunk_frame import ChunkHeader, frame, unframe
from resharder.converters.wire.direct import copies_from_proto, layout_from_proto, layout_to_proto
from resharder.server import config
from resharder.server.archive import archived as markers
from resharder.server.fleets.persistence import FleetFiles, stored
from resharder.server.infra.event_log import Events
from resharder.server.state.errors import DaemonError
from resharder.server.state.fleet import Fleet
from resharder.server.store import manifest
from resharder.server.store.store import Store
from resharder.v1 import direct_pb2

from tests.support import store_versions
from tests.support.fuzzing import Names, damage, message, mutate

ACCEPTED = "accepted"
_DEEP, _LONG = "@deep@", "@long@"
_RAW = {f'"{_DEEP}"'.encode(): b"[" * 50_000 + b"]" * 50_000, f'"{_LONG}"'.encode(): b"9" * 5000}
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 1 << 31, 1 << 63, 1 << 64, -(1 << 63), 0.5, 1e300, float("nan"), float("inf"), float("-inf"),
    "", "0", "x", "..", "../../x", "/", "a/b", "a\0b", "\ud800", "ä", "x" * 300, "models/policy/versions/1", "BF16", "F32",
    [], [[]], [0], [1, 2], [None], ["x"], {}, {"": 0}, {"x": []}, _DEEP, _LONG,
)  # fmt: skip
_WHOLE = (b"", b"\0", b"{}", b"[]", b"null", b"0", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b"NaN", b"9" * 5000, b"[" * 100_000)


def spoil(random: Random, content: bytes) -> bytes:
    """Return content that is not what was written: other values, a damaged byte, or something else as a whole."""
    chance = random.random()
    if chance < 0.1:
        return random.choice(_WHOLE)
    if chance < 0.45:
        for _ in range(random.choice((1, 1, 3))):
            content = damage(random, content)
        return content
    try:
        return encoded_json(spoiled_value(random, json.loads(content)))
    except ValueError:
        return damage(random, content)


def spoiled_value(random: Random, value: Any) -> Any:
    """Return a JSON value with another value, key or length somewhere."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key, changed = random.choice(list(value)), dict(value)
        chance = random.random()
        if chance < 0.1:
            del changed[key]
        elif chance < 0.2:
            changed[str(random.choice(_VALUES))] = changed.pop(key)
        elif chance < 0.25:
            changed[str(random.choice(_VALUES))] = random.choice(_VALUES)
        else:
            changed[key] = spoiled_value(random, value[key])
        return changed
    if isinstance(value, list) and value and random.random() < 0.85:
        at = random.randrange(len(value))
        chance = random.random()
        if chance < 0.15:
            return value[:at] + value[at + 1 :]
        if chance < 0.3:
            return [*value, value[at]]
        return [*value[:at], spoiled_value(random, value[at]), *value[at + 1 :]]
    return random.choice(_VALUES)


def encoded_json(value: Any) -> bytes:
    """Encode a value as JSON, with the places of deep and long ones filled in."""
    content = json.dumps(value).encode()
    for place, raw in _RAW.items():
        content = content.replace(place, raw)
    return content


@dataclass
class Workspace:
    """A folder for a target's files, and valid content that is made once."""

    folder: Path
    made: dict[str, Any] = field(default_factory=dict)

    def fresh(self) -> Path:
        """Return an empty folder."""
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()
        return self.folder / "work"

    def once(self, name: str, make: Callable[[Path], Any]) -> Any:
        """Return what `make` makes in a folder of this name."""
        if name not in self.made:
            (self.folder / name).mkdir()
            self.made[name] = make(self.folder / name)
        return self.made[name]


@contextmanager
def workspace() -> Iterator[Workspace]:
    """Provide a bench in memory."""
    with tempfile.TemporaryDirectory(prefix="resharder-fuzz-", dir="/dev/shm") as folder:
        yield Workspace(Path(folder))


# The daemon's files

_CONFIG = b"""listen: 127.0.0.1:7677
web_listen: 127.0.0.1:0
store: /dev/shm/x
keep_count: 2
lease_seconds: 3.5
pause_mode: wait
checks: {smoke: [true], line: "sh -c 'exit 0'"}
security:
  certificate: /x/cert.pem
  key: /x/key.pem
  tokens: /x/tokens
  roles: {trainer: ["publisher:policy"], ops: [operator]}
"""


def configuration(random: Random, workspace: Workspace) -> str:
    """Read the daemon's configuration."""
    path = workspace.fresh() / "config.yaml"
    content = _CONFIG
    if random.random() < 0.5:
        lines = content.split(b"\n")
        at = random.randrange(len(lines))
        lines[at] = lines[at].partition(b":")[0] + b": " + encoded_json(random.choice(_VALUES))
        content = b"\n".join(lines)
    else:
        content = spoil(random, content)
    path.write_bytes(content)
    try:
        config.load(path, {})
        outcome = ACCEPTED
    except config.ConfigError as error:
        outcome = str(error)
    assert "\n" not in outcome, f"expected one line, got {outcome}"
    return ACCEPTED if outcome == ACCEPTED else "ConfigError"


def _store(folder: Path) -> Path:
    store = Store(folder / "store", limit_bytes=1 << 24)
    try:
        epoch = store_versions.claim(store)
        for step in range(3):
            store_versions.publish(store, epoch, step)
        store_versions.settle(store)
        store.lifecycle.retire("policy", [1])
        store_versions.settle(store)
    finally:
        store.close()
    return folder / "store"


_NOT_TENSORS = ("claim.json", "history.jsonl", "resharder.json", "config.json", "nonce")


def store_folder(random: Random, workspace: Workspace) -> str:
    """Start a store whose small files are damaged: versions that are whole stay READY, and no number is used again."""
    folder = workspace.fresh() / "store"
    shutil.copytree(workspace.once("template", _store), folder)
    names = sorted(path for path in folder.rglob("*") if path.name in _NOT_TENSORS and "retired" not in path.parts)
    damaged = set(random.sample(names, random.choice((1, 1, 2))))
    for path in damaged:
        path.write_bytes(spoil(random, path.read_bytes()))
    whole = {number for number in (2, 3) if not any(f"{number:08}" in path.parts for path in damaged)}
    try:
        store = Store(folder, limit_bytes=1 << 24)
    except DaemonError as error:
        return error.reason
    try:
        ready = set(store_versions.numbers(store))
        assert whole <= ready <= {2, 3}, f"READY are {ready}, expected {whole} at least; damaged: {damaged}"
        for number in ready:
            with store.reader.open("policy", number) as files:
                assert (files.arrays["a"] == number).all(), f"version {number} has other bytes"
        record = store_versions.publish(store, store_versions.claim(store, "another job"), 9)
        assert record.number > 3 or any(path.name == "claim.json" for path in damaged), f"number {record.number} is used again"
        assert record.number > max(ready, default=0)
    finally:
        store.close()
    return ACCEPTED


def version_manifest(random: Random, workspace: Workspace) -> str:
    """Read a manifest that hashes to its own hash, and has other fields."""
    source = next((workspace.once("template", _store) / "models/policy/versions").iterdir())
    folder = workspace.fresh() / source.name
    shutil.copytree(source, folder)
    content = manifest.load(folder)
    for _ in range(random.choice((1, 2))):
        content = spoiled_value(random, content)
    if isinstance(content, dict):
        content |= {"blake3": manifest._blake3(content, without="blake3")}
    try:
        (folder / manifest.MANIFEST_FILE).write_bytes(encoded_json(content))
        found = manifest.read(folder)
    except manifest.BadManifest:
        return "BadManifest"
    assert type(found.record.number) is int
    assert type(found.record.epoch) is int
    assert type(found.record.step) is int
    return ACCEPTED


def archive_marker(random: Random, workspace: Workspace) -> str:
    """Decode the marker of an archived version."""
    files = {"config.json": markers.File(2, "00"), "model.safetensors": markers.File(9, "11")}
    objects = {f"{name}.delta": file for name, file in (files | {"pieces.json": markers.File(3, "22")}).items()}
    base = markers.BaseVersion(1, "another")
    archived = markers.Archived(
        "policy", 2, "file:///x", 9, "fingerprint", 1.0, 1, files, "0a", objects, base, False, 1, True, "0b"
    )
    content = json.loads(markers.encode(archived))
    if random.random() < 0.5:
        content = spoiled_value(random, content)
        if isinstance(content, dict):
            content.pop("blake3", None)
            content["blake3"] = markers.hash_of(content)
        raw = encoded_json(content)
    else:
        raw = spoil(random, encoded_json(content))
    try:
        found = markers.decode(raw, "file:///x")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return type(error).__name__
    assert found.size_bytes >= 0
    return ACCEPTED


def fleets(random: Random, workspace: Workspace) -> str:
    """Load the files of fleets: each that is whole is there, and the count of starts goes on."""
    folder = workspace.fresh()
    whole = Fleet("whole", "policy")
    (folder / "whole.json").write_bytes(stored(whole, 5.0))
    (folder / "other.json").write_bytes(spoil(random, stored(Fleet("other", "policy"), 5.0)))
    if random.random() < 0.3:
        (folder / "starts").write_bytes(random.choice((*_WHOLE, b"7\n", b"-1", b" 12 ", b"1" * 30)))
    files = FleetFiles(folder)
    found = files.load(9.0)
    assert found["whole"] == whole, f"{found['whole']} is not {whole}"
    assert 1 <= files.next_start() < 1 << 40
    for fleet in found.values():
        files.save(fleet, 9.0)
        assert stored(fleet, 9.0)
    return ACCEPTED if len(found) == 2 else "fleet_unreadable"


def events(random: Random, workspace: Workspace) -> str:
    """Open a log of events with damaged lines: the others are there, and new ones follow."""
    folder = workspace.fresh()
    log = Events(folder)
    for name in "abc":
        log.add("fleet", f"fleets/{name}", "changed", "reason", key="value")
    log.close()
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    at = random.randrange(len(lines))
    lines[at] = spoil(random, lines[at])
    (folder / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n" * (random.random() < 0.9))
    log = Events(folder)
    try:
        added = log.add("fleet", "fleets/d", "changed")
        known = log.last(9)
        others = {f"fleets/{name}" for number, name in enumerate("abc") if number != at}
        assert {event.subject for event in known} >= {"fleets/d"}
        assert others <= {event.subject for event in known} or at == len(lines) - 1
        assert added.id == max(event.id for event in known)
        for event in known:
            event.about("fleets/a")
    finally:
        log.close()
    return ACCEPTED


# Checkpoints

_SPECS = (TensorSpec("w", "BF16", (4, 8)), TensorSpec("v", "F32", (3,)), TensorSpec("u", "U8", ()))


def _checkpoint(folder: Path) -> Path:
    layouts = lay_out(_SPECS, max_file_bytes=64)
    for layout in layouts:
        (folder / layout.path).write_bytes(layout.header + bytes(layout.size - len(layout.header)))
    (folder / INDEX_FILE).write_bytes(index_json(layouts))
    (folder / "config.json").write_bytes(b'{"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "layers": [1, 2]}')
    return folder


def checkpoint(random: Random, workspace: Workspace) -> str:
    """Open a checkpoint to import, and read all of its tensors."""
    folder = workspace.fresh() / "checkpoint"
    shutil.copytree(workspace.once("checkpoint", _checkpoint), folder)
    path = random.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    if path.suffix == ".safetensors" and random.random() < 0.8:
        length = int.from_bytes(content[:8], "little")
        header = spoil(random, content[8 : 8 + length].rstrip())
        content = struct.pack("<Q", len(header)) + header + content[8 + length :]
    else:
        content = spoil(random, content)
    path.write_bytes(content)
    try:
        read_config(folder)
        with open_source(folder) as source:
            for name, spec in source.specs.items():
                (_, _, bits), *_ = source.parts([(name, full_box(spec.shape))])
                assert bits.nbytes == spec.size, f"{name} has {bits.nbytes} bytes, expected {spec.size}"
                bits.copy()
    except UsageError:
        return "UsageError"
    return ACCEPTED


def mapped_version(random: Random, workspace: Workspace) -> str:
    """Map the tensors of a version's folder, as a rank or a worker on the daemon's host does."""
    from resharder.converters.storage.files import read_layout

    folder = workspace.fresh() / "checkpoint"
    shutil.copytree(workspace.once("checkpoint", _checkpoint), folder)
    path = random.choice(sorted(folder.glob("*.safetensors")))
    path.write_bytes(damage(random, path.read_bytes()))
    try:
        with MappedFiles(folder, read_layout(folder)) as files:
            for name, array in files.arrays.items():
                assert array.nbytes == files.specs[name].size
                array.copy()
            del array
    except ValueError:
        return "ValueError"
    return ACCEPTED


# Messages


def chunk_frame(random: Random, workspace: Workspace) -> str:
    """Read a frame of the data stream."""
    header = ChunkHeader(*(random.getrandbits(bits) for bits in (64, 64, 32, 32, 64)))
    content = frame(header, random.randbytes(random.choice((0, 1, 127, 128, 300))), random.choice(("", "policy")))
    try:
        _, data, model = unframe(damage(random, content) if random.random() < 0.9 else spoil(random, content))
    except ValueError:
        return "ValueError"
    assert len(data) <= len(content) + 2000
    assert isinstance(model, str)
    return ACCEPTED


@cache
def _layout() -> direct_pb2.MemoryLayout:
    pieces = tuple(Piece(s.name, full_box(s.shape), s.name, 0, _strides(s.shape)) for s in _SPECS)
    return layout_to_proto(pack({0: Layout({s.name: s for s in _SPECS}, pieces)}))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[at + 1 :])) for at in range(len(shape)))


def direct_message(random: Random, workspace: Workspace) -> str:
    """Read a layout or copies of the direct path."""
    if random.random() < 0.6:
        made: Any = direct_pb2.MemoryLayout()
        made.CopyFrom(_layout())
        for _ in range(random.choice((1, 1, 3))):
            mutate(random, made, Names())
        kind: Callable[[Any], Any] = lambda each: layout_from_proto(each, 0)  # noqa: E731
    else:
        made, kind = message(random, direct_pb2.DirectCopies, Names()), copies_from_proto
    try:
        kind(made)
    except ConversionError as error:
        return type(error).__name__
    return ACCEPTED


def shared_page(random: Random, workspace: Workspace) -> str:
    """Read and write a server's page in shared memory, which another process has overwritten."""
    page = version_page.Page(workspace.fresh() / "page", lambda: 5.0)
    try:
        for rank in range(3):
            page.write(rank, 7)
        content = page.path.read_bytes()
        number, _, _ = version_page._HEADER.unpack_from(content)
        if random.random() < 0.5:
            payload = spoil(random, content[version_page._HEADER.size :])
            check = version_page._checksum(number + 1, payload)
            content = version_page._HEADER.pack(number + 1, len(payload), check) + payload
        else:
            content = damage(random, content)
        page.path.write_bytes(content)
        journal = page.read()
        assert type(journal.version) is int
        assert all(type(version) is int for version in journal.between(0.0, 9.0))
        page.write(0, 8)
        readable = journal.ranks and journal.ranks[0][0] != -1
        assert page.version in (0, 8) or readable, f"an unreadable page names version {page.version}"
        return ACCEPTED if readable else "unreadable"
    finally:
        page.close()
