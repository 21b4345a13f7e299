"""Recording of where a model's own `load_weights` puts every element of every HF tensor, without any weights.

The model loads named tensors on the meta device. Their views keep offset and strides, so a copy into a
parameter determines the box and its destination. HF tensors that the loader does not only copy
(arithmetic, a cast, a read of a value) are recorded as impure and go through `load_weights` whole.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from resharder.client.inference.recording.view_boxes import boxes_of_copy, boxes_of_view, covered_elements
from resharder.converters.geometry.layout import Box, Layout, Piece, StridedView, TensorSpec, full_box
from resharder.converters.models.tensor_io import TORCH_DTYPES
from resharder.converters.wire.boxes import fingerprint_of
from torch.overrides import TorchFunctionMode


class Local(NamedTuple):
    """A parameter or buffer as `load_weights` expects it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    modules: tuple[str, ...]
    """Paths of the modules that have it; several if it is tied."""
    parameter: bool = True
    """Whether it is a parameter, not a buffer."""

    @property
    def quantised(self) -> bool:
        """Whether it has the dtype of quantised weights."""
        return is_quantised(self.dtype)


def is_quantised(dtype: torch.dtype) -> bool:
    """Return whether a dtype is that of quantised weights: integers, or floats of one byte."""
    return dtype.itemsize == 1 or not dtype.is_floating_point


@dataclass(frozen=True)
class Recording:
    """The result of recording a model's `load_weights`."""

    layout: Layout
    """The pure copies, as pieces."""
    locals: dict[str, Local]
    """The model's parameters and buffers, by path."""
    reads: dict[str, frozenset[str]]
    """For each HF tensor that the loader uses, the locals that it fills."""
    impure: dict[str, str]
    """For each HF tensor that is not only copied, the reason. The key "" means that the loader cannot be recorded at all."""
    unwritten: dict[str, str] = field(default_factory=dict)
    """For each parameter or buffer of which the loader leaves elements as they were, how many it writes and from which tensors.

    Empty if the loader cannot be recorded. Left out: buffers that no HF tensor fills, and parameters that have a default.
    """
    unfit: dict[str, str] = field(default_factory=dict)
    """For each parameter that the loader would cast to or from quantised weights, the reason."""

    @property
    def quantised(self) -> frozenset[str]:
        """Paths of the modules that have parameters of quantised weights."""
        found = [local for local in self.locals.values() if local.parameter and local.quantised]
        return frozenset(module for local in found for module in local.modules)

    @functools.cached_property
    def needs(self) -> dict[str, tuple[Box, ...]]:
        """The boxes of each HF tensor that this process reads, without tensors that it does not use."""
        if "" in self.impure:
            return {name: (full_box(spec.shape),) for name, spec in self.layout.tensors.items()}
        boxes: dict[str, dict[Box, None]] = defaultdict(dict)
        for piece in self.layout.pieces:
            boxes[piece.tensor][piece.box] = None
        for name in self.impure:
            boxes[name] = {full_box(self.layout.tensors[name].shape): None}
        return {name: tuple(found) for name, found in boxes.items()}

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the version's tensors, as a daemon states it for a version that is not READY."""
        return fingerprint_of(self.layout.tensors.values())

    def without(self, modules: frozenset[str]) -> "Recording":
        """Return the recording without the locals of `modules`."""
        left = {name: local for name, local in self.locals.items() if not modules.intersection(local.modules)}
        reads = {name: found for name, locals_ in self.reads.items() if (found := locals_ & left.keys())}
        return Recording(
            Layout(self.layout.tensors, tuple(piece for piece in self.layout.pieces if piece.local in left)),
            left,
            reads,
            {name: why for name, why in self.impure.items() if name in reads or not name},
            {name: why for name, why in self.unwritten.items() if name in left},
            {name: why for name, why in self.unfit.items() if name in left},
        )


