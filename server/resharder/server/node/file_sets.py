"""Files on a node into which ranks write: sets of them, laid out ahead of need, verified, and taken over by READY versions.

    <root>/sets/<id>/     the node's files of one version of an epoch, with headers written and pages allocated

    free --a version takes it--> open --all ranks have sealed--> verified --READY--> `copies.py` has the folder
      ^                            \\--------- the version ends ---------/                      |
      +-------------------- under another id, as `holding/set_pool.py` has it <--- dropped ----+

The daemon's orders move a set from one state to the next. A set is used again within its reservation alone: the files of one that
has ended are unlinked.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import grpc
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES, box_index
from resharder.converters.signal import Signal
from resharder.converters.storage.digest import compile_for
from resharder.converters.storage.files import MappedFiles
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.file_proofs import FileProofs, ProofFailed, SetProof, begin_proof, has_header
from resharder.server.holding.part_files import AHEAD, FileProof, FilesOnNode, GatheredBoxes, boxes_of_file, keep_only
from resharder.server.holding.set_pool import SetHost, SetPool
from resharder.server.holding.transfers import FetchFailed
from resharder.server.infra.filesystem import link, make_folder, matching, move
from resharder.server.node.box_gathering import BoxGatherer, manifest_of_parts
from resharder.server.node.copies import NodeCopies
from resharder.server.node.daemon_client import DaemonClient
from resharder.server.state.errors import DaemonError, ResourceNotFound
from resharder.v1 import node_pb2


@dataclass
class FileSet:
    """A set that the version `version` has taken."""

    folder: Path
    proofs: FileProofs[FileProof]
    version: str = ""
    own: FilesOnNode = field(default_factory=FilesOnNode)  # files that the version has here
    closed: set[str] = field(default_factory=set)  # files that ranks have closed
    sealed: bool = False  # whether all ranks have sealed, so that other nodes may fetch boxes of its parts
    sources: dict[str, str] = field(default_factory=dict)  # address of each node from which boxes are gathered
    base: str = ""  # version whose files of frozen tensors are beside the set's own
    lacks: str = ""  # why they are not
    unchanged: tuple[GatheredBoxes, ...] = ()  # boxes that are those of `base`; a file without boxes is that of `base`
    proof: SetProof | None = None
    problem: str = ""  # reason for which it could not be verified
    unreachable: str = ""  # node that is the reason
    reported: bool = False  # whether the daemon has the proof, or the problem
    busy: bool = False  # whether a thread works on it
    ended: bool = False  # whether its version needs it no longer

    @property
    def id(self) -> str:
        return self.folder.name


@dataclass
class ReservedSets:
    """Files that versions of one epoch have here, and the sets of them. Guarded by the lock of `FileSets`."""

    id: str
    publisher: str
    own: FilesOnNode = field(default_factory=FilesOnNode)  # the files of a set
    pool: SetPool | None = None  # None until the daemon has sent their layout
    taken: dict[str, FileSet] = field(default_factory=dict)
    base: str = ""  # newest READY version into whose files of frozen tensors ranks have written here
    kept: Path | None = None  # folder of these files
    asking: bool = False  # whether the layout is being asked for
    problem: str = ""
    retry: float = 0.0
    ended: bool = False

    def folders(self) -> list[Path]:
        """Return the folders of the sets that versions have taken or may take."""
        return [*(found.folder for found in self.taken.values()), *(self.pool.free if self.pool else ())]

    def size(self) -> int:
        """Return the bytes of all sets, and of the kept files."""
        kept = sum(file.size for file in self.own.files if file.path in self.own.frozen) if self.kept else 0
        return kept + (self.pool.size * (len(self.taken) + self.pool.count()) if self.pool else 0)


_BASE = ".base"
"""End of the name of a file of the version before, beside that of a set."""
_RETRY_SECONDS = 2.0  # until a set that could not be laid out is tried again
_PAUSE = 0.25  # seconds after work that has failed
_THREADS = 4
_log = structlog.get_logger("resharder.node")
State = node_pb2.FileSetOrder.State


class FileSets:
    """The sets of a node. Thread-safe; files are written and read without the lock.

    The constructor removes what an earlier process has left.

    Args:
        root: Folder of the node, locked by the caller.
        copies: The node's versions, with which sets share the bound on bytes.
        daemon: Calls of the daemon.
        node: Id of the node.
        instance: Nonce of the process's lifetime.
        gatherer: Fetches boxes that ranks have written on other nodes.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        root: Path,
        copies: NodeCopies,
        daemon: DaemonClient,
        node: str,
        instance: str,
        gatherer: BoxGatherer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._copies, self._daemon = make_folder(root / "sets"), copies, daemon
        self._node, self._instance, self._gatherer, self._clock = node, instance, gatherer, clock
        self.changed: Signal[()] = Signal()  # the next report differs
        self._lock, self._pool = threading.Condition(), ThreadPoolExecutor(_THREADS, "sets")
        self._closed, self._drained = threading.Event(), False
        self._reservations: dict[str, ReservedSets] = {}
        for left in matching(self._root, "*"):
            shutil.rmtree(left)
        copies.recycle_by(self._take_back)

    def report(self) -> list[node_pb2.NodeReservation]:
        with self._lock:
            return [
                node_pb2.NodeReservation(
                    id=each.id,
                    problem=each.problem,
                    base=each.base,
                    sets=[node_pb2.FileSet(id=folder.name, folder=str(folder)) for folder in each.folders()],
                )
                for each in self._reservations.values()
            ]

    def follow(self, orders: Iterable[node_pb2.ReservationOrder], *, drained: bool) -> None:
        """Follow the daemon's orders: start work, and drop the sets of all other reservations."""
        given = {order.id: order for order in orders}
        with self._lock:
            self._drained, before = drained, self.report()
            for id in [id for id in self._reservations if id not in given]:
                self._end(self._reservations.pop(id))
            for order in given.values():
                reservation = self._reservations.setdefault(order.id, ReservedSets(order.id, order.publisher))
                for each in order.sets:
                    if (taken := self._taken(reservation, each.id)) is not None:
                        taken.ended = each.state == State.ENDED
                        if not taken.busy:
                            self._advance(reservation, taken, each)
                self._keep_ahead(reservation)
            self._account()
            differs = self.report() != before
        if differs:
            self.changed.emit()

    def work(self) -> tuple[bool, bool]:
        """Return whether a thread works on a set, so that a report soon differs, and whether ranks write into one."""
        with self._lock:
            sets = [found for each in self._reservations.values() for found in each.taken.values()]
            making = any(each.asking or (each.pool and each.pool.pending) for each in self._reservations.values())
            return making or any(found.busy for found in sets), any(not found.reported for found in sets)

    def has(self, version: str) -> bool:
        """Return whether a set is this version's."""
        with self._lock:
            return any(found.version == version for each in self._reservations.values() for found in each.taken.values())

    def close(self) -> None:
        """End all work, and remove the sets."""
        self._closed.set()
        with self._lock:
            for each in self._reservations.values():
                if each.pool is not None:
                    each.pool.over = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(self._root, ignore_errors=True)

    @contextmanager
    def pinned(self, model: str, number: int) -> Iterator[ServedVersion]:
        """Yield files of an UPLOADING version for the data port: verified ones for the daemon, parts for their homes.

        Their `ETag` is the id of the reservation, because the version has no fingerprint yet. Raises ResourceNotFound
        (VERSION_UNKNOWN), also before all ranks have sealed.
        """
        name = f"models/{model}/versions/{number}"
        with self._lock:
            sets = ((each, found) for each in self._reservations.values() for found in each.taken.values())
            served = next(((e, found) for e, found in sets if found.version == name and found.sealed), None)
        if served is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"this node does not hold {name}")
        reservation, found = served
        sizes = {file.path: file.size for file in found.own.files} if found.proof is not None else {}
        parts = manifest_of_parts(found.own, model, number)
        yield ServedVersion(name, reservation.id, sizes, found.folder, manifest=parts)

    # With the lock

    def _account(self) -> None:
        self._copies.reserved_bytes = sum(each.size() for each in self._reservations.values())

    def _end(self, reservation: ReservedSets) -> None:
        reservation.ended = True
        if reservation.pool is not None:
            reservation.pool.end()
        if reservation.kept is not None:
            self._discard(reservation.kept)
        for found in reservation.taken.values():
            found.proofs.drop()
            if not found.busy:
                self._discard(found.folder)
        _log.info("reservation_ended", publisher=reservation.publisher, sets=len(reservation.taken))

    def _taken(self, reservation: ReservedSets, id: str) -> FileSet | None:
        """Return a set that a version has taken, now or before; None for one that is not here."""
        free = reservation.pool.free if reservation.pool else []
        for folder in [folder for folder in free if folder.name == id]:
            free.remove(folder)
            reservation.taken[id] = FileSet(folder, FileProofs(folder, reservation.own.files, begin_proof))
        return reservation.taken.get(id)

    def _advance(self, reservation: ReservedSets, found: FileSet, order: node_pb2.FileSetOrder) -> None:
        found.version = order.version or found.version
        found.own = reservation.own if order.gathers else reservation.own.whole
        if order.base and not found.base:
            self._add_base(reservation, found, order.base)
        if order.state == State.UPLOADING and (closed := {*order.closed} - found.closed):
            found.closed |= closed
            files = [file.path for file in reservation.own.files if file.path in closed]
            found.proofs.begin(files)
            _log.info("verifying_closed_files", set=found.id, files=len(files))
        if order.state == State.VERIFYING and not found.reported:
            found.sealed, found.sources = True, {each.node.removeprefix("nodes/"): each.data_address for each in order.sources}
            found.unchanged = tuple(map(boxes_of_file, order.unchanged))
            self._work(self._verify, reservation, found)
        elif order.state == State.READY and found.proof is not None:
            self._work(self._hand_over, reservation, found)
        elif order.state == State.ENDED or (order.state == State.READY and found.proof is None):
            self._dispose(reservation, found)

    def _add_base(self, reservation: ReservedSets, found: FileSet, base: str) -> None:
        """Link the files of frozen tensors of the version before into a set, beside its own."""
        found.base = base
        try:
            if reservation.kept is None or reservation.base != base:
                raise FileNotFoundError(f"this node has kept those of {reservation.base or 'no version'}")
            for path in reservation.own.frozen:
                link(reservation.kept / path, found.folder / f"{path}{_BASE}")
        except OSError as error:
            found.lacks = f"the frozen files of {base} are gone: {error}"

    def _work(self, do: Callable[[ReservedSets, FileSet], None], reservation: ReservedSets, found: FileSet) -> None:
        found.busy = True
        self._pool.submit(self._guarded, do, reservation, found)

    def _keep_ahead(self, reservation: ReservedSets) -> None:
        """Have one free set, or none on a drained node. Held sets that are in use for long are unlinked."""
        pool = reservation.pool
        if pool is not None:
            pool.give_up()
            while self._drained and pool.free:
                self._discard(pool.free.pop())
        if self._drained or self._clock() < reservation.retry:
            return
        if pool is None and not reservation.asking:
            reservation.asking = True
            self._pool.submit(self._ask, reservation)
        elif pool is not None and not pool.free and not pool.pending:
            try:
                self._copies.check_room(pool.size)
            except DaemonError as error:
                self._failed(reservation, str(error))
            else:
                pool.make()
                self._account()

    def _failed(self, reservation: ReservedSets, problem: str) -> None:
        """Record why a set could not be laid out, and log it once. It is tried again after a while."""
        if problem != reservation.problem:
            _log.warning("layout_failed", publisher=reservation.publisher, reason=problem)
        reservation.problem, reservation.retry = problem, self._clock() + _RETRY_SECONDS

    def _settled(self, reservation: ReservedSets, pool: SetPool, failure: OSError | None) -> None:
        if failure is not None:
            self._failed(reservation, str(failure))
        elif pool.free:
            reservation.problem = ""
        self._account()
        self._pool.submit(self.changed.emit)  # without the lock

    def _discard(self, folder: Path) -> None:
        self._pool.submit(_remove, folder)

    def _dispose(self, reservation: ReservedSets, found: FileSet) -> None:
        """Use the files of a set again that no version needs any longer, or unlink them."""
        del reservation.taken[found.id]
        found.proofs.drop()
        if not self._clean(reservation, found.folder):
            self._discard(found.folder)

    def _clean(self, reservation: ReservedSets, folder: Path) -> bool:
        """Use files again. Returns False if their reservation has ended."""
        pool = reservation.pool
        if pool is None or pool.over:
            return False
        target = pool.new_path()
        try:
            move(folder, target)  # from here on, no worker and no late rank finds it
        except OSError as error:
            _log.warning("recycling_failed", publisher=reservation.publisher, reason=str(error))
            return False
        pool.take_back(target)
        self._account()
        return True

    # On the threads of the pool

    def _guarded(self, do: Callable[[ReservedSets, FileSet], None], reservation: ReservedSets, found: FileSet) -> None:
        try:
            do(reservation, found)
        except (grpc.RpcError, OSError, DaemonError, ValueError) as error:
            reason = (error.details() or error.code().name) if isinstance(error, grpc.RpcError) else str(error)
            _log.warning("set_failed", set=found.id, version=found.version, reason=reason)
            self._closed.wait(_PAUSE)
        except Exception as error:
            _log.error("set_failed", set=found.id, version=found.version, exc_info=error)
        with self._lock:
            found.busy = False
            if reservation.ended and found.id in reservation.taken:
                _remove(found.folder)
        self.changed.emit()

    def _ask(self, reservation: ReservedSets) -> None:
        """Ask for the layout of the files of a set. A failure is the problem of the reservation until the next attempt."""
        problem, own = "", FilesOnNode()
        try:
            own = self._daemon.reserved_files(reservation.publisher, reservation.id, self._node)
            compile_for(ITEM_SIZES[placed.spec.dtype] for file in own.files for placed in file.tensors)  # not in the first proof
        except grpc.RpcError as error:
            problem = f"the daemon: {error.details() or error.code().name}"
        except (OSError, ValueError) as error:
            problem = str(error)
        except Exception as error:
            problem = repr(error)
            _log.error("layout_failed", publisher=reservation.publisher, exc_info=error)
        with self._lock:
            reservation.asking = False
            if problem:
                self._failed(reservation, problem)
            elif not reservation.ended:
                host = SetHost(
                    lambda: pool.count() < AHEAD,
                    self._discard,
                    lambda: self._keep_ahead(reservation),
                    lambda failure: self._settled(reservation, pool, failure),
                )
                path = self._root / secrets.token_hex(8)
                pool = SetPool(self._lock, self._pool, path, count(1), "node.reserve", host, own.files, own.parts)
                reservation.own, reservation.pool = own, pool
                self._keep_ahead(reservation)
        self.changed.emit()

    def _verify(self, reservation: ReservedSets, found: FileSet) -> None:
        """Gather what the set lacks and verify it once, and report the result until the daemon has it."""
        if not found.own.files:
            found.proof, found.reported = {}, True  # homes digest its boxes
            return
        if found.proof is None and not found.problem:
            try:
                failpoint("node.verify")
                self._complete(found)
                wanted = found.version, reservation.id, found.folder, found.own, found.sources
                self._gatherer.gather(*wanted, lambda: found.ended or reservation.ended or self._closed.is_set())
                found.proof = found.proofs.prove(found.own.files)
            except ProofFailed as error:
                found.problem = str(error)
            except FetchFailed as error:
                found.problem, found.unreachable = str(error), error.node
            except OSError as error:
                found.problem = f"its files could not be verified: {error}"
        result = found.problem, found.proof or {}, found.unreachable
        self._daemon.put_proof(found.version, self._node, self._instance, found.id, *result)
        found.reported = True

    def _complete(self, found: FileSet) -> None:
        """Give a set what ranks have left as it is in the version before: whole files, or boxes of them. Raises OSError."""
        if found.unchanged and found.lacks:
            raise OSError(found.lacks)
        layouts = {file.path: file for file in found.own.files}
        for path, _, boxes in found.unchanged:
            base, own = found.folder / f"{path}{_BASE}", found.folder / path
            if not boxes:
                if not has_header(found.folder, layouts[path], base.name):
                    raise OSError(f"{path} of {found.base} has another header")
                move(base, own)
                continue
            there = [replace(layouts[path], path=base.name)]
            with MappedFiles(found.folder, there) as before, MappedFiles(found.folder, [layouts[path]], writable=True) as now:
                for name, box in boxes:
                    now.arrays[name][box_index(box)] = before.arrays[name][box_index(box)]

    def _keep(self, reservation: ReservedSets, found: FileSet) -> None:
        """Keep the files of frozen tensors of a READY version, in place of those of the one before. Raises OSError."""
        frozen = reservation.own.frozen & {file.path for file in found.own.files}
        if not frozen or self._copies.has_engine:  # whose mappings could write to the files
            return
        kept = make_folder(self._root / secrets.token_hex(8))
        for path in frozen:
            link(found.folder / path, kept / path)
        with self._lock:
            if reservation.ended:
                self._discard(kept)
                return
            if reservation.kept is not None:
                self._discard(reservation.kept)
            reservation.base, reservation.kept = found.version, kept
        _log.info("frozen_files_kept", version=found.version, files=len(frozen))

    def _hand_over(self, reservation: ReservedSets, found: FileSet) -> None:
        """Let the READY version have the set's folder."""
        assert found.proof is not None
        remote = self._daemon.version(found.version)
        failpoint("node.adopt")
        held = not found.own.files or self._copies.get(found.version) is not None  # or fetched from elsewhere before
        try:
            if not held:
                keep_only(found.folder, found.own.files)
                self._keep(reservation, found)
                self._copies.adopt(remote, found.folder, found.own.files, reservation.id)
        except ValueError as error:  # it is fetched from elsewhere then
            held = True
            _log.error("set_refused", set=found.id, version=found.version, reason=str(error))
        with self._lock:
            if held:
                self._dispose(reservation, found)
            else:
                del reservation.taken[found.id]
            self._account()
        _log.info("version_written_here", version=found.version, files=len(found.own.files))

    def _take_back(self, reservation_id: str, folder: Path) -> bool:
        """Use the files of a dropped version again. Returns False if its reservation has ended."""
        with self._lock:
            reservation = self._reservations.get(reservation_id)
            return reservation is not None and self._clean(reservation, folder)


def _remove(folder: Path) -> None:
    """Unlink a set. A process that has mapped its files keeps them."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
