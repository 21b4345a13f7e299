"""One job's claim in memory: its ranks' boxes, whether they tile the model, and which rank sends which box."""

import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from resharder.converters.adapter import check_config, check_tensors
from resharder.converters.checkpoint_files import folder_names
from resharder.converters.errors import ConversionError, LayoutError, UnsupportedModel
from resharder.converters.geometry.layout import ITEM_SIZES, Box, TensorSpec
from resharder.converters.geometry.piece_arrays import Ints, join_boxes
from resharder.converters.geometry.senders import senders, senders_by_host
from resharder.converters.geometry.tiling import Held, check_tiling
from resharder.converters.quantization.checkpoint import expected_tensors
from resharder.converters.storage.files import INDEX_FILE, FileLayout, lay_out
from resharder.converters.wire.boxes import fingerprint_of
from resharder.converters.wire.ranges import HELD_FILE
from resharder.server.holding.part_files import GatheredBoxes
from resharder.server.ingest.boxes import PackedBoxes, Slot, cut_slot
from resharder.server.ingest.maxima import RankBlocks, SharedPlan, VersionMaxima, plan_shared
from resharder.server.nodes.homes import Readable
from resharder.server.state.errors import AlreadyExists, DaemonError, FailedPrecondition, InvalidArgument, ResourceNotFound
from resharder.server.state.version import DAEMON
from resharder.server.store.catalogue import taken_over
from resharder.server.store.manifest import MANIFEST_FILE
from resharder.server.store.partial import PIECES_FILE

REGISTERING, ACTIVE, REJECTED, FENCED, GONE = "REGISTERING", "ACTIVE", "REJECTED", "FENCED", "GONE"
MAX_WORLD = 1 << 16
NO_FILES = "no rank has sent the model's files to this daemon: create and register the publisher again"
CHECKED = "all ranks have registered; the daemon still checks their tensors and reserves room: wait for it"
MAX_FILE_BYTES, MAX_FILES = 48 << 20, 64
MAX_WARNINGS, MAX_WARNING_LENGTH = 32, 2000
_MOST_EXPERTS = 1 << 17  # in all layers: Kimi-K2 has 23,424
_FROZEN = "/frozen"  # after homes in the layout of files, for frozen tensors. No node's id has a slash
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_files(files: Mapping[str, bytes], base: str = "") -> None:
    """Raise InvalidArgument (MODEL_FILE) for a path, a name that the store uses itself, too much content, or an adapter's lack of
    a config.
    """
    if base and files and (config := folder_names(base).config) not in files:
        raise InvalidArgument("MODEL_FILE", f"expected {config} of an adapter of {base!r}, got {sorted(files)[:8]}")
    if len(files) > MAX_FILES:
        raise InvalidArgument("MODEL_FILE", f"expected at most {MAX_FILES} files of a model, got {len(files)}")
    for name, content in files.items():
        ours = name in (MANIFEST_FILE, INDEX_FILE, HELD_FILE, PIECES_FILE) or name.endswith((".safetensors", ".part"))
        if ours or not _FILE_NAME.fullmatch(name):
            raise InvalidArgument("MODEL_FILE", f"expected a plain file name that is not the store's own, got {name!r}")
        if len(content) > MAX_FILE_BYTES:
            raise InvalidArgument("MODEL_FILE", f"{name}: expected at most {MAX_FILE_BYTES} bytes, got {len(content)}")


def _check_counts(config: object) -> None:
    """Raise LayoutError for more layers and experts than any model has, since a table of their tensors would exhaust memory."""
    counts = {"layers": 1, "experts": 1}
    parts = [config]
    while parts:
        part = parts.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            parts.append(value)
            for what in counts:
                if what in key and isinstance(value, int):
                    counts[what] = max(counts[what], value)
    if counts["layers"] * counts["experts"] > _MOST_EXPERTS:
        raise LayoutError(f"config.json: expected at most {_MOST_EXPERTS} experts in all layers, got {counts}")


class Assigned(NamedTuple):
    """Positions and boxes that each rank sends.

    `homes` has the node of each tensor that ranks on nodes' hosts send, by its number. `gathered` has the tensors of which ranks
    of several hosts send parts.
    """

    positions: dict[int, list[int]]
    boxes: dict[int, PackedBoxes]
    homes: dict[int, str]
    gathered: frozenset[int]


