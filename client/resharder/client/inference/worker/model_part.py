"""The models of a worker: the model itself, and the drafter of vLLM's speculative decoding.

A drafter from the model's own checkpoint (MTP layers) is part of every version. It has its own
`load_weights` and is recorded, routed and verified separately. Modules that vLLM shares between the two
(embedding, head) belong to the model; the drafter's recording excludes them.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from resharder.client.gpu.host_to_device import HostToDevice
from resharder.client.inference.engine import Host, InstallError, ModelConfig, refuse_config
from resharder.client.inference.recording import inventory, recorder
from resharder.client.inference.recording.recorder import Recording
from resharder.client.inference.recording.wrappers import named_modules
from resharder.client.inference.worker.install import Prepared
from resharder.client.inference.worker.memory import live_now
from resharder.client.inference.worker.routing import Evidence, Route, decide, gather_evidence, renew_evidence
from resharder.client.inference.worker.source import VersionSource
from resharder.client.versions.manifest import Needs, VersionManifest
from resharder.converters.allowances import UNWRITTEN, VARIABLE, collecting, refuse
from resharder.converters.geometry.layout import ITEM_SIZES, Box, Layout, TensorSpec, box_size

MODEL, DRAFTER = "model", "drafter"
Models = Mapping[str, torch.nn.Module]
"""A worker's models by name, `MODEL` first."""


def shared_modules(models: Models, name: str) -> frozenset[str]:
    """Return the paths of modules in the model `name` that belong to `MODEL`; empty for `MODEL` itself."""
    owned = {id(module) for _, module in named_modules(models[MODEL])} if name != MODEL else set()
    return frozenset(path for path, module in named_modules(models[name], remove_duplicate=False) if id(module) in owned)


