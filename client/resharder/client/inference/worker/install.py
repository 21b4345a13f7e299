"""Installation of a version into a running model: boxes straight into parameters, the rest through the engine's loader, and the
verification of both. `routing.py` decides which way each tensor takes.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from resharder.client.gpu.host_to_device import BoundCopy
from resharder.client.inference.engine import Host, ModelConfig
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.faults import Fault
from resharder.client.inference.worker.memory import live_now, live_tensors, read_all, synchronize, write_all
from resharder.client.inference.worker.routing import Route
from resharder.client.inference.worker.source import VersionSource, as_torch
from resharder.client.tracing import Timings, timed
from resharder.converters.geometry.layout import Box, box_index, format_box
from resharder.converters.storage.digest import digest
from torch.profiler import record_function


@dataclass(frozen=True)
class Installed:
    """`proven`: boxes whose digest was compared and equal; `boxed_bytes` went straight into parameters."""

    proven: int
    boxed_bytes: int
    seconds: float

    def __add__(self, other: "Installed") -> "Installed":
        return Installed(self.proven + other.proven, self.boxed_bytes + other.boxed_bytes, self.seconds + other.seconds)


class Prepared(NamedTuple):
    """A copy of all of a route's boxes that was made ready while clients were served, and the digests that it has to find."""

    copy: BoundCopy
    expected: list[int]

    def is_for(self, route: Route, live: Mapping[str, torch.Tensor]) -> bool:
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
) -> Installed:
    """Brings `model` to the version of `source`, or raises InstallError; then it may hold a mix, but never an empty parameter.

    `arrived`: the route's boxes are in place and proven; they came over the direct path. `prepared`: copies them to a GPU from
    registered pages of the source; without it CUDA copies them through buffers of its own. `timings` get how long the proof of
    what `load_weights` brought took; boxes are proven while they are copied.
    """
    started = time.perf_counter()
    synchronize(host)
    fault = Fault.from_environment()
    wrong: list[str] = []
    proven: set[tuple[str, Box]] = set()
    at_once = len(route.boxed) if arrived else 0  # boxes that were all proven together

    def check(tensor: str, box: Box, found: int, where: str) -> None:
        if found == source.expected[tensor, box]:
            proven.add((tensor, box))
        else:
            wrong.append(_difference(tensor, box, source.expected[tensor, box], found, where))

    with host.calling():
        if not arrived:
            with record_function("resharder: copy and digest"):
                live = live_now(model, frozenset(p.local for p in route.boxed))
                if prepared is not None and prepared.is_for(route, live) and not fault.kind:
                    found_there = prepared.copy.run()
                    at_once = len(found_there) if found_there == prepared.expected else 0
                    written = [] if at_once else list(zip(route.boxed, found_there, strict=True))
                else:
                    written = write_all(host, live, route.boxed, source, fault)
            for piece, found in written:
                check(piece.tensor, piece.box, found, f"in {piece.local}")
        fault.half_way()
        if route.loaded:
            names = [name for name in source.specs if name in route.loaded]
            fed = Feed(source, names, recording, fault)
            with host.reloading(model, model_config, route.modules), record_function("resharder: load_weights"):
                cast(Any, model).load_weights(iter(fed))
            wrong += fed.differences()
            proven |= fed.boxes
            if route.readable:
                synchronize(host)
                with timed(timings if timings is not None else [], "verify"), record_function("resharder: digest"):
                    read = read_all(live_tensors(model), route.readable, source.specs)
                for piece, found in zip(route.readable, read, strict=True):
                    check(piece.tensor, piece.box, found, f"in {piece.local}")
    synchronize(host)
    refuse(wrong)
    return Installed(len(proven) + at_once, route.boxed_bytes, time.perf_counter() - started)


class Feed:
    """What `load_weights` gets: HF tensors whole. `digests` has those that it took, as they were when it was done with them."""

    def __init__(self, source: VersionSource, names: list[str], recording: Recording, fault: Fault) -> None:
        self._source, self._names, self._recording, self._fault = source, names, recording, fault
        self.digests: dict[str, dict[Box, int]] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        needs, impure = self._recording.needs, self._recording.impure
        for name in self._names:
            array = self._fault.applied(name, self._source)
            if array is None:
                continue
            spec = self._source.specs[name]
            tensor = as_torch(array, spec.dtype)
            # A loader that computes may do so in place, and the store's memory is read-only.
            yield name, tensor.clone() if name in impure or "" in impure else tensor
            self.digests[name] = {box: digest(array[box_index(box)], box, spec.shape) for box in needs[name]}

    @property
    def boxes(self) -> set[tuple[str, Box]]:
        return {(name, box) for name, digests in self.digests.items() for box in digests}

    def differences(self) -> list[str]:
        """What the loader did not take, or took with other bytes than the store's."""
        missing = [f"{name}: did not go into load_weights" for name in self._names if name not in self.digests]
        return missing + [
            _difference(name, box, self._source.expected[name, box], found, "as it went into load_weights")
            for name, digests in self.digests.items()
            for box, found in digests.items()
            if found != self._source.expected[name, box]
        ]


def _difference(tensor: str, box: Box, expected: int, found: int, where: str) -> str:
    return f"{tensor}{format_box(box)} {where}: expected digest {expected:016x}, found {found:016x}"


def refuse(wrong: list[str]) -> None:
    """Raises InstallError if there is anything."""
    if wrong:
        raise InstallError(f"{len(wrong)} boxes are not what the store holds: {'; '.join(wrong[:4])}")
