"""Files on a node into which ranks write: sets of them, laid out ahead of need, verified, and taken over by READY versions.

    <root>/sets/<id>/     the node's files of one version of an epoch, with headers written and pages allocated

    free --a version takes it--> open --all ranks have sealed--> verified --READY--> `copies.py` has the folder
      ^                            \\--------- the version ends ---------/                      |
      +------- under another id, once no process has a file open or mapped <-- dropped --------+

The daemon's orders move a set from one state to the next. A set is used again within its reservation alone: the files of one that
has ended are unlinked.
"""

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import structlog
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.signal import Signal
from resharder.converters.storage.digest import compile_for
from resharder.converters.storage.files import FileLayout
from resharder.server.data.versions import ServedVersion
from resharder.server.holding.part_files import AHEAD, FileProof, FilesOnNode, keep_only, lay_out_again, write_parts
from resharder.server.holding.transfers import FetchFailed
from resharder.server.infra.filesystem import make_folder, matching, move, unused_elsewhere, write_zeros
from resharder.server.ingest.released_files import EarlyDigests
from resharder.server.node.box_gathering import BoxGatherer, manifest_of_parts
from resharder.server.node.copies import NodeCopies
from resharder.server.node.daemon_client import DaemonClient
from resharder.server.node.file_proofs import ProofRefused, SetProof, prove_files, read_proofs
from resharder.server.state.errors import DaemonError, ResourceNotFound
from resharder.v1 import node_pb2


@dataclass
class FileSet:
    """A set. `version` names the version that has taken it; empty for a free one."""

    id: str
    folder: Path
    early: EarlyDigests[FileProof]
    version: str = ""
    own: FilesOnNode = field(default_factory=FilesOnNode)  # files that the version has here
    closed: set[str] = field(default_factory=set)  # files that ranks have closed
    sealed: bool = False  # whether all ranks have sealed, so that other nodes may fetch boxes of its parts
    sources: dict[str, str] = field(default_factory=dict)  # address of each node from which boxes are gathered
    proof: SetProof | None = None
    problem: str = ""  # reason for which it could not be verified
    unreachable: str = ""  # node that is the reason
    reported: bool = False  # whether the daemon has the proof, or the problem
    busy: bool = False  # whether a thread works on it
    ended: bool = False  # whether its version needs it no longer


@dataclass
class ReservedSets:
    """Files that versions of one epoch have here, and the sets of them. Guarded by the lock of `FileSets`."""

    id: str
    publisher: str
    layout: FilesOnNode | None = None  # None until the daemon has sent it
    sets: dict[str, FileSet] = field(default_factory=dict)
    making: int = 0  # sets that are being laid out, or cleaned to be used again
    problem: str = ""
    retry: float = 0.0
    ended: bool = False

    @property
    def own(self) -> FilesOnNode:
        """The files of a set; none until the daemon has sent their layout."""
        return self.layout or FilesOnNode()

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """The files of which the node is the home."""
        return self.own.files

    @property
    def size(self) -> int:
        return self.own.size


