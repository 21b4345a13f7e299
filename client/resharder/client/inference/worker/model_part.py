"""What a worker runs: the model, and beside it the drafter of vLLM's speculative decoding.

A drafter of the model's own checkpoint (MTP layers) belongs to every version. It has a `load_weights` of its own, so it is
recorded, routed and proven by itself. Modules that vLLM shares between the two (embedding, head) are the model's: what the
drafter's loader would put there is left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from resharder.client.gpu.host_to_device import HostToDevice
from resharder.client.inference.engine import Host, ModelConfig
from resharder.client.inference.recording import recorder
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.install import Prepared
from resharder.client.inference.worker.memory import live_now
from resharder.client.inference.worker.routing import Evidence, Route, decide, gather_evidence
from resharder.client.inference.worker.source import Needs, VersionManifest, VersionSource
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Layout, box_size

MODEL, DRAFTER = "model", "drafter"
Models = Mapping[str, torch.nn.Module]  # by these names, the model first


def shared_modules(models: Models, name: str) -> frozenset[str]:
    """Paths of modules in the one called `name` that are the model's."""
    owned = {id(module) for module in models[MODEL].modules()} if name != MODEL else set()
    return frozenset(path for path, module in models[name].named_modules(remove_duplicate=False) if id(module) in owned)


@dataclass
class ModelPart:
    """What is known of one of them: `recording` once it was recorded, `evidence` and `route` once a version went through its
    loader. `config` is the engine's configuration of it, `shared` what `shared_modules` says."""

    name: str
    config: ModelConfig
    shared: frozenset[str] = frozenset()
    recording: Recording | None = None
    evidence: Evidence | None = None
    route: Route | None = None
    _copy: tuple[Route, HostToDevice] | None = None

    def prepare(self, source: VersionSource, model: torch.nn.Module, device: torch.device) -> Prepared | None:
        """The copy of all boxes that go straight into a GPU's memory; `source` is registered. None where there are none."""
        if self.route is None or not self.route.boxed:
            return None
        if self._copy is None or self._copy[0] is not self.route:
            tensors = {piece.tensor: self.known.layout.tensors[piece.tensor] for piece in self.route.boxed}
            self._copy = self.route, HostToDevice(Layout(tensors, self.route.boxed), device)
        placed = self._copy[1].place(source.arrays, live_now(model, frozenset(p.local for p in self.route.boxed)))
        return Prepared(placed, [source.expected[piece.tensor, piece.box] for piece in self.route.boxed])

    def record(self, recording: Recording, manifest: VersionManifest) -> None:
        """Raises InstallError where `manifest` lacks something that it needs, or its loader cannot be told what to leave out."""
        recording = recording.without(self.shared)
        if recording.unloaded and self.config.quantization is None:
            raise InstallError(
                f"expected {manifest.name} to have every tensor that the {self.name} loads, got none for "
                f"{len(recording.unloaded)} parameters: {', '.join(sorted(recording.unloaded)[:4])}"
            )
        if "" in recording.impure and self.name != MODEL:
            raise InstallError(f"the loader of the {self.name} cannot be followed: {recording.impure['']}")
        self.recording = recording

    def share(self, shared: frozenset[str]) -> None:
        """vLLM shares modules after a drafter was loaded."""
        if shared == self.shared:
            return
        self.shared = shared
        if self.recording is not None:
            self.recording = self.recording.without(shared)
        if self.recording is not None and self.evidence is not None:
            self.evidence = self.evidence.without(shared, self.recording)
            self.route = decide(self.recording, self.evidence)

    def learn(self, model: torch.nn.Module, source: VersionSource) -> None:
        """After `source` went through its loader: which boxes can go straight into memory from now on. Raises InstallError."""
        recording = self.known
        self.evidence = gather_evidence(model, recording, source, self.shared)
        self.route = decide(recording, self.evidence)

    @property
    def known(self) -> Recording:
        if self.recording is None:
            raise InstallError(f"expected the {self.name} to be recorded")
        return self.recording

    @property
    def loaded(self) -> frozenset[str]:
        """HF tensors that go through its loader each time, as far as that is known."""
        return self.route.loaded if self.route else frozenset()

    @property
    def impure(self) -> dict[str, str]:
        return self.recording.impure if self.recording else {}


def needs(parts: Iterable[ModelPart]) -> Needs:
    """The boxes of each HF tensor that any of them reads."""
    boxes: dict[str, dict[Box, None]] = {}
    for part in parts:
        for name, found in part.known.needs.items():
            boxes.setdefault(name, {}).update(dict.fromkeys(found))
    return {name: tuple(found) for name, found in boxes.items()}


class ModelParts:
    """The parts of one worker, and how many bytes of a version they read."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.by_name: dict[str, ModelPart] = {}
        self.needed_bytes = 0

    def part(self, name: str) -> ModelPart:
        return self.by_name.setdefault(name, ModelPart(name, self._host.model_config(drafter=name == DRAFTER)))

    def record_running(self, models: Models, get_manifest: Callable[[], VersionManifest]) -> VersionManifest | None:
        """Record the models that were not recorded while they were loaded. Returns the manifest if that took one."""
        manifest = None
        for name, model in models.items():
            part = self.part(name)
            part.share(shared_modules(models, name))
            if part.recording is None:
                manifest = manifest or get_manifest()
                with self._host.calling(), self._host.recordable(model):
                    recording = recorder.record(model, manifest.specs, self._host.original_loader)
                part.record(recording, manifest)
        self.count_needed_bytes()
        return manifest

    def count_needed_bytes(self) -> None:
        """Update `needed_bytes` after a recording."""
        specs = {name: spec for part in self.by_name.values() for name, spec in part.known.layout.tensors.items()}
        self.needed_bytes = sum(
            box_size(box) * ITEM_SIZES[specs[name].dtype] for name, boxes in self.needs().items() for box in boxes
        )

    def needs(self) -> Needs:
        return needs(self.by_name.values())

    @property
    def loaded(self) -> frozenset[str]:
        """HF tensors that go through `load_weights` in each install."""
        return frozenset(name for part in self.by_name.values() for name in part.loaded)

    def check(self, manifest: VersionManifest) -> None:
        """Raises InstallError for a version of other tensors than were recorded."""
        for part in self.by_name.values():
            known = part.known.layout.tensors
            if manifest.specs != known:
                wrong = sorted(set(manifest.specs.items()) ^ set(known.items()))[:3]
                raise InstallError(f"{manifest.name} has other tensors than the versions before it: {wrong}; restart the server")
