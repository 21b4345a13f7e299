"""Installation of a version into a running model, and its verification.

`routing.py` decides which boxes are copied straight into parameters and which tensors go through the
engine's loader.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from resharder.client.gpu.host_to_device import BoundCopy
from resharder.client.inference.engine import Host, InstallError, ModelConfig
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.worker.memory import (
    Fault,
    find_unchanged,
    live_now,
    live_tensors,
    read_all,
    synchronize,
    write_all,
)
from resharder.client.inference.worker.routing import Route
from resharder.client.inference.worker.source import VersionSource
from resharder.client.tracing import Timings, timed
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Piece, box_index, box_size, format_box
from resharder.converters.models.tensor_io import tensor_of_bits
from resharder.converters.storage.digest import digest
from torch.profiler import record_function


@dataclass(frozen=True)
class Installed:
    """Boxes verified, bytes copied and seconds taken by an install, summed over the parts of the model."""

    verified: int
    """Number of boxes with an equal digest."""
    boxed_bytes: int
    """Bytes that go straight into parameters."""
    seconds: float
    path: str = ""
    """Links of the direct path that the boxes came over; empty for the store."""
    kept_bytes: int = 0
    """Bytes of `boxed_bytes` that were not copied, because memory had them already."""

    def __add__(self, other: "Installed") -> "Installed":
        verified, size = self.verified + other.verified, self.boxed_bytes + other.boxed_bytes
        seconds, kept = self.seconds + other.seconds, self.kept_bytes + other.kept_bytes
        return Installed(verified, size, seconds, self.path or other.path, kept)


class Prepared(NamedTuple):
    """A copy of all boxes of a route to a GPU, prepared while the server serves."""

    copy: BoundCopy
    expected: list[int]
    """The store's digest of each box."""

    def is_for(self, route: Route, live: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the copy is of this route's boxes and into these tensors."""
        return self.copy.layout.pieces is route.boxed and self.copy.is_at(live)


def install(
    host: Host,
    model: torch.nn.Module,
    model_config: ModelConfig,
    recording: Recording,
    route: Route,
    source: VersionSource,
    arrived: bool = False,
    prepared: Prepared | None = None,
    timings: Timings | None = None,
    before: Mapping[tuple[str, Box], int] | None = None,
) -> Installed:
    """Install the version of `source` into `model` and verify it.

    Args:
        host: The worker process.
        model: The model.
        model_config: The engine's configuration of the model.
        recording: The model's recording.
        route: The route of each tensor.
        source: The version.
        arrived: Whether the direct path has already delivered and verified the route's boxes.
        prepared: A prepared copy of the route's boxes from registered pages. Without it, or if it does not fit,
            CUDA copies through its own buffers.
        timings: Receives the phase `verify` for tensors that went through `load_weights`. Boxes are
            verified while they are copied.
        before: The store's digests of the version that was installed last. Boxes that have the same digests in both are digested
            in memory first, and copied only if memory has others. None copies all.

    Returns:
        The numbers of verified boxes and copied bytes, and the duration.

    Raises:
        InstallError: A digest differs. The model may then have a mix of versions, but no empty parameter.
    """
    started = time.perf_counter()
    synchronize(host)
    fault = Fault.from_environment()
    wrong: list[str] = []
    verified: set[tuple[str, Box]] = set()
    verified_together = len(route.boxed) if arrived else 0  # boxes whose digests were compared as one list
    kept_bytes = 0

    def check(tensor: str, box: Box, found: int, where: str) -> None:
        if found == source.expected[tensor, box]:
            verified.add((tensor, box))
        else:
            wrong.append(_difference(tensor, box, source.expected[tensor, box], found, where))

    with host.calling():
        if not arrived:
            with record_function("resharder: copy and digest"):
                live = live_now(model, frozenset(p.local for p in route.boxed))
                if prepared is not None and prepared.is_for(route, live) and not fault.kind:
                    digests = prepared.copy.run()
                    verified_together = len(digests) if digests == prepared.expected else 0
                    written = [] if verified_together else list(zip(route.boxed, digests, strict=True))
                else:
                    same = _same(route, source, before) if before is not None and not fault.kind else []
                    kept = find_unchanged(host, live, same, source) if same else []
                    there = {*map(id, (piece for piece, _ in kept))}
                    rest = [piece for piece in route.boxed if id(piece) not in there] if kept else route.boxed
                    kept_bytes = sum(box_size(p.box) * ITEM_SIZES[source.specs[p.tensor].dtype] for p, _ in kept)
                    written = [*kept, *write_all(host, live, rest, source, fault)]
            for piece, found in written:
                check(piece.tensor, piece.box, found, f"in {piece.local}")
        failpoint("worker.apply.half-way")
        fault.half_way()
        if route.loaded:
            names = [name for name in source.specs if name in route.loaded]
            fed = Feed(source, names, recording, fault)
            with (
                record_function("resharder: load_weights"),
                inventory.observed_reload(model),
                host.reloading(model, model_config, route.modules),
            ):
                cast(Any, model).load_weights(iter(fed))
            wrong += fed.differences()
            verified |= fed.boxes
            if route.readable:
                synchronize(host)
                with timed(timings if timings is not None else [], "verify"), record_function("resharder: digest"):
                    read = read_all(live_tensors(model), route.readable, source.specs)
                for piece, found in zip(route.readable, read, strict=True):
                    check(piece.tensor, piece.box, found, f"in {piece.local}")
    synchronize(host)
    refuse(wrong)
    seconds = time.perf_counter() - started
    return Installed(len(verified) + verified_together, route.boxed_bytes, seconds, kept_bytes=kept_bytes)


def _same(route: Route, source: VersionSource, before: Mapping[tuple[str, Box], int]) -> list[Piece]:
    """Return the boxed pieces that have the same digest in a version as in the one before."""
    expected = source.expected
    boxes = ((piece, (piece.tensor, piece.box)) for piece in route.boxed)
    return [piece for piece, box in boxes if box in before and before[box] == expected[box]]


class Feed:
    """The iterable of whole HF tensors that `load_weights` consumes.

    Args:
        source: The version.
        names: The HF tensors to yield, in order.
        recording: The model's recording. Impure tensors are copied, since a loader may compute in place.
        fault: A fault to inject.
    """

    def __init__(self, source: VersionSource, names: list[str], recording: Recording, fault: Fault) -> None:
        self._source, self._names, self._recording, self._fault = source, names, recording, fault
        self.digests: dict[str, dict[Box, int]] = {}
        """Digests of the needed boxes of each consumed tensor, taken when the loader requested the next one."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        needs, impure = self._recording.needs, self._recording.impure
        for name in self._names:
            array = self._fault.applied(name, self._source)
            if array is None:
                continue
            spec = self._source.specs[name]
            tensor = tensor_of_bits(self._source.copyable(array), spec.dtype)
            # The store's memory is read-only.
            yield name, tensor.clone() if name in impure or "" in impure else tensor
            self.digests[name] = {box: digest(array[box_index(box)], box, spec.shape) for box in needs[name]}

    @property
    def boxes(self) -> set[tuple[str, Box]]:
        """The boxes of all consumed tensors."""
        return {(name, box) for name, digests in self.digests.items() for box in digests}

    def differences(self) -> list[str]:
        """Return a message for each tensor that the loader did not consume, or that differs from the store's."""
        missing = [f"{name}: load_weights did not consume it" for name in self._names if name not in self.digests]
        return missing + [
            _difference(name, box, self._source.expected[name, box], found, "in load_weights")
            for name, digests in self.digests.items()
            for box, found in digests.items()
            if found != self._source.expected[name, box]
        ]


def _difference(tensor: str, box: Box, expected: int, found: int, where: str) -> str:
    return f"{tensor}{format_box(box)} {where}: expected digest {expected:016x}, found {found:016x}"


def refuse(wrong: list[str]) -> None:
    """Raise `InstallError` with these differences unless there are none."""
    if wrong:
        raise InstallError(f"{len(wrong)} boxes differ from the store's digests: {'; '.join(wrong[:4])}")