class CheckedLayout(NamedTuple):
    """The result of the check of all slots: what each rank sends, the files of a version, and those of frozen tensors."""

    assigned: Assigned
    shared: SharedPlan
    files: tuple[FileLayout, ...]
    frozen: tuple[FileLayout, ...] = ()


@dataclass
class PublisherRecord:
    """State of a publisher, guarded by ingest's lock. REGISTERING -> ACTIVE or REJECTED; FENCED from any state.

    Its claim takes effect when it becomes ACTIVE, and fences the earlier ones.
    """

    model: str
    job: str
    epoch: int
    world_size: int
    together: frozenset[str] = frozenset()  # other models whose versions of a step are READY together with this one's
    created: float = 0.0  # by ingest's clock
    base: str = ""  # see VersionRecord.base
    state: str = REGISTERING
    error: DaemonError | None = None
    stalled: DaemonError | None = None  # error of the last activation, if the next one may succeed
    activating: bool = False
    checked: CheckedLayout | None = None  # while it waits for the other models of its job to be checked too
    files: dict[str, bytes] = field(default_factory=dict)  # until ACTIVE
    registered: dict[int, str] = field(default_factory=dict)  # rank -> fingerprint of its registration
    specs: list[TensorSpec] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    held: dict[int, PackedBoxes] = field(default_factory=dict)  # until ACTIVE
    unfrozen: set[str] = field(default_factory=set)  # tensors that some rank expects to change
    frozen: frozenset[int] = frozenset()  # numbers of the tensors in files that versions may share, from ACTIVE on
    blocks: dict[int, RankBlocks] = field(default_factory=dict)  # blocks that each rank shares, until ACTIVE
    shared: SharedPlan = field(default_factory=lambda: plan_shared({}))
    maxima: dict[int, VersionMaxima] = field(default_factory=dict)  # by number of the version
    assigned: dict[int, list[int]] = field(default_factory=dict)
    boxes: dict[int, PackedBoxes] = field(default_factory=dict)  # boxes that each rank sends
    hosts: dict[int, str] = field(default_factory=dict)  # rank -> its host, as of its registration, if known
    readable: dict[int, Readable] = field(default_factory=dict)  # rank -> nonce files that it has read last
    homes: dict[int, str] = field(default_factory=dict)  # number of a tensor -> node whose files it may be in
    gathered: frozenset[int] = frozenset()  # tensors among these of which ranks of several hosts send parts
    gatherers: set[int] = field(default_factory=set)  # ranks that follow Assignment.gathered_boxes
    seen: dict[int, float] = field(default_factory=dict)  # rank -> time of its last call
    processes: dict[int, str] = field(default_factory=dict)  # rank -> nonce of its process
    started: dict[int, int] = field(default_factory=dict)  # rank -> last step that its process has started
    replaced: float = -math.inf  # time of the last registration from a new process
    warnings: dict[int, Sequence[str]] = field(default_factory=dict)  # rank -> texts for the record of its versions
    _slots: dict[tuple[int, bool | None], Slot] = field(default_factory=dict)
    _cutting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """Resource name, `models/{model}/publishers/{epoch}`."""
        return f"models/{self.model}/publishers/{self.epoch}"

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the versions' tensors. Not before every rank has registered."""
        return fingerprint_of(self.specs)

    def shown_state(self, live_ranks: int) -> str:
        """Return the state, with GONE in place of ACTIVE if no rank is within its lease."""
        return GONE if self.state == ACTIVE and not live_ranks else self.state

    def check_rank(self, rank: int) -> None:
        """Raise InvalidArgument (RANK) for a rank outside the publisher's world size."""
        if not 0 <= rank < self.world_size:
            raise InvalidArgument("RANK", f"{self.name}: expected a rank below {self.world_size}, got {rank}")

    def check_registered_here(self, rank: int) -> None:
        """Raise ResourceNotFound (PUBLISHER_UNKNOWN) while REGISTERING if a rank has to create and register the publisher again.

        After a restart between the calls of a registration, other ranks may have created the publisher. The daemon then lacks
        the rank's slot, or the model's files, which rank 0 sends.
        """
        if self.state != REGISTERING or self.activating:
            return
        if rank not in self.registered:
            raise ResourceNotFound(
                "PUBLISHER_UNKNOWN", f"{self.name}: rank {rank} has not registered: create and register it again"
            )
        if rank == 0 and not self.files and len(self.registered) == self.world_size:
            raise ResourceNotFound("PUBLISHER_UNKNOWN", f"{self.name}: {NO_FILES}")

    def check_usable(self) -> None:
        """Raise the error of a rejected publisher, or FailedPrecondition (STALE_EPOCH) of a fenced one."""
        if self.error is not None:
            raise type(self.error)(self.error.reason, str(self.error))

    def check_active(self) -> None:
        """Raise FailedPrecondition (NOT_REGISTERED) before ACTIVE, or as `check_usable` does."""
        self.check_usable()
        if self.state != ACTIVE:
            raise FailedPrecondition(
                "NOT_REGISTERED", f"{self.name}: {len(self.registered)} of {self.world_size} ranks have registered"
            )

    def add_slot(
        self,
        rank: int,
        fingerprint: str,
        specs: Sequence[TensorSpec],
        boxes: PackedBoxes,
        shared: RankBlocks | None = None,
        frozen: Collection[int] = (),
    ) -> bool:
        """Add a rank's slot and return whether all ranks have registered. `frozen`: positions of tensors that it does not change.

        Raises FailedPrecondition (TENSOR_MISMATCH); nothing has changed then.
        """
        for spec in specs:
            number = self.numbers.get(spec.name)
            if number is not None and self.specs[number] != spec:
                have = self.specs[number]
                raise FailedPrecondition(
                    "TENSOR_MISMATCH",
                    f"{spec.name}: rank {rank} has {spec.dtype} {list(spec.shape)}, another rank has {have.dtype} "
                    f"{list(have.shape)}",
                )
        numbers = [self._number(spec) for spec in specs]
        self.unfrozen |= {spec.name for position, spec in enumerate(specs) if position not in frozen}
        self.held[rank] = boxes.renumber(numbers)
        if shared is not None:
            self.blocks[rank] = shared.renumber(numbers)
        self.registered[rank] = fingerprint
        return len(self.registered) == self.world_size

    def _number(self, spec: TensorSpec) -> int:
        if spec.name not in self.numbers:
            self.numbers[spec.name] = len(self.specs)
            self.specs.append(spec)
        return self.numbers[spec.name]

    @property
    def is_complete(self) -> bool:
        """Whether every rank has registered, one has sent the model's files, and no activation is in progress or done."""
        everything = len(self.registered) == self.world_size and bool(self.files)
        return self.state == REGISTERING and everything and not self.activating

    def is_registered(self, rank: int, fingerprint: str) -> bool:
        """Return whether a rank has registered this slot. Raises AlreadyExists (SLOT_DIFFERS) if it has registered another."""
        if self.registered.get(rank, fingerprint) != fingerprint:
            raise AlreadyExists("SLOT_DIFFERS", f"{self.name}: rank {rank} has registered other tensors or boxes before")
        return rank in self.registered

    def is_replaced(self, rank: int, process: str, now: float) -> bool:
        """Record a rank's process, and return whether it has replaced another one. A no-op for an empty `process`."""
        former = self.processes.get(rank)
        if not process or process == former:
            return False
        self.processes[rank] = process
        if former is None:
            return False
        self.started.pop(rank, None)
        self.replaced = now
        return True

    def overtaken(self, step: int, ranks: Iterable[int]) -> str:
        """Return why one of `ranks` will not deliver `step`: it has started a later one. Empty otherwise.

        A restarted job may return to an earlier step: ranks that are silent since a process was replaced do not
        count, because their processes may be gone as well.
        """
        for rank in ranks:
            started = self.started.get(rank, step)
            if started > step and self.seen[rank] > self.replaced:
                return f"rank {rank} went on to step {started} without sending its part of step {step}"
        return ""

    def is_due(self, rank: int, step: int) -> bool:
        """Return whether `rank` may begin the version of `step`.

        It sends boxes, or a rank that does has started this step or a later one. Until then a rank without boxes waits: it
        would run ahead, and later steps would get lower numbers than earlier ones. Ranks that are silent since a process was
        replaced do not count, as in `overtaken`.
        """
        senders = self.senders()
        return rank in senders or any(self.started.get(each, -1) >= step and self.seen[each] > self.replaced for each in senders)

    def version_warnings(self) -> list[str]:
        """Return the ranks' warnings, each once, in the order of ranks."""
        found = dict.fromkeys(text for _, texts in sorted(self.warnings.items()) for text in texts)
        return list(found)[:MAX_WARNINGS]

    def senders(self) -> list[int]:
        """Return the ranks that send boxes."""
        return [rank for rank, boxes in self.boxes.items() if len(boxes)]

    def check(self) -> CheckedLayout:
        """Return what each rank sends, the blocks that ranks share, and the files of a version.

        Each distinct box is sent once, of one host a whole tensor if that is possible, with even bytes. No file has tensors of
        two homes.

        Raises:
            FailedPrecondition: LAYOUT_MISMATCH: the ranks' boxes do not tile the model, or no rank contributes to a shared block.
        """
        try:
            self._check_names()
            held = self._held_by_tensor()
            for spec in self.specs:
                check_tiling(spec, held[spec.name])
        except LayoutError as error:
            raise FailedPrecondition("LAYOUT_MISMATCH", str(error)) from error
        parts = [self.held[rank] for rank in range(self.world_size)]
        only_file = folder_names(self.base).weights
        hosts = {} if only_file else self.hosts  # the only file has one home, the daemon's host
        assigned = assign(self.specs, parts, hosts, self.gatherers)
        try:
            shared = plan_shared(self.blocks)
        except LayoutError as error:
            raise FailedPrecondition("LAYOUT_MISMATCH", f"{self.name}: {error}") from error
        homes = {self.specs[n].name: f"{node}/{n in assigned.gathered}" for n, node in assigned.homes.items()}
        names = {spec.name for spec in self.specs}
        gathered = {self.specs[number].name for number in assigned.gathered}
        frozen = names - self.unfrozen - gathered if not only_file else set[str]()
        if frozen == names:  # nothing is left that would change
            frozen = set()
        apart = {name: f"{homes.get(name, '')}{_FROZEN}" for name in frozen}
        files = lay_out(self.specs, homes=homes | apart, only_file=only_file)
        return CheckedLayout(assigned, shared, files, tuple(file for file in files if not frozen.isdisjoint(file.by_name)))

    def _check_names(self) -> None:
        if not self.specs:
            raise LayoutError("no rank holds any tensor: register at least one")
        if self.base:
            self._check_adapter()
            return
        try:
            config = json.loads(self.files["config.json"])
            _check_counts(config)
            expected = expected_tensors(config, self.specs)
        except (KeyError, UnsupportedModel):
            return  # no config, or no table for its architecture: the ranks' names are accepted
        except (ValueError, TypeError, AttributeError) as error:
            raise LayoutError(f"config.json: {error!r}") from error
        wrong = [
            f"{name}: expected {list(shape)}, found {list(self.specs[self.numbers[name]].shape)}"
            for name, shape in expected.items()
            if name in self.numbers and self.specs[self.numbers[name]].shape != tuple(shape)
        ]
        wrong += [f"{name} {list(shape)} is held by no rank" for name, shape in expected.items() if name not in self.numbers]
        wrong += [f"{spec.name}: not a tensor of this model" for spec in self.specs if spec.name not in expected]
        if wrong:
            more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise LayoutError("; ".join(wrong[:8]) + more)

    def _check_adapter(self) -> None:
        """Raise LayoutError for a config or tensors that no server would load."""
        name = folder_names(self.base).config
        try:
            config = json.loads(self.files[name])
            check_config(config)
            check_tensors(config, {spec.name: spec.shape for spec in self.specs})
        except ConversionError as error:
            raise LayoutError(str(error)) from error
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise LayoutError(f"{name}: {error!r}") from error

    def _held_by_tensor(self) -> dict[str, list[Held]]:
        held: dict[str, list[Held]] = defaultdict(list)
        same: dict[Box, Box] = {}  # ranks repeat the same boxes
        for rank, boxes in sorted(self.held.items()):
            for position in range(len(boxes)):
                box = boxes.box(position)
                piece = Held(rank, position, same.setdefault(box, box), bool(boxes.replicas[position]))
                held[self.specs[int(boxes.tensors[position])].name].append(piece)
        return held

    def activate(self, checked: CheckedLayout) -> None:
        """Become ACTIVE with the result of the check, and free the state of registration."""
        self.assigned, self.boxes, self.homes, self.gathered = checked.assigned
        self.shared, self.state = checked.shared, ACTIVE
        self.frozen = frozenset(self.numbers[name] for file in checked.frozen for name in file.by_name)
        self.held, self.blocks, self.files, self.stalled, self.checked = {}, {}, {}, None, None

    def file_homes(self, files: Sequence[FileLayout]) -> dict[str, str]:
        """Return the node of each file whose home may be one, by path."""
        found = {file.path: self.homes.get(self.numbers[next(iter(file.by_name))]) for file in files}
        return {path: node for path, node in found.items() if node is not None}

    def gathered_boxes(self, files: Sequence[FileLayout]) -> tuple[GatheredBoxes, ...]:
        """Return the boxes that ranks write on a node which is not the home of their file."""
        if not self.gathered:
            return ()
        paths = {name: file.path for file in files for name in file.by_name}
        found: dict[tuple[str, str], list[tuple[str, Box]]] = {}
        same: dict[Box, Box] = {}  # ranks repeat the same boxes
        for rank, boxes in self.boxes.items():
            for position in np.flatnonzero(np.isin(boxes.tensors, [*self.gathered])).tolist():
                number, host = int(boxes.tensors[position]), self.hosts[rank]
                if host != self.homes[number]:
                    name, box = self.specs[number].name, boxes.box(position)
                    found.setdefault((paths[name], host), []).append((name, same.setdefault(box, box)))
        return tuple(GatheredBoxes(path, node, tuple(boxes)) for (path, node), boxes in sorted(found.items()))

    def is_frozen(self, file: FileLayout) -> bool:
        """Return whether versions may share a file: it has frozen tensors, and then no others."""
        return self.numbers[next(iter(file.by_name))] in self.frozen

    def reject(self, error: DaemonError) -> None:
        """Become REJECTED. Later calls raise `error`."""
        self._end(REJECTED, error)

    def fence(self, job: str) -> None:
        """Become FENCED by a newer job. Later calls raise FailedPrecondition (STALE_EPOCH)."""
        self._end(FENCED, FailedPrecondition("STALE_EPOCH", f"{self.name}: {taken_over(self.model, job)}"))

    def _end(self, state: str, error: DaemonError) -> None:
        self.error, self.state = error, state
        self.held, self.blocks, self.files, self.checked = {}, {}, {}, None

    def silent_for(self, now: float) -> float:
        """Return the seconds since the last call of any rank."""
        return now - max([self.created, *list(self.seen.values())])

    def slot(self, rank: int, chunk_bytes: int, gathers: bool | None = None) -> Slot:
        """Return the chunks of the boxes that a rank sends to the daemon, cut at first use.

        Args:
            rank: The rank.
            chunk_bytes: Bound on a chunk.
            gathers: `NodeHome.gathers` of its host's node; None if it sends all boxes.
        """
        with self._cutting:
            if (rank, gathers) not in self._slots:
                boxes, at_home = self.boxes[rank], np.zeros(0, np.int64)
                if gathers is not None:
                    at_home = home_boxes(self, rank, gathered=False)
                if gathers:
                    at_home = np.append(at_home, home_boxes(self, rank, gathered=True))
                frozen = np.setdiff1d(frozen_boxes(self, rank), at_home)
                rest = np.delete(np.arange(len(boxes)), np.append(at_home, frozen))
                boxes = boxes.take(np.append(frozen, rest))
                self._slots[rank, gathers] = cut_slot(boxes, self.specs, chunk_bytes, len(frozen))
            return self._slots[rank, gathers]


