"""Writes versions of adapters into a worker's slots, and proves that they are there.

The engine's own code writes the first adapter of a kind, and shows where it puts each element. Later ones are copied to the same
places in a few operations: the thread that stages has Python's lock for moments only, and the engine needs it for each step.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from resharder.client.gpu.digest import CachedDigester
from resharder.client.gpu.streams import on_stream, use_gpu
from resharder.client.inference.engine import AdapterSlots, InstallError
from resharder.client.inference.recording.adapter_layout import AdapterLayout, Shapes, learn
from resharder.client.inference.worker.slot_copy import SlotCopy, TensorPlace
from resharder.client.inference.worker.source import VersionSource
from resharder.client.versions.manifest import VersionManifest
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, Piece, contiguous_strides, full_box
from resharder.converters.models.tensor_io import TORCH_DTYPES
from resharder.converters.storage.digest import Array, digest
from resharder.converters.storage.files import BITS, FileLayout

_ALIGN = 64  # bytes
_MOST = 16  # kinds that are remembered


@dataclass
class _Kind:
    """Adapters with the same tensors and config, which the engine keeps in the same way."""

    memory: "FileMemory"
    digester: CachedDigester
    copy: SlotCopy | None = None
    """None until the engine's code has written one, and it was proven."""
    adapter: Any = None
    """The engine's form of the first one, without weights."""


