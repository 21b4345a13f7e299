"""Requests that no client would send: made from the messages' descriptors, or damaged from good ones, with live names in them.

Everything is drawn from a `random.Random`: the long run has a seeded one, Hypothesis and atheris bring bytes (`Bytes`).
"""

import struct
from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from resharder.converters.wire.chunk_frame import ChunkHeader, frame, unframe
from resharder.v1 import direct_pb2, operator_pb2, publisher_pb2, server_pb2

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (publisher_pb2, server_pb2, operator_pb2, direct_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
UPLOAD = "/resharder.v1.PublisherService/UploadChunks"

INTS = (
    0,
    1,
    2,
    3,
    -1,
    7,
    63,
    64,
    255,
    1 << 16,
    1 << 31,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 32,
    (1 << 63) - 1,
    -(1 << 63),
    (1 << 64) - 1,
)
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e9, 1e20, 1e300, float("nan"), float("inf"), float("-inf"))
WAITS = (0.0, 0.0, 0.0, 0.005, -1.0, 1e9, float("nan"), float("inf"))  # a call must not wait for long
STRINGS = (
    "", " ", ".", "..", "/", "a/b", "../../etc/passwd", "models/", "models//versions/1", "models/policy/versions/-1", "servers/",
    "models/policy/versions/00000000000000000009", "models/policy/versions/١", "models/policy/publishers/0", "servers/../a",
    "models/../versions/1", "fleets/policy", "a\0b", "\n", "ä" * 40, "\U0001f600", "x" * 64, "x" * 65, "x" * 5000, "%s%n{0}",
    "__metadata__", "BF16", "F32", "U8", "BOOL", "config.json", "tokenizer.json", "resharder.json", "model.safetensors", "target",
    "strategy", "{}", "null", '{"architectures": ["LlamaForCausalLM"]}', '{"architectures": 3}', "pause", "apply", "gzip", "-",
    "0", "a", "b", "NaN", "policy", "draft",
)  # fmt: skip
BYTES = (b"", b"\0", b"{}", b"[]", b"null", b"\xff" * 8, b"x" * 2000, *(struct.pack("<q", n) * 3 for n in (0, 1, -1, 1 << 62)))
_RANGES = {
    Field.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    Field.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    Field.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    Field.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}
_ALIASES = {"number": "version", "to_version": "version", "id": "move", "install": "install"}


