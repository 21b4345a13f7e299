"""Snapshots of the daemon's registry that a node keeps, in its memory, and returns to a daemon that goes on elsewhere."""

import threading
from collections.abc import Callable, Iterable

import grpc
import structlog
from blake3 import blake3
from resharder.converters.wire.ranges import PIECE_BYTES
from resharder.server.node.daemon_client import DaemonClient
from resharder.v1 import node_pb2

_RETRY_SECONDS = 2.0
_CALL_BYTES = 1 << 20  # of blocks in one call: the least that a daemon may admit is 2 MiB
_MOST_BYTES = 64 * PIECE_BYTES  # of one model's blocks
_log = structlog.get_logger("resharder.node")


_Revision = tuple[str, int, int]
"""Registry, term and revision."""


class KeptSnapshots:
    """The newest whole snapshot of each model. Thread-safe. Call `start`, then `close`.

    Args:
        daemon: Calls of the daemon.
        node: Id of the node.
        changed: Called once a further snapshot is kept.
    """

    def __init__(self, daemon: DaemonClient, node: str, changed: Callable[[], object]) -> None:
        self._daemon, self._node, self._changed = daemon, node, changed
        self._lock = threading.Condition()
        self._wanted: dict[str, _Revision] = {}
        self._asked: dict[str, _Revision] = {}  # wanted when it was fetched last: what came may be newer
        self._kept: dict[str, node_pb2.Snapshot] = {}
        self._blocks: dict[bytes, bytes] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._loop, name="snapshots", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Fetch nothing any longer."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=15)

    def revisions(self) -> list[node_pb2.SnapshotRevision]:
        """Return the revision of each model's snapshot."""
        with self._lock:
            return [
                node_pb2.SnapshotRevision(model=model, revision=each.revision, registry=each.registry, term=each.term)
                for model, each in sorted(self._kept.items())
            ]

    def follow(self, newest: Iterable[node_pb2.SnapshotRevision]) -> None:
        """Fetch snapshots of other revisions than the kept ones. A daemon that names none has none yet: all are kept."""
        with self._lock:
            wanted = {each.model: (each.registry, each.term, each.revision) for each in newest}
            if wanted and wanted != self._wanted:
                self._wanted = wanted
                self._lock.notify_all()

    def fetches(self) -> bool:
        """Return whether a snapshot is on its way, so that there is soon something to report."""
        with self._lock:
            return bool(self._due())

    def give(self) -> list[str]:
        """Return all snapshots to a daemon without a registry, and return the names of their models.

        Raises grpc.RpcError, OSError.
        """
        with self._lock:
            snapshots, blocks = list(self._kept.values()), self._blocks
        sent = list[bytes]()
        while snapshots:
            wanted = self._daemon.put_snapshots(self._node, snapshots, [blocks[digest] for digest in sent])
            sent, size = [], 0
            for digest in wanted:
                if digest in blocks and (not sent or size + len(blocks[digest]) <= _CALL_BYTES):
                    sent.append(digest)
                    size += len(blocks[digest])
            if not sent:
                break
        return [each.model for each in snapshots]

    def _due(self) -> list[str]:
        """Return the models whose newest snapshot has not been fetched. Callers hold the lock."""
        return [model for model, revision in self._wanted.items() if self._asked.get(model) != revision]

    def _loop(self) -> None:
        failed = ""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._ended or self._due())
                if self._ended:
                    return
                due = {model: self._wanted[model] for model in self._due()}
            try:
                for model, revision in due.items():
                    self._keep(revision, *self._fetch(model))
                failed = ""
            except (grpc.RpcError, OSError, ValueError) as error:
                reason = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
                if reason != failed:
                    _log.warning("snapshot_not_kept", reason=reason)
                failed = reason
                with self._lock:
                    self._lock.wait_for(lambda: self._ended, _RETRY_SECONDS)
            else:
                self._changed()

    def _fetch(self, model: str) -> tuple[node_pb2.Snapshot, dict[bytes, bytes]]:
        """Return a whole snapshot, and its blocks. Raises grpc.RpcError, OSError, ValueError for other blocks than its own."""
        with self._lock:
            blocks = dict(self._blocks)
        while True:
            answer = self._daemon.snapshot(self._node, model, list(blocks))
            needed = {digest for file in answer.snapshot.files for digest in file.blocks}
            blocks |= {blake3(block).digest(): block for block in answer.blocks}
            blocks = {digest: block for digest, block in blocks.items() if digest in needed}
            if needed == blocks.keys():
                return answer.snapshot, blocks
            if not answer.blocks or sum(map(len, blocks.values())) > _MOST_BYTES:
                raise ValueError(f"the daemon does not send {len(needed - blocks.keys())} blocks of the snapshot of {model!r}")

    def _keep(self, asked: _Revision, snapshot: node_pb2.Snapshot, blocks: dict[bytes, bytes]) -> None:
        """Replace a model's snapshot, which came once `asked` was wanted.

        Those of another registry, and of models that the daemon names no longer, are dropped.
        """
        with self._lock:
            kept = {**self._kept, snapshot.model: snapshot}
            self._kept = {m: each for m, each in kept.items() if each.registry == snapshot.registry and m in self._wanted}
            self._asked = {m: each for m, each in {**self._asked, snapshot.model: asked}.items() if m in self._kept}
            used = {digest for each in self._kept.values() for file in each.files for digest in file.blocks}
            self._blocks = {digest: block for digest, block in (self._blocks | blocks).items() if digest in used}
