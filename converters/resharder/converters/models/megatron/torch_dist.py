"""megatron-core's distributed checkpoints (`torch_dist`), saved under any parallel layout, read as HF tensors part by part.

The model is built on the meta device as the only rank of a world, and its tensors are read a few at a time, so that the whole
model is never in host memory. torch's readers permit that; Megatron's read the stacks of all layers at once. Optimizer states
are skipped. `.metadata` is a pickle, of which only torch's and megatron-core's descriptions of tensors are accepted.
`common.pt`, a pickle of the trainer's classes, is not read.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.checkpoint import HFConfig
from resharder.converters.architectures.table import Table, Weight
from resharder.converters.architectures.wrapped import is_wrapped
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, box_index
from resharder.converters.models.megatron.build import build_chunks
from resharder.converters.models.megatron.layout import FLOATS, local_layout
from resharder.converters.models.megatron.worlds import WITHOUT_CUDA, fake_rank
from resharder.converters.models.tensor_io import read_piece
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Stored = Mapping[str, TensorStorageMetadata]
"""Tensors of a checkpoint by Megatron's keys."""

_FORMS: tuple[dict[str, bool], ...] = (
    {"non_homogeneous_layers": False},  # layers stacked in one tensor
    {"non_homogeneous_layers": True},
    {"singleton_local_shards": True},  # separate experts and halves of gated MLPs as well
)
"""Metadata of `sharded_state_dict` that determines how megatron-core 0.16 names the same tensors."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer[._]")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)")
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_NORM_STATE = "decoder.final_layernorm._extra_state"
_EMBEDDING = "embedding.word_embeddings.weight"
_MOST_RANKS = 64  # most tensor-parallel ranks for which a vocabulary was padded; a checkpoint does not record them
_AT_ONCE = 256 << 20  # bytes read at once; torch makes up to two more copies of the tensor that it reads


@dataclass(frozen=True)
class TorchDist:
    """Open checkpoint. `layout` has its HF tensors whole, in the checkpoint's dtypes, with their
    places in Megatron's tensors.
    """

    layout: Layout
    _files: "_Files"
    _entries: Mapping[str, Entry]
    _dtypes: Mapping[str, torch.dtype]

    def items(self) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        """Yield every element of every HF tensor once, as (name, index, part). A part is valid until the next one.

        Raises ConversionError if the checkpoint cannot be read.
        """
        pieces: dict[str, list[Piece]] = {}
        for piece in self.layout.pieces:
            pieces.setdefault(piece.local, []).append(piece)
        for names in self._groups(pieces):
            tensors = {name: torch.empty(self._entries[name].data.shape, dtype=self._dtypes[name]) for name in names}
            self._files.read([shard for name in names for shard in _shards_in(self._entries[name], tensors[name])])
            for name in names:
                for piece in pieces[name]:
                    yield piece.tensor, box_index(piece.box), read_piece(tensors, piece)
            tensors.clear()  # frees them before the next ones are allocated

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        group: list[str] = []
        size = 0
        for name in names:
            group.append(name)
            size += self._entries[name].data.numel() * self._dtypes[name].itemsize
            if size >= _AT_ONCE:
                yield group
                group, size = [], 0
        if group:
            yield group


@contextmanager
def open_torch_dist(folder: Path, config: HFConfig) -> Iterator[TorchDist]:
    """Open the checkpoint of a model. torch.distributed is initialised, with one rank, while it opens.

    Args:
        folder: Folder of the checkpoint, with `.metadata`.
        config: Content of config.json.

    Raises:
        UnknownTensor: Tensors that only the checkpoint or only the model has.
        LayoutError: Other shapes than the config's.
        UnsupportedModel: The model has no table, or megatron-core cannot build it here.
        ConversionError: The checkpoint cannot be read.
        RuntimeError: torch.distributed is initialised already.
    """
    if is_wrapped(table_of(config)[0]):
        raise UnsupportedModel(
            f"{folder}: Megatron checkpoints of models with a tower are not imported: convert it with Megatron-Bridge, and "
            "import the Hugging Face checkpoint"
        )
    files = _Files(folder)
    with fake_rank(0, 1):
        chunk = _build(config, files)
        layout, _ = local_layout(chunk, config, padded_for=_MOST_RANKS)
        entries = _entries(chunk, files, table_of(config)[0])
        dtypes = {name: _check(folder, entry, files.stored) for name, entry in entries.items()}
    yield TorchDist(_as_stored(layout, dtypes), files, entries, dtypes)


class _Files:
    """Files on disk. `stored` has the model's tensors, `states` the keys of all other entries."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, FileSystemReader(folder)
        try:
            with (folder / ".metadata").open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            found = dict(metadata.state_dict_metadata)
        except Exception as error:  # a damaged pickle raises arbitrary errors
            raise ConversionError(f"{folder} is not a torch_dist checkpoint: {type(error).__name__}: {error}") from error
        tensors = {key: entry for key, entry in found.items() if isinstance(entry, TensorStorageMetadata)}
        for key, entry in tensors.items():
            if not _is_whole(key, entry):
                raise ConversionError(f"{folder}: {key}: expected a size, a dtype and chunks within the size")
        self.stored: Stored = {key: entry for key, entry in tensors.items() if not _OPTIMIZER.match(key)}
        self.states: Set[str] = found.keys() - tensors.keys()

    def read(self, shards: Iterable[ShardedTensor]) -> None:
        """Read the shards' elements into their memory. Raises ConversionError."""
        targets: dict[MetadataIndex, torch.Tensor] = {}
        items: list[ReadItem] = []
        for shard in shards:
            data = shard.data.view([1] * shard.prepend_axis_num + list(shard.data.shape))
            chunk = ChunkStorageMetadata(torch.Size(shard.global_offset), data.shape)
            wanted = create_read_items_for_chunk_list(shard.key, self.stored[shard.key], [chunk])
            if (found := sum(prod(item.lengths) for item in wanted)) != data.numel():
                raise ConversionError(f"{self.folder}: {shard.key}: expected {data.numel()} elements, found {found}")
            targets |= {item.dest_index: data for item in wanted}
            items += wanted
        try:
            plan = self._reader.prepare_local_plan(LoadPlan(items))
            self._reader.read_data(plan, _Into(targets)).wait()
        except Exception as error:  # torch raises arbitrary errors here
            raise ConversionError(f"{self.folder}: cannot be read: {type(error).__name__}: {error}") from error