class Names:
    """Values that the daemon has lately given or been given, by field: with them requests get past the first check."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], deque[Any]] = defaultdict(lambda: deque(maxlen=8))
        self._samples: dict[str, deque[bytes]] = defaultdict(lambda: deque(maxlen=8))

    def sample(self, path: str, request: bytes) -> None:
        self._samples[path].append(request)

    def samples(self, path: str) -> Sequence[bytes]:
        return tuple(self._samples[path])

    def learn(self, message: Message, depth: int = 3) -> None:
        for field, value in message.ListFields():
            values = list(value)[:4] if field.is_repeated else [value]
            if field.cpp_type == Field.CPPTYPE_MESSAGE:
                if depth and not field.message_type.GetOptions().map_entry:
                    for part in values:
                        self.learn(part, depth - 1)
                continue
            for one in values:
                self._keep(field, one)

    def _keep(self, field: Field, value: Any) -> None:
        if isinstance(value, str | bytes) and len(value) > 200:
            return
        names = {field.name, _ALIASES.get(field.name, field.name)}
        if isinstance(value, str) and "/" in value:
            kinds = {"/versions/": "version", "/publishers/": "publisher", "servers/": "server"}
            names |= {name for part, name in kinds.items() if part in value}
            names |= {"owner"} if "/versions/" not in value else set()
        for seen in (self._seen[name, field.cpp_type] for name in names):
            if value in seen:
                seen.remove(value)
            seen.append(value)

    def known(self, field: Field) -> Sequence[Any]:
        return tuple(self._seen.get((field.name, field.cpp_type), ()))


def recent(random: Random, values: Sequence[Any]) -> Any:
    """One of them; the last ones more often."""
    return values[len(values) - 1 - int(len(values) * random.random() ** 3)]


def message(random: Random, kind: type[Message], names: Names, depth: int = 4) -> Message:
    """Any message of this kind."""
    made = kind()
    for field in kind.DESCRIPTOR.fields:
        if random.random() < 0.8:
            _set(random, made, field, names, depth)
    return made


def _set(random: Random, made: Message, field: Field, names: Names, depth: int) -> None:
    made.ClearField(field.name)
    if field.cpp_type == Field.CPPTYPE_MESSAGE:
        if depth <= 0:
            return
        if field.message_type.GetOptions().map_entry:
            for _ in range(random.randrange(3)):
                getattr(made, field.name)[random.choice(STRINGS)] = random.choice(STRINGS)
            return
        kind = GetMessageClass(field.message_type)
        if field.is_repeated:
            getattr(made, field.name).extend(message(random, kind, names, depth - 1) for _ in range(random.randrange(4)))
        else:
            getattr(made, field.name).CopyFrom(message(random, kind, names, depth - 1))
    elif field.is_repeated:
        getattr(made, field.name).extend(scalar(random, field, names) for _ in range(random.randrange(5)))
    else:
        setattr(made, field.name, scalar(random, field, names))


def scalar(random: Random, field: Field, names: Names) -> Any:
    """Mostly what is known, else what is odd."""
    kind, known = field.cpp_type, names.known(field)
    if field.name == "wait_seconds":
        return random.choice(WAITS)
    if known and random.random() < 0.75:
        return recent(random, known)
    if kind in _RANGES:
        low, high = _RANGES[kind]
        return min(high, max(low, random.choice(INTS) if random.random() < 0.9 else random.getrandbits(63) - (1 << 62)))
    if kind == Field.CPPTYPE_ENUM:
        return random.choice([*(value.number for value in field.enum_type.values), 99, -1])
    if kind == Field.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return random.choice(FLOATS)
    return random.choice(BYTES) if field.type == Field.TYPE_BYTES else random.choice(STRINGS)


def mutate(random: Random, made: Message, names: Names) -> None:
    """Changes one thing, at any depth."""
    field = random.choice(made.DESCRIPTOR.fields) if made.DESCRIPTOR.fields else None
    if field is None:
        return
    is_map = field.cpp_type == Field.CPPTYPE_MESSAGE and field.message_type.GetOptions().map_entry
    here = getattr(made, field.name)
    if field.cpp_type == Field.CPPTYPE_MESSAGE and not is_map and random.random() < 0.7:
        if not field.is_repeated:
            mutate(random, here, names)
            return
        if here:
            mutate(random, random.choice(here), names)
            return
    if field.is_repeated and not is_map and here and random.random() < 0.6:
        _rearrange(random, here, field, names)
    else:
        _set(random, made, field, names, 3)


def _rearrange(random: Random, values: Any, field: Field, names: Names) -> None:
    at, what = random.randrange(len(values)), random.randrange(3)
    if what == 0:
        del values[at]
    elif what == 1 and field.cpp_type == Field.CPPTYPE_MESSAGE:
        values.add().CopyFrom(values[at])
    elif what == 1:
        values.append(values[at])
    elif field.cpp_type != Field.CPPTYPE_MESSAGE:
        values[at] = scalar(random, field, names)


def damage(random: Random, data: bytes) -> bytes:
    """A bit, a cut, an end, a hole, or nothing that is left."""
    if not data:
        return bytes(random.getrandbits(8) for _ in range(random.randrange(12)))
    at, what = random.randrange(len(data)), random.randrange(5)
    if what == 0:
        return data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
    if what == 1:
        return data[:at]
    if what == 2:
        return data + random.choice(BYTES)
    if what == 3:
        return data[:at] + data[at + random.randrange(1, 9) :]
    return data[:at] + bytes(random.getrandbits(8) for _ in range(4)) + data[at:]


def request(random: Random, path: str, names: Names) -> bytes:
    """One message of a call: made anew, or a good one with a few things changed; now and then damaged as bytes."""
    samples = names.samples(path)
    if path == UPLOAD and samples and random.random() < 0.9:
        return chunk(random, recent(random, samples), names)
    kind = GetMessageClass(METHODS[path].input_type)
    if samples and random.random() < 0.6:
        made = kind.FromString(recent(random, samples))
        for _ in range(random.randrange(4)):
            mutate(random, made, names)
    else:
        made = message(random, kind, names)
    _bound(made)
    data = made.SerializeToString()
    return data if random.random() < 0.93 else bounded(kind, damage(random, data))


def _bound(made: Message) -> None:
    if "wait_seconds" in made.DESCRIPTOR.fields_by_name and 0.01 < made.wait_seconds <= 3600:
        made.wait_seconds = 0


def bounded(kind: type[Message], data: bytes) -> bytes:
    """Damage must not make a call wait."""
    try:
        made = kind.FromString(data)
    except DecodeError:
        return data
    _bound(made)
    return made.SerializeToString() if "wait_seconds" in kind.DESCRIPTOR.fields_by_name else data


def chunk(random: Random, good: bytes, names: Names) -> bytes:
    """A frame of the data stream, damaged in one of the ways that frames can be wrong, or as it is."""
    header, view, model = unframe(good)
    data, what = bytes(view), random.randrange(7)
    if what == 0:
        return good
    if what == 1:
        return damage(random, good)
    if what == 2:  # a header of somebody else's, the bytes whole
        field = random.choice(ChunkHeader._fields)
        width = 64 if field in ("version", "epoch", "checksum") else 32
        known = names.known(publisher_pb2.Chunk.DESCRIPTOR.fields_by_name[field])
        value = recent(random, known or INTS) if random.random() < 0.5 else random.choice(INTS)
        return frame(header._replace(**{field: value % (1 << width)}), data, model)
    if what == 3:  # other bytes, other lengths
        return frame(header, damage(random, data), model)
    if what == 4:
        return frame(header, data, random.choice(STRINGS) if random.random() < 0.5 else "")
    if what == 5:  # as another peer's protobuf may write it
        changed = publisher_pb2.Chunk.FromString(good)
        mutate(random, changed, names)
        return changed.SerializeToString()
    return frame(header, data, model) + random.choice(BYTES)


def requests(random: Random, path: str, names: Names) -> list[bytes]:
    """The messages of one call."""
    return (
        [request(random, path, names) for _ in range(random.randrange(5))]
        if METHODS[path].client_streaming
        else [request(random, path, names)]
    )


class Bytes(Random):
    """A Random whose choices are these bytes, and zeros after them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    @property
    def spent(self) -> bool:
        return self._at >= len(self._data)

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)
