"""Verification of what lies in a worker's memory, while the worker serves.

Compared are

- boxes that hold HF tensors as they are, with the store's digests of the installed version;
- every other tensor that the model reads, with a fingerprint. Tensors of modules that go through `load_weights` get a new one in
  each install, the others keep the one of the first: no install writes them, so none may hide that they were changed.

Not compared: parts of a parameter that no HF tensor fills (padding), and what a kernel keeps out of reach; `covered_bytes` counts
what is. A thread of its own reads in slices. Whatever writes to memory or frees it holds `undisturbed`, which waits for one slice
and ends the verification.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.memory import live_tensors, read_all
from resharder.client.inference.worker.model_part import MODEL, ModelPart, Models
from resharder.client.inference.worker.routing import Route, is_like
from resharder.converters.geometry.chunking import cut_chunks
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, box_size
from resharder.converters.storage.digest import MASK
from resharder.v1 import resources_pb2

logger = logging.getLogger("vllm.resharder.verify")

_SLICE_BYTES = 4 << 20  # a few milliseconds of one core, and 64 MiB of a GPU's memory
_NAMED = 8  # different tensors


@dataclass
class Baseline:
    """Of one model: digests of what `route` put there, and fingerprints of the rest by path. `digests`: None where they are not
    known yet. `fixed`: paths that no install writes."""

    route: Route | None = None
    digests: Mapping[tuple[str, Box], int] | None = None
    prints: dict[str, int] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All that lies in memory as HF tensors are."""
        return (*self.route.boxed, *self.route.readable) if self.route is not None else ()


@dataclass
class Comparison:
    tensors: int = 0
    covered_bytes: int = 0
    different: list[str] = field(default_factory=list)


class Disturbed(Exception):
    """Memory was written to, or freed, while it was read."""