_RETRY_SECONDS = 2.0  # until a set that could not be laid out is tried again
_ATTEMPTS, _PAUSE = 20, 0.25  # checks whether the files of a set that has ended are unused, and seconds between them
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
        self._lock, self._pool, self._closed = threading.Lock(), ThreadPoolExecutor(_THREADS, "sets"), threading.Event()
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
                    sets=[node_pb2.FileSet(id=found.id, folder=str(found.folder)) for found in each.sets.values()],
                )
                for each in self._reservations.values()
                if not each.ended
            ]

    def follow(self, orders: Iterable[node_pb2.ReservationOrder], *, drained: bool) -> None:
        """Follow the daemon's orders: start work, and drop the sets of all other reservations."""
        given = {order.id: order for order in orders}
        with self._lock:
            for id in [id for id in self._reservations if id not in given]:
                ended = self._reservations.pop(id)
                ended.ended = True
                for found in ended.sets.values():
                    found.early.drop()
                    if not found.busy:
                        self._pool.submit(_remove, found.folder)
                _log.info("reservation_ended", publisher=ended.publisher, sets=len(ended.sets))
            for order in given.values():
                if order.id not in self._reservations:
                    self._reservations[order.id] = ReservedSets(order.id, order.publisher)
                reservation = self._reservations[order.id]
                for each in order.sets:
                    if (taken := reservation.sets.get(each.id)) is not None:
                        taken.ended = each.state == State.ENDED
                        if not taken.busy:
                            self._advance(reservation, taken, each)
                self._keep_ahead(reservation, drained=drained)
            self._account()

    def work(self) -> tuple[bool, bool]:
        """Return whether a thread works on a set, so that a report soon differs, and whether ranks write into one."""
        with self._lock:
            sets = [found for each in self._reservations.values() for found in each.sets.values()]
            unsettled = any(each.making for each in self._reservations.values()) or any(found.busy for found in sets)
            return unsettled, any(found.version and not found.reported for found in sets)

    def has(self, version: str) -> bool:
        """Return whether a set is this version's."""
        with self._lock:
            return any(found.version == version for each in self._reservations.values() for found in each.sets.values())

    def close(self) -> None:
        """End all work, and remove the sets."""
        self._closed.set()
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
            sets = ((each, found) for each in self._reservations.values() for found in each.sets.values())
            served = next(((e, found) for e, found in sets if found.version == name and found.sealed), None)
        if served is None:
            raise ResourceNotFound("VERSION_UNKNOWN", f"this node does not hold {name}")
        reservation, found = served
        sizes = {file.path: file.size for file in found.own.files} if found.proof is not None else {}
        parts = manifest_of_parts(found.own, model, number)
        yield ServedVersion(name, reservation.id, sizes, found.folder, manifest=parts)

    # With the lock

    def _account(self) -> None:
        sizes = (each.size * (len(each.sets) + each.making) for each in self._reservations.values())
        self._copies.reserved_bytes = sum(sizes)

    def _advance(self, reservation: ReservedSets, found: FileSet, order: node_pb2.FileSetOrder) -> None:
        found.version = order.version or found.version or "ended"
        found.own = reservation.own if order.gathers else reservation.own.whole
        if order.state == State.UPLOADING and (closed := {*order.closed} - found.closed):
            found.closed |= closed
            found.early.begin([file.path for file in reservation.files if file.path in closed])
        if order.state == State.VERIFYING and not found.reported:
            found.sealed, found.sources = True, {each.node.removeprefix("nodes/"): each.data_address for each in order.sources}
            self._work(self._verify, reservation, found)
        elif order.state == State.READY and found.proof is not None:
            self._work(self._hand_over, reservation, found)
        elif order.state == State.ENDED or (order.state == State.READY and found.proof is None):
            del reservation.sets[found.id]
            found.early.drop()
            self._recycle_soon(reservation, found.folder)

    def _work(self, do: Callable[[ReservedSets, FileSet], None], reservation: ReservedSets, found: FileSet) -> None:
        found.busy = True
        self._pool.submit(self._guarded, do, reservation, found)

    def _keep_ahead(self, reservation: ReservedSets, *, drained: bool) -> None:
        """Have one free set, or none if the node is drained."""
        free = [found for found in reservation.sets.values() if not found.version]
        for found in free if drained else ():
            del reservation.sets[found.id]
            self._pool.submit(_remove, found.folder)
            self.changed.emit()
        if not free and not drained and not reservation.making and self._clock() >= reservation.retry:
            reservation.making += 1
            self._pool.submit(self._make, reservation)

    def _recycle_soon(self, reservation: ReservedSets, folder: Path) -> None:
        """Use the files of a set again, or unlink them if enough sets are free: more have ended together than have begun."""
        free = sum(not found.version for found in reservation.sets.values())
        if free + reservation.making >= AHEAD:
            self._pool.submit(_remove, folder)
            return
        reservation.making += 1
        self._pool.submit(self._recycle, reservation, folder)

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
            if reservation.ended and found.id in reservation.sets:
                _remove(found.folder)
        self.changed.emit()

    def _make(self, reservation: ReservedSets) -> None:
        """Lay out a set. A failure is the problem of the reservation until the next attempt."""
        folder, problem = self._root / secrets.token_hex(8), ""
        try:
            if reservation.layout is None:
                layout = self._daemon.reserved_files(reservation.publisher, reservation.id, self._node)
                with self._lock:
                    reservation.layout = layout
                    self._account()
            self._copies.check_room(reservation.size)
            failpoint("node.reserve")
            make_folder(folder)
            for file in reservation.files:
                write_zeros(folder / file.path, file.header, file.size)
                compile_for(ITEM_SIZES[placed.spec.dtype] for placed in file.tensors)  # now rather than in the first proof
            write_parts(folder, reservation.own.parts)
        except grpc.RpcError as error:
            problem = f"the daemon: {error.details() or error.code().name}"
        except (OSError, DaemonError, ValueError) as error:
            problem = str(error)
        except Exception as error:
            problem = repr(error)
            _log.error("layout_failed", publisher=reservation.publisher, exc_info=error)
        if problem:
            _remove(folder)
            if problem != reservation.problem:
                _log.warning("layout_failed", publisher=reservation.publisher, reason=problem)
        self._made(reservation, folder if not problem else None, problem)

    def _made(self, reservation: ReservedSets, folder: Path | None, problem: str = "") -> None:
        with self._lock:
            reservation.making -= 1
            reservation.problem = problem
            reservation.retry = self._clock() + _RETRY_SECONDS if problem else 0.0
            if folder is not None and reservation.ended:
                _remove(folder)
            elif folder is not None:
                early = EarlyDigests(folder, reservation.files, _read_early)
                reservation.sets[folder.name] = FileSet(folder.name, folder, early)
            self._account()
        self.changed.emit()

    def _verify(self, reservation: ReservedSets, found: FileSet) -> None:
        """Gather what the set lacks and verify it once, and report the result until the daemon has it."""
        if not found.own.files:
            found.proof, found.reported = {}, True  # homes digest its boxes
            return
        if found.proof is None and not found.problem:
            try:
                failpoint("node.verify")
                wanted = found.version, reservation.id, found.folder, found.own, found.sources
                self._gatherer.gather(*wanted, lambda: found.ended or reservation.ended or self._closed.is_set())
                early = found.early.settle()
                rest = [file for file in found.own.files if file.path not in early]
                found.proof = {**early, **prove_files(found.folder, rest)}
            except ProofRefused as error:
                found.problem = str(error)
            except FetchFailed as error:
                found.problem, found.unreachable = str(error), error.node
            except OSError as error:
                found.problem = f"its files could not be verified: {error}"
        result = found.problem, found.proof or {}, found.unreachable
        self._daemon.put_proof(found.version, self._node, self._instance, found.id, *result)
        found.reported = True

    def _hand_over(self, reservation: ReservedSets, found: FileSet) -> None:
        """Let the READY version have the set's folder."""
        assert found.proof is not None
        remote = self._daemon.version(found.version)
        failpoint("node.adopt")
        held = not found.own.files or self._copies.get(found.version) is not None  # or fetched from elsewhere before
        try:
            if not held:
                keep_only(found.folder, found.own.files)
                self._copies.adopt(remote, found.folder, found.own.files, reservation.id)
        except ValueError as error:  # it is fetched from elsewhere then
            held = True
            _log.error("set_refused", set=found.id, version=found.version, reason=str(error))
        with self._lock:
            reservation.sets.pop(found.id, None)
            if held:
                self._recycle_soon(reservation, found.folder)
            self._account()
        _log.info("version_written_here", version=found.version, files=len(found.own.files))

    def _take_back(self, reservation_id: str, folder: Path) -> bool:
        """Use the files of a dropped version again. Returns False if its reservation has ended."""
        with self._lock:
            reservation = self._reservations.get(reservation_id)
            if reservation is None or self._closed.is_set():
                return False
            target = self._root / secrets.token_hex(8)
            try:
                move(folder, target)  # from here on, no worker finds it
            except OSError as error:
                _log.warning("recycling_failed", publisher=reservation.publisher, reason=str(error))
                return False
            self._recycle_soon(reservation, target)
            self._account()
            return True

    def _recycle(self, reservation: ReservedSets, folder: Path) -> None:
        """Make a free set of the files of one that has ended, once no process has them open; unlink them after some seconds."""
        target, kept = self._root / secrets.token_hex(8), {file.path: file for file in reservation.files}
        try:
            move(folder, target)  # a late rank does not find it
            safe = _become_unused(reservation, target, self._closed)
            for path in target.iterdir() if safe else ():
                if path.name not in kept:
                    path.unlink()  # parts as well, which are laid out anew
            for name, file in kept.items() if safe else ():
                lay_out_again(target / name, file)
            if safe:
                write_parts(target, reservation.own.parts)
        except OSError as error:
            safe = False
            _log.warning("recycling_failed", publisher=reservation.publisher, reason=str(error))
        if not safe:
            _remove(target)
            _remove(folder)
        self._made(reservation, target if safe else None)


def _become_unused(reservation: ReservedSets, folder: Path, closed: threading.Event) -> bool:
    """Wait until no process has the files of a set open or mapped. False after some seconds, or without further need of them."""
    for _ in range(_ATTEMPTS):
        if reservation.ended or closed.is_set():
            return False
        if all(unused_elsewhere(folder / file.path) for file in reservation.files):
            return True
        closed.wait(_PAUSE)
    return False


def _read_early(folder: Path, files: Sequence[FileLayout]) -> SetProof:
    found = read_proofs(folder, files)
    _log.info("files_verified_early", set=folder.name, files=len(files))
    return found


def _remove(folder: Path) -> None:
    """Unlink a set. A process that has mapped its files keeps them."""
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)