def assign(
    specs: Sequence[TensorSpec], held: Sequence[PackedBoxes], hosts: Mapping[int, str], gatherers: Collection[int]
) -> Assigned:
    """Return what each rank sends.

    Args:
        specs: The tensors.
        held: The boxes of each rank, replicas included; together they tile the tensors.
        hosts: Host of each rank whose host is known: `DAEMON` or the id of a node.
        gatherers: Ranks that can write boxes which other nodes gather.
    """
    counts = [len(boxes) for boxes in held]
    sent, homes, gathered = _senders(specs, held, np.repeat(np.arange(len(held)), counts), hosts, gatherers)
    ends = np.cumsum(counts)
    mine = [each - begin for each, begin in zip(np.split(sent, np.searchsorted(sent, ends[:-1])), ends - counts, strict=True)]
    boxes = {rank: part.take(positions) for rank, (part, positions) in enumerate(zip(held, mine, strict=True))}
    return Assigned({rank: positions.tolist() for rank, positions in enumerate(mine)}, boxes, homes, gathered)


def _senders(
    specs: Sequence[TensorSpec],
    held: Sequence[PackedBoxes],
    rank: Ints,
    known: Mapping[int, str],
    gatherers: Collection[int],
) -> tuple[Ints, dict[int, str], frozenset[int]]:
    """Return the boxes that are sent, as indices into those of all ranks, and `homes` and `gathered` of `Assigned`."""
    tensors, boxes = np.concatenate([part.tensors for part in held]).astype(np.int64), join_boxes([p.boxes for p in held])
    items = np.array([ITEM_SIZES[spec.dtype] for spec in specs], np.int64)
    names = sorted({*known.values()}, key=lambda name: (name != DAEMON, name))
    if not set(names) - {DAEMON}:  # no rank is on a node's host
        return senders(tensors, boxes, rank, len(held), items), {}, frozenset()
    hosts = np.array([names.index(known[r]) if r in known else -1 for r in range(len(held))], np.int64)
    sizes = np.array([spec.size for spec in specs], np.int64)
    nodes = {number for number, name in enumerate(names) if name != DAEMON}
    older = {int(hosts[r]) for r in known.keys() - set(gatherers)}
    found = senders_by_host(tensors, boxes, rank, len(held), sizes, items, hosts, nodes - older)
    homes = {number: names[host] for number, host in enumerate(found.hosts.tolist()) if host in nodes}
    return found.pieces, homes, frozenset(np.flatnonzero(found.gathered).tolist())