class AdapterWriter:
    """Writes one version after another.

    On a GPU, a version takes up to three times its size of other memory while it is written.

    Args:
        slots: The worker's slots.
        device: Their device.
    """

    def __init__(self, slots: AdapterSlots, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._lock = threading.Lock()
        self._stream: Any = None
        self._host: torch.Tensor | None = None
        self._kinds: dict[str, _Kind] = {}  # the one used last is the last one

    def load(self, slot: int, id: int, source: VersionSource) -> Any:
        """Write a version into a slot that no request names. Called on any thread.

        Args:
            slot: Number of the slot.
            id: The version's id in the engine.
            source: The version's files.

        Returns:
            The engine's form of it, for `AdapterSlots.enter`.

        Raises:
            InstallError: The engine refuses the adapter, its bytes are not the store's, or the slot does not contain it.
        """
        config = json.loads(source.manifest.config)
        self._slots.check(config, _shapes(source.manifest))
        with self._working():
            return self._load(slot, id, source, config)

    def differences(self, slot: int, id: int, source: VersionSource) -> list[str]:
        """Compare a version with its slot again, while requests use it. Called on any thread.

        Args and errors are those of `load`, which has written it.

        Returns:
            The engine's tensors that do not contain the version, bit for bit.
        """
        with self._working():
            kind = self._kinds.get(_kind_of(source.manifest, json.loads(source.manifest.config)))
            if kind is None or kind.copy is None:
                raise InstallError("not verifiable: the worker has loaded many other adapters since")
            image = kind.copy.image(self._converted(self._read(source, kind), source.manifest))
            if not self._slots.holds(slot, id):
                raise InstallError("not verifiable: the version has left its slot")
            return kind.copy.differences(slot, self._slots.read(slot) | self._slots.marks(slot), image)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Exclude other threads, and use the worker's device and a stream of its own."""
        with self._lock:
            use_gpu(self._device)
            if self._stream is None and self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            with torch.no_grad(), on_stream(self._stream) if self._stream is not None else nullcontext():
                yield

    def _converted(self, memory: torch.Tensor, manifest: VersionManifest) -> list[torch.Tensor]:
        """Return the memory once for each of the version's dtypes, in order of their names, in the slots' dtype."""
        return [memory.view(TORCH_DTYPES[dtype]).to(self._slots.dtype) for dtype in _dtypes(manifest)]

    def _load(self, slot: int, id: int, source: VersionSource, config: dict[str, Any]) -> Any:
        manifest, key = source.manifest, _kind_of(source.manifest, config)
        kind = self._kinds.pop(key, None)
        if kind is None:
            there = FileMemory(manifest.files)
            kind = _Kind(there, CachedDigester(there.layout, self._device))
        memory = self._read(source, kind)
        dtypes, converted = _dtypes(manifest), self._converted(memory, manifest)
        if kind.copy is None:
            layout = self._layout(slot, id, _shapes(manifest), config)
            tensors = {name: tensor.clone() for name, tensor in kind.memory.tensors(memory).items()}  # vLLM scales them in place
            kind.adapter = self._slots.write(slot, id, tensors, config)
            places = {
                name: TensorPlace(
                    dtypes.index(spec.dtype), kind.memory.at[name] // ITEM_SIZES[spec.dtype], self._slots.scaling(config, name)
                )
                for name, spec in manifest.specs.items()
            }
            copy = SlotCopy(layout, places, self._slots.marks(slot), self._slots.dtype, self._device)
        else:
            copy = kind.copy
        contents, image = self._slots.read(slot) | self._slots.marks(slot), copy.image(converted)
        del memory, converted
        if kind.copy is not None:
            copy.write(slot, contents, image)
        if wrong := copy.differences(slot, contents, image):
            raise InstallError(
                f"{len(wrong)} tensors of the slot differ from the version: "
                f"{', '.join(wrong[:4])}{', …' if len(wrong) > 4 else ''}"
            )
        kind.copy, self._kinds[key] = copy, kind
        if len(self._kinds) > _MOST:
            del self._kinds[next(iter(self._kinds))]
        return self._slots.renamed(kind.adapter, id)

    def _read(self, source: VersionSource, kind: _Kind) -> torch.Tensor:
        """Return the version's tensors in one piece of memory on the device, verified.

        Raises:
            InstallError: The digest of a tensor is not the store's.
        """
        size, on_gpu = kind.memory.size, self._device.type == "cuda"
        if self._host is None or self._host.numel() < size:
            self._host = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
        host = self._host[:size]
        kind.memory.copy(host.numpy(), source.contents)
        memory = host.to(self._device)
        boxes = {spec.name: full_box(spec.shape) for spec in kind.memory.specs}
        if on_gpu:
            found = kind.digester.at({"": memory}).digests()
        else:
            arrays = kind.memory.arrays(host.numpy())
            found = [digest(arrays[spec.name], boxes[spec.name], spec.shape) for spec in kind.memory.specs]
        wrong = [name for (name, box), value in zip(boxes.items(), found, strict=True) if value != source.expected[name, box]]
        if wrong:
            raise InstallError(f"{len(wrong)} tensors differ from the store's digests: {', '.join(wrong[:4])}")
        return memory

    def _layout(self, slot: int, id: int, shapes: Shapes, config: dict[str, Any]) -> AdapterLayout:
        unscaled = self._slots.unscaled(config)
        layout = learn(
            shapes,
            lambda tensors: _done(self._slots.write(slot, id, tensors, unscaled)),
            lambda: self._slots.read(slot),
        )
        held = layout.elements()
        missing = [name for name in shapes if not held.get(name)]
        if self._slots.whole():
            missing = [name for name, shape in shapes.items() if held.get(name, 0) < prod(shape)]
        if missing and (self._slots.whole() or len(missing) == len(shapes)):
            raise InstallError(
                f"the engine takes only a part of the adapter: it leaves out {len(missing)} tensors, as {', '.join(missing[:4])}"
            )
        return layout


class FileMemory:
    """The tensors of files in one piece of memory: those of each file as they are in it, without its header."""

    def __init__(self, files: tuple[FileLayout, ...]) -> None:
        self.specs = [spec for file in files for spec, _ in file.tensors]
        self.at: dict[str, int] = {}
        """Offset of each tensor, in bytes."""
        self.size = 0
        """Bytes of the memory."""
        self._files = files
        for file in files:
            header = len(file.header)
            self.at |= {spec.name: self.size + offset - header for spec, offset in file.tensors}
            self.size += -(-(file.size - header) // _ALIGN) * _ALIGN

    @property
    def layout(self) -> Layout:
        """Place of each tensor in the memory, which has no name."""
        specs = {spec.name: spec for spec in self.specs}
        pieces = [
            Piece(name, full_box(spec.shape), "", self.at[name] // ITEM_SIZES[spec.dtype], contiguous_strides(spec.shape))
            for name, spec in specs.items()
        ]
        return Layout(specs, tuple(pieces))

    def copy(self, memory: Array, contents: list[Array]) -> None:
        """Copy the files' tensors.

        Args:
            memory: uint8, of `size` bytes.
            contents: Bytes of each file.
        """
        begin = 0
        for file, content in zip(self._files, contents, strict=True):
            size = file.size - len(file.header)
            memory[begin : begin + size] = content[len(file.header) :]
            begin += -(-size // _ALIGN) * _ALIGN

    def arrays(self, memory: Array) -> dict[str, Array]:
        """Return the tensors in such a memory, as unsigned integers."""
        return {
            spec.name: memory[self.at[spec.name] :][: spec.size].view(BITS[ITEM_SIZES[spec.dtype]]).reshape(spec.shape)
            for spec in self.specs
        }

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in such a memory, on any device."""
        return {
            spec.name: memory[self.at[spec.name] :][: spec.size].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
            for spec in self.specs
        }


def _shapes(manifest: VersionManifest) -> dict[str, tuple[int, ...]]:
    return {name: tuple(spec.shape) for name, spec in manifest.specs.items()}


def _dtypes(manifest: VersionManifest) -> list[str]:
    return sorted({spec.dtype for spec in manifest.specs.values()})


def _kind_of(manifest: VersionManifest, config: dict[str, Any]) -> str:
    """Return a key that is equal for adapters that the engine keeps in the same way."""
    lists = {key: sorted(map(str, value)) for key, value in config.items() if isinstance(value, list)}  # PEFT's sets
    specs = sorted((spec.name, spec.shape, spec.dtype) for spec in manifest.specs.values())
    files = [(file.path, len(file.header), file.size) for file in manifest.files]
    return json.dumps([config | lists, specs, files], sort_keys=True)


def _done(written: Any) -> None:
    del written