def _is_whole(key: object, entry: TensorStorageMetadata) -> bool:
    """Return whether an unpickled entry has the attributes that torch reads: a pickle may omit or replace any of them."""
    try:
        places = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks]
        inside = all(
            len(offsets) == len(sizes) == len(entry.size)
            and all(0 <= at <= at + count <= whole for at, count, whole in zip(offsets, sizes, entry.size, strict=True))
            for offsets, sizes in places
        )
        return inside and isinstance(key, str) and isinstance(entry.properties.dtype, torch.dtype)
    except (AttributeError, TypeError):
        return False


class _Unpickler(pickle.Unpickler):
    """Unpickler for dtypes and for the classes with which torch and megatron-core describe a checkpoint. Refuses all others."""

    _HOMES = (*(f"torch.distributed.checkpoint.{name}" for name in ("filesystem", "metadata", "planner")), _MEGATRON)

    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.serialization", *self._HOMES):
            found = super().find_class(module, name)
            own = module in self._HOMES and isinstance(found, type) and found.__module__ == module
            if own or isinstance(found, torch.dtype) or found in (torch.Size, torch.serialization._get_layout):
                return found
        raise pickle.UnpicklingError(f"expected a description of tensors, found {module}.{name}")


class _Into(LoadPlanner):
    """Load plan that reads each part of a stored tensor into its destination."""

    def __init__(self, targets: Mapping[MetadataIndex, torch.Tensor]) -> None:
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None: ...

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError("the plan is made already")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError("the plan is made already")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError("the plan is made already")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError("only tensors are read")


def _build(config: HFConfig, files: _Files) -> Any:
    """Return the whole model, without memory, its vocabulary padded as in the checkpoint.

    It has Megatron's own layers, except gated delta nets, which need TransformerEngine's.
    """
    recipe = architecture_of(config).recipe(config).transformer
    rows = files.stored[_EMBEDDING].size[0] if _EMBEDDING in files.stored else 1
    options: dict[str, Any] = {"spec": "te"} if recipe.get("experimental_attention_variant") else WITHOUT_CUDA
    try:
        (chunk,) = build_chunks(config, device="meta", vocab_multiple=rows, **options)
    except ConversionError:
        raise
    except Exception as error:  # of any class, for a release whose modules have changed
        raise UnsupportedModel(f"megatron-core cannot build this model here: {type(error).__name__}: {error}") from error
    built: Any = chunk
    if recipe.get("layernorm_zero_centered_gamma"):
        built.config.layernorm_zero_centered_gamma = True
        if not any(state.startswith(_NORM_STATE) for state in files.states):
            raise UnsupportedModel(
                f"{files.folder} has no norms of TransformerEngine ({_NORM_STATE}), which store this family's gains less one: "
                f"a checkpoint does not record how other norms store them"
            )
    return built


