"""Seals of snapshots: what nodes keep of a registry, and return, is what a daemon with the same key has given to them."""

import json
from pathlib import Path

from blake3 import blake3
from resharder.v1 import node_pb2

_LEAST_BYTES = 32
_CONTEXT = "resharder 2026 seals of snapshots of a registry"


def read_key(path: Path) -> bytes:
    """Return the key of a file with a secret, without white space around it. Raises OSError, ValueError for a short one."""
    secret = path.read_bytes().strip()
    if len(secret) < _LEAST_BYTES:
        raise ValueError(f"{path} has {len(secret)} bytes: expected a random secret of at least {_LEAST_BYTES}")
    return blake3(secret, derive_key_context=_CONTEXT).digest()


def seal_of(snapshot: node_pb2.Snapshot, key: bytes) -> bytes:
    """Return the seal of a snapshot: the keyed hash of all its other fields."""
    files = [[file.path, file.size_bytes, [block.hex() for block in file.blocks]] for file in snapshot.files]
    content = [snapshot.model, snapshot.registry, snapshot.term, snapshot.revision, files]
    return blake3(json.dumps(content).encode(), key=key).digest()