def record(
    model: torch.nn.Module,
    specs: Mapping[str, TensorSpec],
    original_loader: Callable[[torch.Tensor], Any],
    defaults: Callable[[torch.nn.Module], Collection[str]] = lambda module: (),
) -> Recording:
    """Record `model.load_weights`.

    Args:
        model: The model. Its parameters must have their shapes before loading (a new model, or one under
            vLLM's `restore_metadata`). Only constants that the loader itself fills in are written.
        specs: The HF tensors of the checkpoint.
        original_loader: Returns the weight loader of a parameter or buffer.
        defaults: Returns the names of the parameters of a module that a checkpoint need not have.

    Returns:
        The recording; with the key "" in `impure` if the loader reads values.

    Raises:
        ValueError: A tensor does not have the shape that the loader copies. Errors of the loader propagate too.
    """
    tape = _Tape(specs, _locals(model))
    with _tagged_loaders(model, tape, original_loader), torch.no_grad(), _Constants(tape):
        try:
            cast(Any, model).load_weights((name, tape.tensor(spec)) for name, spec in specs.items())
        except _Unrecordable as error:
            tape.impure[""] = str(error)
    modules = dict(model.named_modules(remove_duplicate=False))
    return tape.recording(lambda path: path.rpartition(".")[2] in defaults(modules[path.rpartition(".")[0]]))


class _Unrecordable(Exception):
    """The loader needs values, which recorded tensors do not have."""


def _locals(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, Local]]:
    found: dict[int, str] = {}
    result: dict[str, tuple[torch.Tensor, Local]] = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or torch.nn.parameter.is_lazy(tensor):
                continue
            local = f"{path}.{name}" if path else name
            first = found.setdefault(_storage(tensor), local)
            if first in result:
                tied, description = result[first]
                result[first] = tied, description._replace(modules=(*description.modules, path))
            else:
                shape, strides, parameter = tuple(tensor.shape), tuple(tensor.stride()), name in module._parameters
                result[first] = tensor, Local(shape, strides, tensor.dtype, (path,), parameter)
    return result


def _storage(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor.untyped_storage()._cdata)