def _entries(chunk: Any, files: _Files, table: Table) -> dict[str, Entry]:
    """Return the model's local tensors under the checkpoint's keys, by their names in the layout. Raises UnknownTensor."""
    stored, differences = files.stored.keys(), list[tuple[int, str]]()
    for form in _FORMS:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group, **form})
        entries = {f"0.{key}": value for key, value in state.items() if isinstance(value, ShardedTensor | ShardedTensorFactory)}
        wanted = {shard.key for entry in entries.values() for shard in _shards(entry)}
        other = _other_names(wanted - stored, stored - wanted, table)
        missing = sorted(wanted - stored - other.keys())
        unexpected = sorted(stored - wanted - set(other.values()))
        if not missing and not unexpected:
            return {name: _renamed(entry, other) for name, entry in entries.items()}
        difference = f"expected the model's {len(wanted)} tensors, found {len(missing)} missing{_some(missing)}"
        difference += f" and {len(unexpected)} unexpected{_some(unexpected)}"
        differences.append((len(missing) + len(unexpected), difference))
    raise UnknownTensor(f"{files.folder}: {min(differences)[1]}")


def _other_names(missing: Set[str], unexpected: Set[str], table: Table) -> dict[str, str]:
    """Return the checkpoint's keys of missing tensors.

    TransformerEngine fuses other norms than Megatron's own layers, and the table has both keys.
    """
    there = {meaning: key for key in unexpected if (meaning := _meaning(key, table)) is not None}
    meanings = {key: _meaning(key, table) for key in missing}
    return {key: there[meaning] for key, meaning in meanings.items() if meaning is not None and meaning in there}


def _meaning(key: str, table: Table) -> tuple[Weight, ...] | None:
    return table.get(_STACKED.sub("decoder.layers.0.", key))


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    return replace(entry, key=names[entry.key]) if isinstance(entry, ShardedTensor) and entry.key in names else entry


def _shards(entry: Entry) -> list[ShardedTensor]:
    return [entry] if isinstance(entry, ShardedTensor) else list(nested_values(entry.build()))


def _check(folder: Path, entry: Entry, stored: Stored) -> torch.dtype:
    """Return the dtype of a local tensor in the checkpoint. Raises LayoutError for another shape or several dtypes."""
    dtypes = set()
    for shard in _shards(entry):
        there = stored[shard.key]
        if tuple(there.size) != tuple(shard.global_shape):
            expected, found = list(shard.global_shape), list(there.size)
            raise LayoutError(f"{folder}: {shard.key}: expected {expected} from the config, found {found}")
        dtypes.add(there.properties.dtype)
    if len(dtypes) != 1 or not dtypes <= FLOATS.keys():
        raise LayoutError(f"{folder}: {entry.key}: expected one of {sorted(FLOATS.values())}, found {sorted(map(str, dtypes))}")
    dtype: torch.dtype = dtypes.pop()
    return dtype


def _as_stored(layout: Layout, dtypes: Mapping[str, torch.dtype]) -> Layout:
    specs: dict[str, TensorSpec] = {}
    for piece in layout.owned():
        spec = layout.tensors[piece.tensor]._replace(dtype=FLOATS[dtypes[piece.local]])
        if specs.setdefault(piece.tensor, spec) != spec:
            raise LayoutError(
                f"{piece.tensor}: the checkpoint has parts as {spec.dtype} and {specs[piece.tensor].dtype}, which is not one "
                f"dtype"
            )
    return Layout(specs, tuple(layout.owned()))


def _shards_in(entry: Entry, tensor: torch.Tensor) -> list[ShardedTensor]:
    """Return the shards of a local tensor, in the memory of `tensor`.

    Raises UnsupportedModel if Megatron would copy them.
    """
    if isinstance(entry, ShardedTensor):
        return [replace(entry, data=tensor, dtype=tensor.dtype)]
    shards = _shards(replace(entry, data=tensor))
    if any(shard.data.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() for shard in shards):
        raise UnsupportedModel(f"{entry.key}: cannot be read in place: Megatron copies it")
    return shards


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" if names else ""
