"""Verification of a worker's memory while the worker serves.

Two kinds of memory are compared:

- boxes that contain HF tensors unchanged, with the store's digests of the installed version;
- every other tensor that the model reads, with a fingerprint. Tensors of modules that go through
  `load_weights` get a new fingerprint in each install. All others keep that of the first install: no
  install writes them, so no install may hide a change.

Parts of a parameter that no HF tensor fills (padding) and memory that a kernel hides are not compared. `covered_bytes` counts
the rest, and `uncompared` says why it is less than the version. A thread reads memory in slices. Code that writes to memory or
frees it must use `exclusive`, which waits for the current slice and interrupts the verification.
"""

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from resharder.client.gpu.streams import on_stream
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.worker.memory import live_tensors, read_all
from resharder.client.inference.worker.model_part import MODEL, ModelPart, Models
from resharder.client.inference.worker.routing import Route, is_like
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, box_size
from resharder.converters.storage.digest import MASK
from resharder.v1 import resources_pb2

logger = logging.getLogger("resharder.inference.verify")

_SLICE_BYTES = 4 << 20  # takes a few milliseconds of one core, and 64 MiB of a GPU's memory
_MAX_NAMES = 8  # of different tensors in a report
# Reasons for not comparing a tensor of the version.
_HIDDEN = "the engine has packed them into memory of a kernel, which cannot be read"
_EARLY = "the version is served ahead of READY, and the store's digests are not known yet"
_UNRECORDED = "where the model's loader puts them could not be recorded"
_OTHER = "the engine keeps them in a form that cannot be compared"


@dataclass
class Baseline:
    """The expected memory of one model."""

    route: Route | None = None
    digests: Mapping[tuple[str, Box], int] | None = None
    """The store's digests of `pieces`, by HF tensor and box; `None` if they are not available yet."""
    prints: dict[str, int] = field(default_factory=dict)
    """Fingerprints of all other tensors, by path."""
    fixed: frozenset[str] = frozenset()
    """Paths that no install writes."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces that contain HF tensors unchanged."""
        return (*self.route.boxed, *self.route.readable) if self.route is not None else ()