def _view(tensor: torch.Tensor) -> StridedView:
    return StridedView(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


@contextmanager
def _tagged_loaders(model: torch.nn.Module, tape: "_Tape", original_loader: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Wrap every weight loader so that it sets the tape's `current` while it runs; impure tensors are attributed to it."""
    before: dict[int, tuple[torch.Tensor, str, bool, Any]] = {}
    names = {_storage(tensor): name for name, (tensor, _) in tape.locals.items()}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is None or id(tensor) in before or _storage(tensor) not in names:
                continue
            attribute = _loader_attribute(tensor)
            before[id(tensor)] = tensor, attribute, hasattr(tensor, attribute), getattr(tensor, attribute, None)
            setattr(tensor, attribute, _TaggedLoader(original_loader(tensor), tape, names[_storage(tensor)]))
    try:
        yield
    finally:
        for tensor, attribute, had, loader in before.values():
            if had:
                setattr(tensor, attribute, loader)
            else:
                delattr(tensor, attribute)


def _loader_attribute(tensor: torch.Tensor) -> str:
    """Return the attribute that has a weight loader; SGLang's parameters of quantised layers show theirs by a property."""
    shown = getattr(type(tensor), "weight_loader", None)
    return "_weight_loader" if isinstance(shown, property) and shown.fset is None else "weight_loader"


class _TaggedLoader:
    """A wrapped weight loader. It equals the inner one, because models compare their loaders with vLLM's default."""

    def __init__(self, inner: Any, tape: "_Tape", local: str) -> None:
        functools.update_wrapper(self, inner)
        self.inner, self.tape, self.local = inner, tape, local

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outer, self.tape.current = self.tape.current, self.local
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.tape.current = outer

    def __eq__(self, other: object) -> bool:
        return bool(self.inner == (other.inner if isinstance(other, _TaggedLoader) else other))

    def __hash__(self) -> int:
        return hash(self.inner)


@dataclass
class _Tape:
    """The state of a recording, which recorded tensors update."""

    specs: Mapping[str, TensorSpec]
    locals: dict[str, tuple[torch.Tensor, Local]]
    current: str | None = None  # the local whose loader runs
    pieces: list[Piece] = field(default_factory=list)
    reads: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    writes: dict[str, list[StridedView]] = field(default_factory=lambda: defaultdict(list))  # by local; from tensors or constants
    impure: dict[str, str] = field(default_factory=dict)
    miscast: dict[str, str] = field(default_factory=dict)  # by local; impure casts to or from quantised weights

    def __post_init__(self) -> None:
        self._by_storage = {_storage(tensor): name for name, (tensor, _) in self.locals.items()}
        self._made_of: dict[int, frozenset[str]] = {}  # storage -> HF tensors that it derives from
        self._intact: set[int] = set()  # storages of unchanged HF tensors
        self._copies: dict[int, StridedView] = {}  # storage of a contiguous copy -> the copied view of an HF tensor
        self._alive: list[torch.Tensor] = []  # references, so that no storage's address is reused

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        blank = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta")
        self._made_of[_storage(blank)] = frozenset([spec.name])
        self._intact.add(_storage(blank))
        return self._wrap(blank)

    def _wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive.append(tensor)
        wrapped = tensor.as_subclass(_RecordedTensor)
        wrapped.tape = self
        return wrapped

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one torch call that has a recorded tensor among its arguments."""
        name = getattr(function, "__name__", "")
        if function is torch.Tensor.copy_ and isinstance(source := args[1] if len(args) > 1 else kwargs["src"], _RecordedTensor):
            self._copied(args[0], source)
            return args[0]
        if function is torch.Tensor.__setitem__ and isinstance(args[2], _RecordedTensor):
            self._copied(args[0][args[1]], args[2])
            return None
        if name in ("clone", "cpu", "cuda", "detach", "pin_memory") and isinstance(args[0], _RecordedTensor):
            return args[0]
        if name == "to":
            return self._to(*args, **kwargs)
        if name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
            return self._read_value(name, args[0])
        sources = self._sources((args, kwargs))
        if (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
            self._changed(args[0], name, sources)
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if name == "contiguous" and _storage(args[0]) in self._intact and _storage(result) != _storage(args[0]):
            self._copies[_storage(result)] = _view(args[0])
        return self._derive(result, sources)

    def _sources(self, value: Any) -> frozenset[str]:
        if isinstance(value, _RecordedTensor):
            return self._made_of.get(_storage(value), frozenset())
        if isinstance(value, dict):
            value = tuple(value.values())
        return frozenset().union(*(self._sources(v) for v in value)) if isinstance(value, tuple | list) else frozenset()

    def _derive(self, result: Any, sources: frozenset[str]) -> Any:
        if isinstance(result, tuple | list):
            return type(result)(self._derive(r, sources) for r in result)
        if not isinstance(result, torch.Tensor):
            return result
        self._made_of.setdefault(_storage(result), sources)
        return self._wrap(result)

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, _RecordedTensor):
            raise _Unrecordable("the loader casts a tensor to the dtype of a checkpoint's tensor")
        other = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
        dtype = other.dtype if other is not None else torch._C._nn._parse_to(*args, **kwargs)[1]
        if dtype is None or dtype == tensor.dtype:
            return tensor
        with torch._C.DisableTorchFunctionSubclass():
            return cast(torch.Tensor, self._derive(tensor.to(dtype), self._sources(tensor)))

    def _read_value(self, how: str, tensor: torch.Tensor) -> Any:
        self._mark_impure(self._sources(tensor), self.current, f"the loader reads its value ({how})")
        if tensor.numel() != 1 or how in ("tolist", "numpy"):
            raise _Unrecordable(f"{sorted(self._sources(tensor))}: the loader reads the values of a whole tensor ({how})")
        return {"__bool__": False, "__int__": 1}.get(how, 1.0 if tensor.is_floating_point() else 1)

    def _changed(self, target: Any, how: str, sources: frozenset[str]) -> None:
        if isinstance(target, _RecordedTensor):
            self._overwritten(target)
        else:
            self.wrote(target)
            self._mark_impure(sources, self._owner(target), f"the loader calls {how} on a parameter")

    def _overwritten(self, target: torch.Tensor) -> None:
        self._intact.discard(_storage(target))
        self._copies.pop(_storage(target), None)

    def wrote(self, target: torch.Tensor) -> None:
        """Record that the loader writes to `target`, a parameter, a buffer or a part of one; other tensors are ignored."""
        local = self._by_storage.get(_storage(target))
        if local is not None:
            view = _view(target)
            self.writes[local].append(view._replace(offset=view.offset - int(self.locals[local][0].storage_offset())))

    def _owner(self, tensor: torch.Tensor) -> str | None:
        return self._by_storage.get(_storage(tensor), self.current)

    def _mark_impure(self, names: frozenset[str], local: str | None, why: str) -> None:
        if local is None:
            raise _Unrecordable(f"{sorted(names)}: {why}, outside of any parameter's weight loader")
        for name in names:
            self.impure[name] = why
            self.reads[name].add(local)

    def _copied(self, target: torch.Tensor, source: "_RecordedTensor") -> None:
        names = self._sources(source)
        if isinstance(target, _RecordedTensor):
            self._overwritten(target)
            self._made_of[_storage(target)] = self._sources(target) | names
            return
        if target.numel() != source.numel() and not _expands(source.shape, target.shape):  # as torch's own copy refuses it
            raise ValueError(
                f"{', '.join(sorted(names))}: the loader copies {tuple(source.shape)} into {tuple(target.shape)}"
                f" of {self._owner(target) or 'a tensor'}, which does not fit"
            )
        self.wrote(target)
        local = self._by_storage.get(_storage(target))
        why = ""
        if local is None:
            why = "the loader copies it into a tensor that is neither parameter nor buffer"
        elif _storage(source) not in self._intact | self._copies.keys():
            why = "the loader computes with it before it stores it"
        elif target.dtype != source.dtype:
            why = f"the loader stores it as {target.dtype}"
            if local is not None and is_quantised(target.dtype) != is_quantised(source.dtype):
                self.miscast[local] = f"{', '.join(sorted(names))} is {source.dtype}, stored as {target.dtype}"
        elif target.shape != source.shape and target.numel() != source.numel():
            why = "the loader broadcasts it"
        if why or local is None:
            self._mark_impure(names, local or self.current, why)
            return
        with torch._C.DisableTorchFunctionSubclass():
            source_view = source.expand(target.shape) if source.dim() <= target.dim() else source.reshape(target.shape)
        (name,) = names
        offset = int(target.storage_offset()) - int(self.locals[local][0].storage_offset())
        place = _view(source_view), offset, tuple(target.stride())
        copied = self._copies.get(_storage(source))
        shape = self.specs[name].shape
        parts = boxes_of_copy(shape, copied, *place) if copied else boxes_of_view(shape, *place)
        if parts is None:
            self._mark_impure(names, local, "the loader reorders its elements in a way that boxes cannot describe")
            return
        self.reads[name].add(local)
        self.pieces += [Piece(name, part.box, local, part.offset, part.strides) for part in parts]

    def recording(self, has_default: Callable[[str], bool]) -> Recording:
        pieces = tuple(dict.fromkeys(piece for piece in self.pieces if piece.tensor not in self.impure))
        return Recording(
            Layout(dict(self.specs), pieces),
            {name: local for name, (_, local) in self.locals.items()},
            {name: frozenset(locals_) for name, locals_ in self.reads.items()},
            dict(self.impure),
            {} if "" in self.impure else self._unwritten(has_default),
            self.miscast,
        )

    def _unwritten(self, has_default: Callable[[str], bool]) -> dict[str, str]:
        sources: dict[str, list[str]] = defaultdict(list)
        for name, locals_ in self.reads.items():
            for local_name in locals_:
                sources[local_name].append(name)
        found = {}
        for name, (tensor, local) in self.locals.items():
            # vLLM states how many elements a loader writes of a parameter that it has padded.
            whole = int(getattr(tensor, "weight_loader_numel", tensor.numel()))
            written = covered_elements(self.writes[name])
            if written < whole and (local.parameter or written) and not (not written and has_default(name)):
                read = sorted(sources[name])
                of = f", from {', '.join(read[:3])}{', …' if len(read) > 3 else ''}" if read else ""
                found[name] = f"{written} of its {whole} elements{of}"
        return found


class _Constants(TorchFunctionMode):
    """Record the constants that a loader writes itself, such as zeros into the padding of a vocabulary."""

    def __init__(self, tape: _Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        if writes and next(_tapes((args, kwargs or {})), None) is None:
            self._tape.wrote(args[0][args[1]] if name == "__setitem__" else args[0])
        return function(*args, **(kwargs or {}))


def _expands(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether a tensor of `shape` can be broadcast to `target`."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(n in (1, to) for n, to in pairs)


_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__set__", "__setitem__"}


class _RecordedTensor(torch.Tensor):
    """A tensor without values that reports each torch call on it to its tape."""

    tape: _Tape

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tape = next(_tapes((args, kwargs or {})))
        with torch._C.DisableTorchFunctionSubclass():
            return tape.run(function, args, kwargs or {})


def _tapes(value: Any) -> Iterator[_Tape]:
    if isinstance(value, _RecordedTensor):
        yield value.tape
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tapes(v)
    elif isinstance(value, tuple | list):
        for v in value:
            yield from _tapes(v)
