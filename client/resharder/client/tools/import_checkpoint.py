"""Import of checkpoints as versions, without a trainer.

import_checkpoint("daemon:7677", "/checkpoints/Qwen3-8B", "policy")
import_checkpoint("daemon:7677", "/runs/7/checkpoints", "policy", config="/checkpoints/Qwen3-8B")   # Megatron's torch_dist
import_checkpoint("daemon:7677", "/runs/8/checkpoint-100", "policy-lora", base="policy")            # PEFT's folder
"""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resharder.client.errors import Conflict, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import PublisherStatus, Version
from resharder.client.operator.convert import answer
from resharder.client.tools.check import read_config
from resharder.client.trainer.connect import connect
from resharder.client.trainer.model_files import tokenizer_files
from resharder.client.trainer.rank_layout import DeclaredTensor
from resharder.client.transport.base import HostArray
from resharder.client.versions.source import open_source
from resharder.converters.adapter import check_tensors
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.badges import IMPORT_JOB
from resharder.converters.checkpoint_files import folder_names
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.extras import install_line
from resharder.converters.failpoints import failpoint
from resharder.converters.geometry.layout import Layout, TensorSpec, box_index, full_box

if TYPE_CHECKING:
    from resharder.client.trainer.rank_layout import TensorItem

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Opened:
    """Contents of an open checkpoint. `items` may be called several times."""

    specs: Mapping[str, TensorSpec]
    declared: list[DeclaredTensor]
    items: "Callable[[], Iterable[TensorItem]]"


def import_checkpoint(
    endpoint: str | None,
    folder: str | Path,
    model: str,
    *,
    base: str | None = None,
    base_version: int | None = None,
    step: int = 0,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    take_over: bool = False,
    serve: bool = False,
    progress: Progress = lambda done, total: None,
) -> Version:
    """Publish the weights of a checkpoint as a READY version, by a job of its own.

    Only a part of the checkpoint is in this process's memory at a time; for one of Megatron, 256 MiB and three times its
    largest tensor.

    Args:
        endpoint: Address as `host:port`; None is RESHARDER_ENDPOINT.
        folder: Hugging Face checkpoint in safetensors, or a distributed checkpoint of megatron-core (`torch_dist`) under any
            parallel layout: its folder, or the one with latest_checkpointed_iteration.txt. With `base`, PEFT's folder of a LoRA
            adapter.
        model: Name of the model.
        base: Name of the model that the adapter is loaded beside; None for a model of its own.
        base_version: Version of the base that the adapter was trained on, if known.
        step: Label of the version.
        config: config.json or its folder, which a Megatron checkpoint needs.
        tokenizer: Folder of the tokenizer; by default its files are those in `folder` or `config`.
        take_over: Fence the model's publisher even if its ranks are within their lease; an earlier import is always fenced.
        serve: Let fleets with the target `latest` take the version. Otherwise they skip it, unless the model has no other.
        progress: Called with the bytes so far and all bytes, for every part.

    Returns:
        The READY version.

    Raises:
        UsageError: The folder or the config is missing, or `base` does not fit the folder.
        Conflict: Another job publishes the model.
        UnknownTensor: Tensors are missing or unexpected.
        LayoutError: Shapes differ from the config's.
        UnsupportedModel: The model has no table, or the checkpoint is quantised.
        ConversionError: The checkpoint cannot be read.
    """
    place = Path(folder)
    if not place.is_dir():
        raise UsageError(f"expected a folder with a checkpoint, got {folder}")
    megatron = _torch_dist_folder(place) if base is None else None
    if megatron is not None and find_spec("megatron") is None:
        raise UsageError(f"a Megatron checkpoint needs megatron-core here: {install_line('megatron')}")
    if megatron is not None and config is None:
        raise UsageError(f"the Megatron checkpoint {megatron} has no config of the model: pass a folder with config.json")
    where = Path(config) if config is not None else place
    _check_kind(where, base, config_given=config is not None)
    hf_config = read_config(where, base or "")
    with Operator(endpoint, connect_timeout=60) as operator:
        _refuse_live(operator, model, take_over)
    files = tokenizer if tokenizer is not None else _tokenizer_folder(place, where)
    with _open_megatron(megatron, hf_config) if megatron is not None else _open_folder(place, base or "") as opened:
        if base is None:
            _check_against(hf_config, opened.specs, str(place))
        else:
            check_tensors(hf_config, {name: spec.shape for name, spec in opened.specs.items()})
        job = f"{IMPORT_JOB}{place.absolute().name[:100]}-{secrets.token_hex(8)}"
        with connect(
            endpoint,
            model=model,
            base=base,
            job=job,
            rank=0,
            world_size=1,
            config=hf_config,
            tokenizer=files,
            skipped=not serve,
        ) as publisher:
            publisher.attach_tensors(opened.declared)
            failpoint("import.publish")
            handle = publisher.publish_tensors(step, lambda: _counted(opened, progress), base_version=base_version)
            handle.wait_ready()
            return answer(Version, handle.get())


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint: the iteration that Megatron recorded, or the number in a name like `step-100` or `100`.

    Raises UsageError if the folder is missing, or Megatron's record names a folder that is.
    """
    if not folder.is_dir():
        raise UsageError(f"expected a folder with a checkpoint, got {folder}")
    named = (_torch_dist_folder(folder) or folder).absolute().name
    found = re.fullmatch(r"(?:.*(?:step|iter|iteration|checkpoint|ckpt|epoch)[-_]?)?0*(\d{1,18})", named)
    return int(found[1]) if found else None


def _check_kind(folder: Path, base: str | None, *, config_given: bool) -> None:
    """Raise UsageError for an adapter's folder without the name of its base, and for a base that no folder of an adapter has."""
    adapter, own = folder_names("any").config, folder_names("").config
    if base is not None and config_given:
        raise UsageError(f"an adapter's config is the {adapter} of its folder: leave config out")
    if base is None and folder.is_dir() and (folder / adapter).is_file() and not (folder / own).is_file():
        raise UsageError(f"{folder} has an adapter, which servers load beside its base: name the base, base=… or --base NAME")
    if base is not None and not (folder / adapter).is_file():
        raise UsageError(f"expected PEFT's folder of an adapter of {base!r}, {folder} has no {adapter}")


