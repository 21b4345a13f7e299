"""Tensors that training does not change: which they are, and a tower that is read once from a base checkpoint."""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from resharder.client.errors import UsageError
from resharder.client.versions.source import open_source
from resharder.converters.architectures.checkpoint import tower_shapes
from resharder.converters.architectures.table import HFConfig
from resharder.converters.errors import LayoutError, UnknownTensor
from resharder.converters.geometry.layout import Layout, Piece, full_box
from resharder.converters.models.hf_names import Model, roots_of
from resharder.converters.models.live import local_of
from resharder.converters.models.tensor_io import DTYPES, TORCH_DTYPES, LookedUp, tensor_of_bits

_PREFIX = "frozen."
"""First part of the local names of a tower's tensors."""
ADAPTED = re.compile(r"\.adapter\.|\blora_")
"""In names of parameters of adapters."""


def frozen_tensors(model: Model, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the local tensors that training does not change: those of a tower, and parameters without gradients.

    A hint: a tensor that does change is only sent with more effort. Parameters say nothing where none has gradients, such as
    those of a mean of weights, nor beside adapters, which may be merged into them.

    Args:
        model: The model, as `Publisher.attach` takes it.
        tensors: Its local tensors by name.
    """
    parameters = [named for module in roots_of(model) for named in module.named_parameters()]
    says = any(each.requires_grad for _, each in parameters) and not any(ADAPTED.search(name) for name, _ in parameters)
    still, trained = (
        {local_of(each).data_ptr() for _, each in parameters if each.requires_grad == wanted and local_of(each).numel()}
        for wanted in (False, True)
    )
    places = still - trained if says else set[int]()
    found = (name for name, tensor in tensors.items() if tensor.numel() and tensor.data_ptr() in places)
    return frozenset((*found, *(name for name in tensors if name.startswith(_PREFIX))))


class WithFrozen(LookedUp):
    """A rank's tensors, and those of a tower that nobody trains."""

    def __init__(self, trained: LookedUp, frozen: Mapping[str, torch.Tensor]) -> None:
        super().__init__((*trained, *frozen), lambda name: frozen[name] if name in frozen else trained[name])
        self._trained = trained

    def find_again(self) -> None:
        """Look for the trained tensors again. Raises LayoutError."""
        self._trained.find_again()


def with_tower(layout: Layout, tensors: LookedUp, config: HFConfig, source: str | Path) -> tuple[Layout, LookedUp]:
    """Return a language model's layout and tensors with those of the tower of a base checkpoint.

    The tower's tensors are copied to the device of the language model's.

    Args:
        layout: Layout of this rank's part of the language model.
        tensors: Its local tensors.
        config: Content of config.json, with a `vision_config`.
        source: Folder or `resharder://` URL of a version, as `fill` takes it.

    Raises:
        UnknownTensor: The source lacks tensors of the tower.
        LayoutError: A tensor has another shape, or a dtype that cannot be published.
        UsageError, NotFound, DaemonUnreachable: As `open_source` does.
    """
    shapes = refuse_without_tower(config)
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    with open_source(source) as opened:
        if missing := [name for name in shapes if name not in opened.specs]:
            raise UnknownTensor(
                f"{opened.name} lacks {len(missing)} of the tower's {len(shapes)} tensors, such as {missing[0]}: pass the "
                "checkpoint from which the language model comes as frozen"
            )
        specs = {name: opened.specs[name] for name in shapes}
        for name, spec in specs.items():
            if spec.shape != shapes[name] or spec.dtype not in DTYPES.values():
                raise LayoutError(
                    f"{name}: expected {list(shapes[name])} from the config, {opened.name} has {list(spec.shape)} in {spec.dtype}"
                )
        wanted = [(name, full_box(spec.shape)) for name, spec in specs.items()]
        found = {name: torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]) for name, spec in specs.items()}
        for position, box, bits in opened.parts(wanted):
            name = wanted[position][0]
            found[name][tuple(each.as_slice() for each in box)] = tensor_of_bits(bits, specs[name].dtype)
    frozen = {_PREFIX + name: tensor.to(device) for name, tensor in found.items()}
    pieces = (Piece(name, box, _PREFIX + name, 0, found[name].stride()) for name, box in wanted)
    return Layout({**layout.tensors, **specs}, (*layout.pieces, *pieces)), WithFrozen(tensors, frozen)


def refuse_without_tower(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a config's tower by name. Raises UsageError if it has none."""
    shapes = tower_shapes(config)
    if not shapes:
        raise UsageError(f"frozen is for models with a tower, and {config.get('model_type')!r} has none: leave frozen out")
    return shapes