@dataclass
class ModelPart:
    """One model of a worker: its recording and its route."""

    name: str
    """`MODEL` or `DRAFTER`."""
    config: ModelConfig
    """The engine's configuration of the model."""
    cannot_reload_quantised: str = ""
    """Why modules of quantised weights that post-processing has changed cannot be reloaded; empty if they can."""
    shared: frozenset[str] = frozenset()
    """Paths of modules that belong to `MODEL`."""
    recording: Recording | None = None
    evidence: Evidence | None = None
    """Evidence from versions that went through `load_weights`."""
    route: Route | None = None
    """The route that follows from `evidence`."""
    warnings: tuple[str, ...] = ()
    """Refusals of `record` that the environment allows."""
    digests: Mapping[tuple[str, Box], int] | None = None
    """The store's digests of the version that was installed last; None if they are not known."""
    _copy: tuple[Route, HostToDevice] | None = None

    def prepare(self, source: VersionSource, model: torch.nn.Module, device: torch.device) -> Prepared | None:
        """Prepare the copy of all boxed pieces to a GPU.

        Args:
            source: The version. Its pages must be registered for `device`.
            model: The model.
            device: The model's GPU.

        Returns:
            The copy; `None` if no box is copied straight into memory.
        """
        if self.route is None or not self.route.boxed:
            return None
        if self._copy is None or self._copy[0] is not self.route:
            tensors = {piece.tensor: self.known.layout.tensors[piece.tensor] for piece in self.route.boxed}
            self._copy = self.route, HostToDevice(Layout(tensors, self.route.boxed), device)
        placed = self._copy[1].place(source.arrays, live_now(model, frozenset(p.local for p in self.route.boxed)))
        return Prepared(placed, source.expected.of(self.route.boxed).tolist())

    def record(self, recording: Recording, manifest: VersionManifest, own: frozenset[str] = frozenset()) -> None:
        """Set the recording, without shared modules.

        Args:
            recording: The recording of the model's loader with the tensors of `manifest`.
            manifest: The version.
            own: Paths of tensors that the running engine has loaded from a checkpoint of its own.

        Raises:
            InstallError: `manifest` lacks a tensor or a part of a tensor that the model loads (unless the environment
                allows it), or has it in another format, or the loader of a drafter or of a quantised model cannot be
                recorded, so that shared modules cannot be excluded, or missing tensors not be found.
        """
        recording = recording.without(self.shared)
        if recording.unfit:
            reasons = [f"{name}: {why}" for name, why in sorted(recording.unfit.items())]
            raise InstallError(
                f"{manifest.name} has tensors in other formats than those in which the {self.name} loads them; "
                f"{len(reasons)} parameters do not fit: {'; '.join(reasons[:4])}"
            )
        with collecting() as warnings:
            self._refuse_unwritten(recording, manifest, own)
        if "" in recording.impure and (self.name != MODEL or recording.quantised):
            raise InstallError(f"cannot record the loader of the {self.name}: {recording.impure['']}")
        self.recording, self.warnings = recording, tuple(warnings)

    def _refuse_unwritten(self, recording: Recording, manifest: VersionManifest, own: frozenset[str]) -> None:
        unwritten = dict(recording.unwritten)
        if "" not in recording.impure:
            left = own.intersection(recording.locals).difference(unwritten, *recording.reads.values())
            unwritten |= dict.fromkeys(left, "nothing, but the server has loaded it from a checkpoint of its own")
        if unwritten:
            reasons = [f"{name} ({how})" for name, how in sorted(unwritten.items())]
            refuse(
                UNWRITTEN,
                InstallError(
                    f"{manifest.name} lacks tensors that the {self.name} loads: {len(reasons)} parameters would keep what is "
                    f"in memory now. They get {'; '.join(reasons[:4])}{'; …' if len(reasons) > 4 else ''}. Publish the whole "
                    f"checkpoint. If the model does not read the rest, "
                    f"start the server with {VARIABLE}={UNWRITTEN}"
                ),
            )

    def share(self, shared: frozenset[str]) -> bool:
        """Set the shared modules, and return whether they differ. vLLM shares them after it has loaded a drafter."""
        if shared == self.shared:
            return False
        self.shared = shared
        if self.recording is not None:
            self.recording = self.recording.without(shared)
        if self.recording is not None and self.evidence is not None:
            self.evidence = self.evidence.without(shared, self.recording)
            self.route = decide(self.recording, self.evidence)
        return True

    def decide_route(self, model: torch.nn.Module, source: VersionSource) -> None:
        """Decide the route of later versions, after `source` went through `load_weights`.

        Later calls decide about modules that an earlier version has left unproven.

        Raises:
            InstallError: Loading made a tensor whose source weights cannot be determined, or the engine has changed quantised
                weights and cannot reload them.
        """
        recording = self.known
        if self.evidence is None:
            found = gather_evidence(model, recording, source, self.shared)
        elif self.evidence.unproven:
            found = renew_evidence(self.evidence, model, recording, source)
        else:
            return
        if self.cannot_reload_quantised:
            self._refuse_changed(recording, found)
        self.evidence, self.route = found, decide(recording, found)

    def _refuse_changed(self, recording: Recording, evidence: Evidence) -> None:
        """Raise `InstallError` if later versions cannot be copied straight into all modules of quantised weights.

        Modules that are unproven hold what was loaded, so they can be loaded again.
        """
        proven = evidence._replace(unlike=evidence.unlike - evidence.unproven)
        if changed := sorted(decide(recording, proven).modules & recording.quantised):
            raise InstallError(
                f"{len(changed)} modules do not hold their quantised weights as versions have them, or hold tensors that derive "
                f"from these: {', '.join(changed[:4])}{', …' if len(changed) > 4 else ''}. {self.cannot_reload_quantised}"
            )

    @property
    def known(self) -> Recording:
        """The recording. Raises `InstallError` before there is one."""
        if self.recording is None:
            raise InstallError(f"the {self.name} is not recorded yet")
        return self.recording

    @property
    def loaded(self) -> frozenset[str]:
        """HF tensors that go through `load_weights` in each install; empty before the route is decided."""
        return self.route.loaded if self.route else frozenset()

    @property
    def impure(self) -> dict[str, str]:
        """HF tensors that are not only copied, and the reasons; empty before the recording."""
        return self.recording.impure if self.recording else {}


def needs(parts: Iterable[ModelPart]) -> Needs:
    """Return the boxes of each HF tensor that any of the parts reads."""
    boxes: dict[str, dict[Box, None]] = {}
    for part in parts:
        for name, found in part.known.needs.items():
            boxes.setdefault(name, {}).update(dict.fromkeys(found))
    return {name: tuple(found) for name, found in boxes.items()}