def _refuse_live(operator: Operator, model: str, take_over: bool) -> None:
    for publisher in operator.daemon().publishers:
        usable = publisher.state in (PublisherStatus.State.REGISTERING, PublisherStatus.State.ACTIVE)
        live = usable and publisher.live_ranks > 0 and not publisher.job.startswith(IMPORT_JOB)
        if publisher.model == model and live and not take_over:
            raise Conflict(
                f"{publisher.name} of job {publisher.job} is alive, {publisher.live_ranks} of {publisher.world_size} ranks: an "
                "import would fence that trainer, which could then not publish; end it first, or take the model over"
            )


def _torch_dist_folder(folder: Path) -> Path | None:
    """Return the folder of a distributed checkpoint: this one, or that of the newest iteration;
    None for other folders. Raises UsageError.
    """
    tracker = folder / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        iteration = tracker.read_text().strip()
        folder = folder / (f"iter_{int(iteration):07d}" if iteration.isdigit() else iteration)
        if not (folder / "metadata.json").is_file():
            raise UsageError(f"{folder}, which {tracker} names, is not a torch_dist checkpoint: it has no metadata.json")
    return folder if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file() else None


def _tokenizer_folder(*folders: Path) -> Path | None:
    for folder in folders:
        with suppress(UsageError):
            if tokenizer_files(folder if folder.is_dir() else folder.parent):
                return folder if folder.is_dir() else folder.parent
    return None


@contextmanager
def _open_folder(folder: Path, base: str) -> Iterator[_Opened]:
    failpoint("import.open")
    with open_source(folder, base=base) as source:
        wanted = [(name, full_box(spec.shape)) for name, spec in source.specs.items()]
        declared = [DeclaredTensor(spec.name, spec.dtype, spec.shape) for spec in source.specs.values()]

        def items() -> "Iterator[TensorItem]":
            for position, _, bits in source.parts(wanted):
                name = wanted[position][0]
                yield name, HostArray(bits, source.specs[name].dtype)

        yield _Opened(source.specs, declared, items)


@contextmanager
def _open_megatron(folder: Path, config: Mapping[str, Any]) -> Iterator[_Opened]:
    import torch.distributed as dist

    if dist.is_initialized():
        raise UsageError(
            "a Megatron checkpoint is read without process groups, and torch.distributed is initialised: read it in another "
            "process"
        )
    from resharder.converters.models.megatron.torch_dist import open_torch_dist

    with open_torch_dist(folder, config) as opened:
        yield _Opened(opened.layout.tensors, _declared(opened.layout), opened.items)


def _declared(layout: Layout) -> list[DeclaredTensor]:
    specs = layout.tensors
    return [DeclaredTensor(p.tensor, specs[p.tensor].dtype, specs[p.tensor].shape, box_index(p.box)) for p in layout.pieces]


def _check_against(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: str) -> None:
    """Compare names and shapes with the family's table, if it has one. Raises UnknownTensor and LayoutError."""
    try:
        shapes = expected_shapes(config)
    except UnsupportedModel:
        return
    missing, unexpected = [name for name in shapes if name not in specs], [name for name in specs if name not in shapes]
    if missing or unexpected:
        raise UnknownTensor(
            f"{where}: expected the {len(shapes)} tensors of the config, found {len(missing)} missing {missing[:4]} "
            f"and {len(unexpected)} unexpected {unexpected[:4]}"
        )
    for name, shape in shapes.items():
        if specs[name].shape != shape:
            raise LayoutError(f"{where}: {name}: expected {list(shape)} from the config, found {list(specs[name].shape)}")


def _counted(opened: _Opened, progress: Progress) -> "Iterator[TensorItem]":
    done, total = 0, sum(spec.size for spec in opened.specs.values())
    for item in opened.items():
        yield item
        done += item[-1].nbytes
        progress(done, total)