@dataclass
class Comparison:
    """The result of a comparison: how much was compared, why the rest was not, and the paths of different tensors."""

    tensors: int = 0
    covered_bytes: int = 0
    digested_bytes: int = 0
    """Bytes of `covered_bytes` that were compared with the store's digests."""
    uncompared: dict[str, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """For each reason, the HF tensors that were not compared, and their bytes."""
    different: list[str] = field(default_factory=list)


class Interrupted(Exception):
    """Memory was written or freed during a verification."""


class Verifier:
    """The verifier of one worker.

    Args:
        parts: The worker's parts, by name.
        device: The device of the models.
        rank: The worker's rank.
        version: Returns the installed version. Called under the verifier's lock.
        unverifiable: Returns the reason why memory cannot be verified now, empty if it can. Called under the lock.
        altered: Called under the lock with a result that has differences.
        report: Called with every result, on the thread of `verify`.
    """

    def __init__(
        self,
        parts: Mapping[str, ModelPart],
        device: torch.device,
        rank: int,
        version: Callable[[], int],
        unverifiable: Callable[[], str],
        altered: Callable[[resources_pb2.Verification], None],
        report: Callable[[resources_pb2.Verification], None],
    ) -> None:
        self._parts, self._device, self._rank = parts, device, rank
        self._version, self._unverifiable, self._altered, self._report = version, unverifiable, altered, report
        self._expected: dict[str, Mapping[tuple[str, Box], int] | None] = {}
        self._baselines: dict[str, Baseline] = {}
        self._models: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._suspect = False  # a tensor differed, and no install has succeeded since
        self._lock = threading.Lock()  # of memory: a slice is read, or memory is written
        self._epoch = 0  # number of `exclusive` sections
        self._wake, self._request, self._thread = threading.Event(), "", None  # type: threading.Event, str, threading.Thread | None

    # Called on vLLM's thread

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Exclude and interrupt verification while memory is written or freed."""
        with self._lock:
            self._epoch += 1
            yield

    def expect(self, part: ModelPart, expected: Mapping[tuple[str, Box], int] | None) -> None:
        """Set the store's digests of the version being installed, by HF tensor and box; `None` if not available yet."""
        self._expected[part.name] = expected

    def installed(self, models: Models) -> None:
        """Take baselines after an install, while the engine is paused.

        Raises:
            InstallError: A tensor differed before, and the install did not restore it.
        """
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        for name, model in models.items():
            self._baselines[name] = self._baseline(name, model, self._baselines.get(name))
        self._suspect = False

    def start(self, models: Models, seconds: float) -> None:
        """Start the thread, once the engine is up and before it serves. Later calls are no-ops.

        Takes baselines of models that were booted from the daemon.

        Args:
            models: The worker's models.
            seconds: Interval of verifications; 0 verifies on request only.
        """
        if self._thread is not None:
            return
        if not self._baselines and not self._unverifiable():
            try:
                self.installed(models)
            except Exception:  # the server can serve without verification
                logger.exception("cannot take a baseline, the worker's memory is not verified until the next install")
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._thread = threading.Thread(target=self._run, args=(seconds,), name="resharder-verify", daemon=True)
        self._thread.start()

    # Called on the reporter's thread

    def request(self, request: str) -> None:
        """Verify at once, unless `request` is the id of the last request."""
        if request and request != self._request:
            self._request = request
            self._wake.set()

    # Called on the verifier's thread

    def _run(self, seconds: float) -> None:
        while True:
            self._wake.wait(seconds or None)
            self._wake.clear()
            models = {name: model for name, ref in self._models.items() if (model := ref()) is not None}
            if len(models) < len(self._models):
                return
            self.verify(models)
            del models

    def verify(self, models: Models) -> resources_pb2.Verification:
        """Compare memory with the baselines and report the result."""
        began, result = time.monotonic(), resources_pb2.Verification(rank=self._rank, request=self._request)
        result.time.GetCurrentTime()
        with self._lock:
            epoch, result.version, result.skipped = self._epoch, self._version(), self._reason_to_skip()
        if not result.skipped:
            try:
                failpoint("worker.verify")
                with self._own_stream():
                    found = self._compare(models, epoch)
                result.tensors, result.covered_bytes, result.digested_bytes = (
                    found.tensors,
                    found.covered_bytes,
                    found.digested_bytes,
                )
                for reason, tensors in found.uncompared.items():
                    names, size = [name for name, _ in tensors[:_MAX_NAMES]], sum(size for _, size in tensors)
                    result.uncompared.add(reason=reason, tensors=len(tensors), bytes=size, names=names)
                result.different_tensors = len(found.different)
                result.different.extend(found.different[:_MAX_NAMES])
            except Interrupted as error:
                result.skipped = str(error)
            except Exception as error:  # the next verification may succeed
                logger.exception("cannot verify the worker's memory")
                result.skipped = f"{type(error).__name__}: {error}"
        result.total_bytes = sum(_needed_bytes(part, tensor) for part in self._parts.values() for tensor in part.known.needs)
        result.seconds = time.monotonic() - began
        with self._lock:
            if result.different_tensors and self._epoch == epoch:
                self._suspect = True
                self._altered(result)
        self._report(result)
        return result

    def _reason_to_skip(self) -> str:
        if why := self._unverifiable():
            return why
        if self._baselines:
            return ""
        return "there is no baseline yet: the worker has not installed a version, nor booted from the daemon"

    def _own_stream(self) -> AbstractContextManager[None]:
        return _on_a_stream(self._device) if self._device.type == "cuda" else nullcontext()

    def _compare(self, models: Models, epoch: int) -> Comparison:
        found = Comparison()
        for name, model in models.items():
            part, baseline = self._parts[name], self._baselines[name]
            with self._slice(epoch):
                live = live_tensors(model)
            compared: set[str] = set()
            wrong: set[str] = set()
            for piece in baseline.pieces if baseline.digests is not None else ():
                compared.add(piece.local)
                expected = (baseline.digests or {})[piece.tensor, piece.box]
                if piece.local not in wrong and self._box(part, piece, live.get(piece.local), epoch) != expected:
                    wrong.add(piece.local)
            for path, expected in baseline.prints.items():
                tensor = live.get(path)
                if tensor is None and path not in part.known.locals:
                    continue  # the attribute was removed, so the model does not read it
                compared.add(path)
                if tensor is None or self._print(tensor, epoch) != expected:
                    wrong.add(path)
            found.tensors += len(compared)
            _count(found, part, baseline, live)
            found.different += [path if name == MODEL else f"{name}: {path}" for path in sorted(wrong)]
        return found

    def _box(self, part: ModelPart, piece: Piece, tensor: torch.Tensor | None, epoch: int) -> int | None:
        """Return the digest of a piece in memory; `None` if the tensor does not have the recorded shape, strides or dtype."""
        if tensor is None or not is_like(part.known.locals[piece.local], tensor):
            return None
        specs, total = part.known.layout.tensors, 0
        for chunk in cut_chunks([piece.box], [tensor.element_size()], _SLICE_BYTES):
            for _, box in chunk:
                with self._slice(epoch):
                    total += read_all({piece.local: tensor}, [piece.part(box)], specs)[0]
        return total & MASK

    def _print(self, tensor: torch.Tensor, epoch: int) -> int:
        slices, total = inventory.slices(tensor, _SLICE_BYTES), 0
        while True:
            with self._slice(epoch):
                digest = next(slices, None)
            if digest is None:
                return inventory.header_fingerprint(tensor) ^ (total & MASK)
            total += digest

    @contextmanager
    def _slice(self, epoch: int) -> Iterator[None]:
        """Lock memory for the read of one slice, then sleep as long as the read took.

        Raises:
            Interrupted: An `exclusive` section began since `epoch`.
        """
        with self._lock:
            began = time.perf_counter()
            if self._epoch != epoch:
                raise Interrupted("interrupted by an install, a sleep or a wake")
            yield
        time.sleep(time.perf_counter() - began)

    def _baseline(self, name: str, model: torch.nn.Module, before: Baseline | None) -> Baseline:
        part, digests = self._parts[name], self._expected.get(name)
        route = part.route
        if before is not None and before.route is route and route is not None and not route.modules and not self._suspect:
            return replace(before, digests=digests)  # an install of boxes only has no time for an inventory
        rest = self._rest(model, part)
        fixed = frozenset(f.path for f in rest if route is None or f.module not in route.modules)
        unchanged = {path: digest for path, digest in before.prints.items() if path in fixed & before.fixed} if before else {}
        if self._suspect:
            tensors = {f.path: f.tensor for f in rest}
            if wrong := sorted(path for path, digest in unchanged.items() if inventory.fingerprint(tensors[path]) != digest):
                raise InstallError(
                    f"{len(wrong)} tensors were changed that no install restores ({', '.join(wrong[:4])}): restart the server"
                )
        prints = {f.path: unchanged[f.path] if f.path in unchanged else inventory.fingerprint(f.tensor) for f in rest}
        return Baseline(route, digests, prints, fixed)

    def _rest(self, model: torch.nn.Module, part: ModelPart) -> list[inventory.Found]:
        """Return the tensors that the model reads and that no box verifies."""
        notes, everything = inventory.NOTES.get(model), inventory.reachable(model)
        known = set(notes.constant) | set(notes.made) if notes else set()
        # A parameter that a tensor without boxes fills too is fingerprinted as a whole.
        beside = {name for tensor in part.known.impure for name in part.known.reads.get(tensor, ())}
        boxed = {piece.local for piece in Baseline(part.route).pieces} - beside
        storages = {f.tensor.untyped_storage()._cdata for f in everything if f.path in boxed}
        return [
            f
            for f in everything
            if (f.parameter or f.path in known)
            and f.path not in boxed
            and f.module not in part.shared
            and f.tensor.numel()
            and f.tensor.device.type != "meta"
            and f.tensor.untyped_storage()._cdata not in storages  # not an alias of a box's memory
        ]


def _count(found: Comparison, part: ModelPart, baseline: Baseline, live: Mapping[str, torch.Tensor]) -> None:
    """Add how much of the version was compared: the needed bytes of HF tensors of which every element was."""
    digested = {(piece.tensor, piece.local) for piece in baseline.pieces} if baseline.digests is not None else set()
    for tensor in part.known.needs:
        size, locals_ = _needed_bytes(part, tensor), part.known.reads.get(tensor, frozenset())
        by_digest = {name for name in locals_ if (tensor, name) in digested}
        if locals_ and locals_ <= by_digest | baseline.prints.keys():
            found.covered_bytes += size
            found.digested_bytes += size if locals_ == by_digest else 0
            continue
        gone = any(name not in live or not live[name].numel() for name in locals_)
        reason = _UNRECORDED if not locals_ else _HIDDEN if gone else _EARLY if baseline.digests is None else _OTHER
        found.uncompared[reason].append((tensor, size))


def _needed_bytes(part: ModelPart, tensor: str) -> int:
    item = ITEM_SIZES[part.known.layout.tensors[tensor].dtype]
    return sum(box_size(box) * item for box in part.known.needs[tensor])


@contextmanager
def _on_a_stream(device: torch.device) -> Iterator[None]:
    """Read on a stream of its own, concurrently with the engine."""
    with on_stream(torch.cuda.Stream(device)), torch.no_grad():  # type: ignore[no-untyped-call]
        yield