def current(publishers: Iterable[PublisherRecord]) -> dict[str, PublisherRecord]:
    """Return the publisher of each model that publishes it, or the newest one of a model without."""
    found: dict[str, PublisherRecord] = {}
    for publisher in sorted(publishers, key=lambda each: (each.state == ACTIVE, each.epoch)):
        found[publisher.model] = publisher
    return found


def home_boxes(publisher: PublisherRecord, rank: int, *, gathered: bool) -> Ints:
    """Return the positions of boxes that a rank may write on its host's node: those of gathered tensors, or of all others."""
    homes = {number: node for number, node in publisher.homes.items() if (number in publisher.gathered) == gathered}
    return boxes_at_home(homes, publisher.boxes[rank])


def frozen_boxes(publisher: PublisherRecord, rank: int) -> Ints:
    """Return the positions of boxes that a rank sends of frozen tensors. None of these is gathered."""
    return np.flatnonzero(np.isin(publisher.boxes[rank].tensors, [*publisher.frozen]))


def boxes_at_home(homes: Mapping[int, str], boxes: PackedBoxes) -> Ints:
    """Return the positions of boxes that a rank may write on its host's node. `homes`: a node by the tensor's number."""
    return np.flatnonzero(np.isin(boxes.tensors, list(homes))) if homes else np.zeros(0, np.int64)


def ranks_at_home(homes: Mapping[int, str], boxes: Mapping[int, PackedBoxes], hosts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks that may write on the node of their host, by node."""
    found: dict[str, list[int]] = {}
    for rank, host in hosts.items():
        if host != DAEMON and len(boxes_at_home(homes, boxes[rank])):
            found.setdefault(host, []).append(rank)
    return found
