"""The registry of a daemon in an empty folder, from the snapshots that nodes return (`nodes/snapshots.py`).

    <root>/from-nodes.part/     the folder's future content, until it is moved to its place. `term.json` is written last

Of each model the newest whole snapshot counts: that of the highest term, and in it of the highest revision. All snapshots must be
of one registry, and those of one term and revision must be equal. What is restored lacks every piece of its versions; nodes hold
them. Terms and numbers go on above those in the snapshots: the daemon before may have assigned some that no node was told.
"""

import hmac
import json
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

import structlog
from blake3 import blake3
from resharder.converters.json_input import is_file_name, parse_json
from resharder.converters.wire.term import Term, parse_term
from resharder.server.infra.filesystem import make_folder, move, sync, touching, write_file
from resharder.server.standby.seals import seal_of
from resharder.server.standby.tenure import TERM_FILE, write_term
from resharder.server.state.errors import FailedPrecondition, InvalidArgument
from resharder.server.state.version import LAST_NUMBER, MODEL_NAME
from resharder.server.store.catalogue import parse_claim
from resharder.server.store.partial import PIECES_FILE, with_nodes
from resharder.v1 import node_pb2

PART = "from-nodes.part"
_CONTENT = ("drained_nodes.json", "fleets", "models")
_MOST_BLOCKS = 1 << 16  # of a snapshot
_SKIPPED = 100  # numbers of versions and jobs above the last ones in a snapshot
_SHARED = re.compile(r"drained_nodes\.json|fleets/starts|fleets/[A-Za-z0-9][A-Za-z0-9._-]{0,63}\.json")
_OF_MODEL = re.compile(r"claim\.json|files/[0-9]{1,20}\.[0-9]{1,20}/[^/]+|versions/[0-9]{8,20}/[^/]+")
_log = structlog.get_logger("resharder.standby")


class SnapshotsDiffer(FailedPrecondition):
    """Snapshots that cannot be of one registry. The message names the nodes that returned them."""