class ModelParts:
    """The model of one worker and its drafter, if it has one, each made when it is first asked for."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.by_name: dict[str, ModelPart] = {}
        self.needed_bytes = 0
        """Bytes of a version that the parts read."""
        self._config_warnings: list[str] = []
        self._needs: tuple[list[Recording], Needs] = [], {}

    def part(self, name: str) -> ModelPart:
        """Return the part, and create it on the first call."""
        if name not in self.by_name:
            config = self._host.model_config(drafter=name == DRAFTER)
            self.by_name[name] = ModelPart(name, config, self._host.cannot_reload_quantised)
        return self.by_name[name]

    def record_running(self, models: Models, get_manifest: Callable[[], VersionManifest]) -> VersionManifest | None:
        """Record the running models that were not recorded during their load.

        Returns:
            The manifest if it was needed, else `None`.
        """
        manifest, changed = None, not self.needed_bytes
        for name, model in models.items():
            part = self.part(name)
            changed |= part.share(shared_modules(models, name))
            if part.recording is None:
                if manifest is None:
                    manifest = get_manifest()
                    self.check_config(manifest.name, manifest.config)
                with self._host.calling(), self._host.recordable(model):
                    recording = recorder.record(model, manifest.specs, self._host.original_loader, self._host.defaults)
                notes = inventory.NOTES.get(model)
                part.record(recording, manifest, notes.own if notes else frozenset())
        if manifest is not None or changed:
            self.count_needed_bytes()
        return manifest

    @property
    def warnings(self) -> list[str]:
        """Refusals that the environment allows, of all parts and of the config that was checked last."""
        return [*self._config_warnings, *(text for part in self.by_name.values() for text in part.warnings)]

    def count_needed_bytes(self) -> None:
        """Update `needed_bytes` after a recording."""
        specs = {name: spec for part in self.by_name.values() for name, spec in part.known.layout.tensors.items()}
        self.needed_bytes = sum(
            box_size(box) * ITEM_SIZES[specs[name].dtype] for name, boxes in self.needs().items() for box in boxes
        )

    def needs(self) -> Needs:
        """Return the boxes of each HF tensor that the worker reads: the same object until another recording is made."""
        known, found = self._needs
        recordings = [part.known for part in self.by_name.values()]
        if len(known) != len(recordings) or any(a is not b for a, b in zip(known, recordings, strict=True)):
            self._needs = _, found = recordings, needs(self.by_name.values())
        return found

    @property
    def loaded(self) -> frozenset[str]:
        """HF tensors that go through `load_weights` in each install."""
        return frozenset(name for part in self.by_name.values() for name in part.loaded)

    def check_config(self, version: str, config: bytes, booting: bool = False) -> None:
        """Raise `InstallError` if the engine computes with another config.json than the version's.

        Args:
            version: Full name of the version.
            config: Its config.json; empty if the daemon is older and does not send it.
            booting: Whether the server starts, so that it is no use to start it again as it is.
        """
        if config:
            with collecting() as warnings:
                refuse_config(version, self._host.config_differences(config), booting)
            self._config_warnings = warnings

    def check_early(self, version: str, config: bytes, tensors: str) -> None:
        """Raise `InstallError` as `check` does, for a version that is not READY. Of its tensors only the fingerprint is known."""
        self.check_config(version, config)
        if tensors and any(part.known.fingerprint != tensors for part in self.by_name.values()):
            raise InstallError(
                f"{version} has other tensors than the version from which this server has learnt the layout, so it is not "
                "installed ahead of READY. They are named when it is READY"
            )

    def check(self, manifest: VersionManifest) -> None:
        """Raise `InstallError` if the version has another config than the engine, or other tensors than the recorded ones."""
        self.check_config(manifest.name, manifest.config)
        for part in self.by_name.values():
            known = part.known.layout.tensors
            if manifest.specs != known:
                raise InstallError(
                    f"{manifest.name} has other tensors than the version from which this server has learnt the layout: "
                    f"{_compared(known, manifest.specs)}. If the model has changed, restart the server"
                )


def _compared(known: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> str:
    """Describe how the tensors of a version differ from the known ones."""
    kinds = {
        "it lacks": known.keys() - found.keys(),
        "new are": found.keys() - known.keys(),
        "of another shape or dtype are": {name for name in known.keys() & found.keys() if known[name] != found[name]},
    }
    return "; ".join(
        f"{what} {', '.join(sorted(names)[:4])}{', …' if len(names) > 4 else ''}" for what, names in kinds.items() if names
    )