class Verifier:
    """One worker's. `version` and `unverifiable` (why not; empty where it can be) are asked under the lock. `told` gets every
    result on the verifier's thread, `altered` is called under the lock where something differs."""

    def __init__(
        self,
        parts: Mapping[str, ModelPart],
        device: torch.device,
        rank: int,
        version: Callable[[], int],
        unverifiable: Callable[[], str],
        altered: Callable[[resources_pb2.Verification], None],
        told: Callable[[resources_pb2.Verification], None],
    ) -> None:
        self._parts, self._device, self._rank = parts, device, rank
        self._version, self._unverifiable, self._altered, self._told = version, unverifiable, altered, told
        self._expected: dict[str, Mapping[tuple[str, Box], int] | None] = {}
        self._baselines: dict[str, Baseline] = {}
        self._models: dict[str, weakref.ref[torch.nn.Module]] = {}
        self._suspect = False  # something differed, and no install has succeeded since
        self._still, self._epoch = threading.Lock(), 0
        self._wake, self._request, self._thread = threading.Event(), "", None  # type: threading.Event, str, threading.Thread | None

    # From vLLM's thread

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Around all that writes to memory or frees it."""
        with self._still:
            self._epoch += 1
            yield

    def expect(self, part: ModelPart, expected: Mapping[tuple[str, Box], int] | None) -> None:
        """The digests of what was just installed, by HF tensor and box; None: not known yet."""
        self._expected[part.name] = expected

    def installed(self, models: Models) -> None:
        """After an install, while the engine stands still. Raises InstallError where something differed before and it was nothing
        that the install has brought back."""
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        for name, model in models.items():
            self._baselines[name] = self._baseline(name, model, self._baselines.get(name))
        self._suspect = False

    def settle(self, models: Models, seconds: float) -> None:
        """When the engine is up, before it serves. A baseline is taken of a model that was booted, and the thread begins: every
        `seconds`; 0: on request alone."""
        if self._thread is not None:
            return
        if not self._baselines and not self._unverifiable():
            try:
                self.installed(models)
            except Exception:  # a server that cannot be verified can be followed
                logger.exception("no baseline could be taken")
        self._models = {name: weakref.ref(model) for name, model in models.items()}
        self._thread = threading.Thread(target=self._run, args=(seconds,), name="resharder-verify", daemon=True)
        self._thread.start()

    # From the reporter's thread

    def ask(self, request: str) -> None:
        """Verifies at once, unless this request is known."""
        if request and request != self._request:
            self._request = request
            self._wake.set()

    # On its own thread

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
        began, said = time.monotonic(), resources_pb2.Verification(rank=self._rank, request=self._request)
        said.time.GetCurrentTime()
        with self._still:
            epoch, said.version, said.skipped = self._epoch, self._version(), self._reason()
        if not said.skipped:
            try:
                with self._beside():
                    found = self._compare(models, epoch)
                said.tensors, said.covered_bytes = found.tensors, found.covered_bytes
                said.different_tensors = len(found.different)
                said.different.extend(found.different[:_NAMED])
            except Disturbed as error:
                said.skipped = str(error)
            except Exception as error:  # the next one may go well
                logger.exception("what is in memory could not be verified")
                said.skipped = f"{type(error).__name__}: {error}"
        said.total_bytes = sum(_needed_bytes(part, tensor) for part in self._parts.values() for tensor in part.known.needs)
        said.seconds = time.monotonic() - began
        with self._still:
            if said.different_tensors and self._epoch == epoch:
                self._suspect = True
                self._altered(said)
        self._told(said)
        return said

    def _reason(self) -> str:
        if why := self._unverifiable():
            return why
        return "" if self._baselines else "no baseline was taken: expected an install, or a boot from the daemon, before"

    def _beside(self) -> AbstractContextManager[None]:
        return _on_a_stream(self._device) if self._device.type == "cuda" else nullcontext()

    def _compare(self, models: Models, epoch: int) -> Comparison:
        found = Comparison()
        for name, model in models.items():
            part, baseline = self._parts[name], self._baselines[name]
            with self._held(epoch):
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
                    continue  # an attribute that is not there any more is read by nobody
                compared.add(path)
                if tensor is None or self._print(tensor, epoch) != expected:
                    wrong.add(path)
            found.tensors += len(compared)
            found.covered_bytes += _covered(part, compared)
            found.different += [path if name == MODEL else f"{name}: {path}" for path in sorted(wrong)]
        return found

    def _box(self, part: ModelPart, piece: Piece, tensor: torch.Tensor | None, epoch: int) -> int | None:
        """The digest of what lies there; None where the tensor is not the one that was recorded."""
        if tensor is None or not is_like(part.known.locals[piece.local], tensor):
            return None
        specs, total = part.known.layout.tensors, 0
        for chunk in cut_chunks([piece.box], [tensor.element_size()], _SLICE_BYTES):
            for _, box in chunk:
                with self._held(epoch):
                    total += read_all({piece.local: tensor}, [piece.part(box)], specs)[0]
        return total & MASK

    def _print(self, tensor: torch.Tensor, epoch: int) -> int:
        slices, total = inventory.slices(tensor, _SLICE_BYTES), 0
        while True:
            with self._held(epoch):
                digest = next(slices, None)
            if digest is None:
                return inventory.header_fingerprint(tensor) ^ (total & MASK)
            total += digest

    @contextmanager
    def _held(self, epoch: int) -> Iterator[None]:
        """Around one slice; afterwards as much time is left to others. Raises Disturbed."""
        with self._still:
            began = time.perf_counter()
            if self._epoch != epoch:
                raise Disturbed("an install, a sleep or a wake came meanwhile")
            yield
        time.sleep(time.perf_counter() - began)

    def _baseline(self, name: str, model: torch.nn.Module, before: Baseline | None) -> Baseline:
        part, digests = self._parts[name], self._expected.get(name)
        route = part.route
        if before is not None and before.route is route and route is not None and not route.modules and not self._suspect:
            return replace(before, digests=digests)  # an install that wrote boxes alone has no time for a walk through everything
        rest = self._rest(model, part)
        fixed = frozenset(f.path for f in rest if route is None or f.module not in route.modules)
        kept = {path: digest for path, digest in before.prints.items() if path in fixed & before.fixed} if before else {}
        if self._suspect:
            there = {f.path: f.tensor for f in rest}
            if wrong := sorted(path for path, digest in kept.items() if inventory.fingerprint(there[path]) != digest):
                raise InstallError(
                    f"{len(wrong)} tensors were changed that no version brings back ({', '.join(wrong[:4])}): restart the server"
                )
        prints = {f.path: kept[f.path] if f.path in kept else inventory.fingerprint(f.tensor) for f in rest}
        return Baseline(route, digests, prints, fixed)

    def _rest(self, model: torch.nn.Module, part: ModelPart) -> list[inventory.Found]:
        """Tensors that the model reads and that are not proven by boxes."""
        notes, everything = inventory.NOTES.get(model), inventory.reachable(model)
        known = set(notes.constant) | set(notes.made) if notes else set()
        boxed = {piece.local for piece in Baseline(part.route).pieces}
        storages = {f.tensor.untyped_storage()._cdata for f in everything if f.path in boxed}
        return [
            f
            for f in everything
            if (f.parameter or f.path in known)
            and f.path not in boxed
            and f.module not in part.shared
            and f.tensor.numel()
            and f.tensor.device.type != "meta"
            and f.tensor.untyped_storage()._cdata not in storages  # another name of a box's memory
        ]


def _covered(part: ModelPart, compared: set[str]) -> int:
    """Bytes of HF tensors all of whose places were compared."""
    reads = part.known.reads
    return sum(_needed_bytes(part, tensor) for tensor in part.known.needs if reads.get(tensor) and reads[tensor] <= compared)


def _needed_bytes(part: ModelPart, tensor: str) -> int:
    item = ITEM_SIZES[part.known.layout.tensors[tensor].dtype]
    return sum(box_size(box) * item for box in part.known.needs[tensor])


@contextmanager
def _on_a_stream(device: torch.device) -> Iterator[None]:
    """Reads go beside what the engine does."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
        yield