class ReturnedSnapshots:
    """Snapshots that nodes have returned, and their blocks. Thread-safe.

    `key`: key of their seals; None takes snapshots without seals, and with any.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._lock, self._key = threading.Lock(), key
        self._found: dict[str, dict[tuple[int, int], tuple[str, node_pb2.Snapshot]]] = {}  # by model, term and revision
        self._blocks: dict[bytes, bytes] = {}
        self._registry = "", ""  # and the first node that returned one of it
        self.nodes: frozenset[str] = frozenset()
        """Ids of the nodes that have returned something."""
        self.conflict: SnapshotsDiffer | None = None
        """Why no registry can be made of them."""

    def put(self, node: str, snapshots: Iterable[node_pb2.Snapshot], blocks: Iterable[bytes]) -> list[bytes]:
        """Add what a node returns, and return the hashes of blocks that are still needed of it.

        Raises InvalidArgument (NODE) for what is no snapshot, SnapshotsDiffer (SNAPSHOTS_DIFFER), and nothing has changed.
        """
        given = list(snapshots)
        for each in given:
            _check(each, self._key)
        with self._lock:
            try:
                for each in given:
                    self._check_against_others(node, each)
            except SnapshotsDiffer as error:
                self.conflict = error
                raise
            for each in given:
                self._registry = self._registry if self._registry[0] else (each.registry, node)
                self._found.setdefault(each.model, {}).setdefault((each.term, each.revision), (node, each))
                self.nodes = self.nodes | {node}
            asked = {digest for each in given for digest in self._lacking(each)}
            self._blocks |= {digest: block for block in blocks if (digest := blake3(block).digest()) in asked}
            newest = {model: _key(each) for model, each in self._whole().items()}
            wanted = (each for each in given if _key(each) > newest.get(each.model, (0, 0)))
            return list(dict.fromkeys(digest for each in wanted for digest in self._lacking(each)))

    def newest(self) -> dict[str, node_pb2.Snapshot]:
        """Return the newest whole snapshot of each model."""
        with self._lock:
            return self._whole()

    def content(self, file: node_pb2.SnapshotFile) -> bytes:
        """Return the content of a file of a whole snapshot."""
        return b"".join(self._blocks[digest] for digest in file.blocks)

    def _check_against_others(self, node: str, snapshot: node_pb2.Snapshot) -> None:
        registry, first = self._registry
        if registry and snapshot.registry != registry:
            raise SnapshotsDiffer(
                "SNAPSHOTS_DIFFER",
                f"nodes/{first} keeps registry {registry}, and nodes/{node} registry {snapshot.registry}: stop the nodes of the "
                "one that this daemon is not to go on with",
            )
        other, known = self._found.get(snapshot.model, {}).get(_key(snapshot), ("", snapshot))
        if known != snapshot:
            raise SnapshotsDiffer(
                "SNAPSHOTS_DIFFER",
                f"nodes/{other} and nodes/{node} return different registries of model {snapshot.model!r} with the same term "
                f"{snapshot.term} and revision {snapshot.revision}: stop the node that you do not trust",
            )

    def _lacking(self, snapshot: node_pb2.Snapshot) -> list[bytes]:
        return [digest for file in snapshot.files for digest in file.blocks if digest not in self._blocks]

    def _whole(self) -> dict[str, node_pb2.Snapshot]:
        whole = {
            model: [each for _, each in sorted(found.items(), reverse=True) if not self._lacking(each[1])]
            for model, found in self._found.items()
        }
        return {model: found[0][1] for model, found in whole.items() if found}


def prepare(root: Path) -> None:
    """Check that a locked folder is empty; remove what an earlier start has begun to restore.

    Raises FailedPrecondition (STORE_IN_USE), MediumRefused.
    """
    if unfinished(root):
        for name in (*_CONTENT, PART):
            _remove(root / name)
    with touching(root, "reading"):
        names = sorted(path.name for path in root.iterdir() if path.name.partition(".")[0] not in ("lock", "nonce"))
    if names:
        raise FailedPrecondition(
            "STORE_IN_USE",
            f"{root} is not empty, it has {', '.join(names[:8])}: start without this option to go on with that, or name an "
            "empty --store",
        )


def unfinished(root: Path) -> bool:
    """Return whether an earlier start has not finished to restore a folder. One that has leaves nothing else behind."""
    if (root / PART).exists() and (root / TERM_FILE).exists():
        _remove(root / PART)
    return (root / PART).exists()


def restore(root: Path, returned: ReturnedSnapshots) -> Term:
    """Make the folder that of a daemon which goes on with what nodes have returned, and return its term.

    Raises InvalidArgument (NODE), MediumRefused; the next start begins anew then.
    """
    snapshots, part = returned.newest(), make_folder(root / PART)
    for snapshot in sorted(snapshots.values(), key=_key):  # the newest last: its shared files count
        for file in snapshot.files:
            _write(part / file.path, file.size_bytes, _continued(file.path, returned.content(file), returned.nodes))
    for name in _CONTENT:
        if (part / name).exists():
            move(part / name, root / name)
    sync(root)
    newest = max(snapshots.values(), key=_key)
    term = Term(newest.registry, newest.term + 1)
    write_term(root, term)
    _remove(part)
    return term


def versions_of(snapshots: Mapping[str, node_pb2.Snapshot]) -> list[str]:
    """Return the resource names of the versions in snapshots."""
    folders = {PurePosixPath(file.path).parent for each in snapshots.values() for file in each.files}
    return [f"models/{each.parts[1]}/versions/{int(each.name)}" for each in sorted(folders) if each.parts[2:3] == ("versions",)]


def _continued(path: str, content: bytes, nodes: Collection[str]) -> bytes:
    """Return the content of a file as the next daemon goes on with it."""
    if path.endswith("/claim.json") and path.count("/") == 2:
        try:
            parse_claim(content)
            found = parse_json(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument("NODE", f"{path}: {error!r}") from error
        last = {name: min(found[name] + _SKIPPED, LAST_NUMBER) for name in ("version", "epoch")}
        return json.dumps(found | last).encode()
    return with_nodes(content, nodes) if path.endswith(f"/{PIECES_FILE}") and "/versions/" in path else content


def _check(snapshot: node_pb2.Snapshot, key: bytes | None) -> None:
    """Raise InvalidArgument (NODE) unless a snapshot can be one of its model."""
    problem = ""
    if not MODEL_NAME.fullmatch(snapshot.model):
        problem = "expected the name of a model"
    elif parse_term(f"{snapshot.registry}/{snapshot.term}") is None or not snapshot.revision:
        problem = "expected the id of a registry, a term and a revision"
    elif key is not None and not hmac.compare_digest(snapshot.seal, seal_of(snapshot, key)):
        problem = "it is not sealed with this daemon's registry_key: give it the key of the daemon before it"
    elif sum(len(file.blocks) for file in snapshot.files) > _MOST_BLOCKS:
        problem = f"expected at most {_MOST_BLOCKS} blocks"
    elif len({file.path for file in snapshot.files}) != len(snapshot.files):
        problem = "expected each file once"
    else:
        wrong = [file.path for file in snapshot.files if not _is_registrys(snapshot.model, file)]
        problem = f"expected files of a registry, got {wrong[0][:100]!r}" if wrong else ""
    if problem:
        raise InvalidArgument("NODE", f"the snapshot of model {snapshot.model[:64]!r}: {problem}")


def _is_registrys(model: str, file: node_pb2.SnapshotFile) -> bool:
    own = file.path.removeprefix(f"models/{model}/")
    known = _SHARED.fullmatch(file.path) if own == file.path else _OF_MODEL.fullmatch(own)
    return bool(known) and is_file_name(file.path.rpartition("/")[2]) and file.size_bytes >= 0


def _key(snapshot: node_pb2.Snapshot) -> tuple[int, int]:
    return snapshot.term, snapshot.revision


def _write(path: Path, size: int, content: bytes) -> None:
    """Write a file; a safetensors file is as long as it will be, and a hole behind its header."""
    make_folder(path.parent)
    write_file(path, content)
    if path.suffix == ".safetensors" and size > len(content):
        with touching(path, "writing"), path.open("r+b") as file:
            file.truncate(size)
        sync(path)


def _remove(path: Path) -> None:
    with touching(path, "removing"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
