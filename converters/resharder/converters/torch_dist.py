"""megatron-core's distributed checkpoints (`torch_dist`), saved under any parallel layout, as HF tensors, a part at a time.

The model is built on the meta device, as the only rank of a world holds it. Megatron loads what such a rank would load, but some
of its tensors at a time, so that the host's memory never holds the model. Optimizer states are not looked at. The format is
pickle's in part (`.metadata`): read only checkpoints that you trust.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.table import Table, Weight
from resharder.converters.building import build_chunks
from resharder.converters.checkpoint import HFConfig
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.layout import Layout, Piece, TensorSpec, box_index
from resharder.converters.local import read_piece
from resharder.converters.megatron import DTYPES, local_layout
from resharder.converters.worlds import WITHOUT_CUDA
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Stored = Mapping[str, ShardedTensor]
"""What a checkpoint has, by Megatron's keys: global shapes and dtypes, no data."""

_FORMS: tuple[dict[str, bool], ...] = (
    {"non_homogeneous_layers": False},  # layers stacked in one tensor
    {"non_homogeneous_layers": True},
    {"singleton_local_shards": True},  # experts and halves of gated MLPs apart as well
)
"""How megatron-core 0.16 may name the same tensors, by the metadata that sharded_state_dict was given."""
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer[._]")
_STACKED = re.compile(r"^decoder\.layers\.(?!\d)")
_NORM_STATE = "decoder.final_layernorm._extra_state"
_EMBEDDING = "embedding.word_embeddings.weight"
_AT_ONCE = 1 << 30  # bytes


class TorchDist:
    """An opened checkpoint. `layout`: its HF tensors in the dtypes it has them in, whole, and where they lie in Megatron's."""

    def __init__(self, folder: Path, layout: Layout, entries: Mapping[str, Entry], dtypes: Mapping[str, torch.dtype]) -> None:
        self.layout = layout
        self._folder, self._entries, self._dtypes = folder, entries, dtypes

    def items(self) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
        """Every element of every HF tensor once, as (name, index, part), good until the next one is asked for. Raises
        ConversionError where the checkpoint cannot be read."""
        pieces: dict[str, list[Piece]] = {}
        for piece in self.layout.pieces:
            pieces.setdefault(piece.local, []).append(piece)
        for names in self._groups(pieces):
            loaded = _load(self._folder, {name: _with_memory(self._entries[name], self._dtypes[name]) for name in names})
            for name in names:
                for piece in pieces[name]:
                    yield piece.tensor, box_index(piece.box), read_piece(loaded, piece)

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
    """The checkpoint of the model that `config` describes. This process is a world of one meanwhile.

    Raises UnknownTensor (tensors that one side has and the other has not), LayoutError (other shapes), UnsupportedModel,
    ConversionError (it cannot be read), RuntimeError where torch.distributed is initialised already.
    """
    stored, states = _stored(folder)
    with _world_of_one():
        chunk = _build(folder, config, stored, states)
        layout, _ = local_layout(chunk, config)
        entries = _entries(folder, chunk, stored, table_of(config)[0])
        dtypes = {name: _check(folder, entry, stored) for name, entry in entries.items()}
        yield TorchDist(folder, _as_stored(layout, dtypes), entries, dtypes)


def _build(folder: Path, config: HFConfig, stored: Stored, states: Set[str]) -> Any:
    """The whole model, without memory, its vocabulary padded as the checkpoint has it. Megatron's own layers will do, but gated
    delta nets are made of TransformerEngine's."""
    recipe = architecture_of(config).recipe(config).transformer
    rows = stored[_EMBEDDING].global_shape[0] if _EMBEDDING in stored else 1
    options: dict[str, Any] = {"spec": "te"} if recipe.get("experimental_attention_variant") else WITHOUT_CUDA
    try:
        (chunk,) = build_chunks(config, device="meta", vocab_multiple=rows, **options)
    except (AssertionError, ImportError, KeyError, NameError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"megatron-core cannot build this model here: {type(error).__name__}: {error}") from error
    built: Any = chunk
    if recipe.get("layernorm_zero_centered_gamma"):
        built.config.layernorm_zero_centered_gamma = True
        if not any(state.startswith(_NORM_STATE) for state in states):
            raise UnsupportedModel(
                f"{folder}: expected norms of TransformerEngine ({_NORM_STATE}), which keep this family's gains less one; found "
                "none, and a checkpoint does not say how other norms keep them"
            )
    return built


@contextmanager
def _world_of_one() -> Iterator[None]:
    if dist.is_initialized():
        raise RuntimeError("expected a process without process groups: torch.distributed is initialised")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _stored(folder: Path) -> tuple[Stored, Set[str]]:
    """The tensors that are no optimizer's, and the keys of everything else."""
    try:
        found = load_sharded_metadata(str(folder))
    except Exception as error:
        raise ConversionError(f"{folder}: expected a torch_dist checkpoint of megatron-core: {error}") from error
    tensors = {key: entry for key, entry in found.items() if isinstance(entry, ShardedTensor) and not _OPTIMIZER.match(key)}
    return tensors, found.keys() - tensors.keys()


def _entries(folder: Path, chunk: Any, stored: Stored, table: Table) -> dict[str, Entry]:
    """The model's local tensors as the checkpoint names them, by the names that its layout uses. Raises UnknownTensor."""
    differences: list[tuple[int, str]] = []
    for form in _FORMS:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": group, **form})
        entries = {f"0.{key}": value for key, value in state.items() if isinstance(value, ShardedTensor | ShardedTensorFactory)}
        wanted = {shard.key for entry in entries.values() for shard in _shards(entry)}
        other = _other_names(wanted - stored.keys(), stored.keys() - wanted, table)
        missing = sorted(wanted - stored.keys() - other.keys())
        unexpected = sorted(stored.keys() - wanted - set(other.values()))
        if not missing and not unexpected:
            return {name: _renamed(entry, other) for name, entry in entries.items()}
        said = f"{len(missing)} of the model's {len(wanted)} tensors are not there{_some(missing)}"
        said += f", {len(unexpected)} are there that it does not have{_some(unexpected)}"
        differences.append((len(missing) + len(unexpected), said))
    raise UnknownTensor(f"{folder}: {min(differences)[1]}")


def _other_names(missing: Set[str], unexpected: Set[str], table: Table) -> dict[str, str]:
    """What is missing, by the names that it has in the checkpoint: TransformerEngine fuses other norms than Megatron's own layers
    do, and the table knows both names."""
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
    """The dtype that a local tensor has in the checkpoint. Raises LayoutError where its shape is another one."""
    dtypes = set()
    for shard in _shards(entry):
        there = stored[shard.key]
        if tuple(there.global_shape) != tuple(shard.global_shape):
            expected, found = list(shard.global_shape), list(there.global_shape)
            raise LayoutError(f"{folder}: {shard.key}: expected {expected} from the config, found {found}")
        dtypes.add(there.dtype)
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise LayoutError(f"{folder}: {entry.key}: expected one of {sorted(DTYPES.values())}, found {sorted(map(str, dtypes))}")
    dtype: torch.dtype = dtypes.pop()
    return dtype


def _as_stored(layout: Layout, dtypes: Mapping[str, torch.dtype]) -> Layout:
    specs: dict[str, TensorSpec] = {}
    for piece in layout.owned():
        spec = layout.tensors[piece.tensor]._replace(dtype=DTYPES[dtypes[piece.local]])
        if specs.setdefault(piece.tensor, spec) != spec:
            raise LayoutError(
                f"{piece.tensor}: the checkpoint has parts of it as {spec.dtype} and as {specs[piece.tensor].dtype}"
            )
    return Layout(specs, tuple(layout.owned()))


def _with_memory(entry: Entry, dtype: torch.dtype) -> Entry:
    data = torch.empty(entry.data.shape, dtype=dtype)
    return replace(entry, data=data, dtype=dtype) if isinstance(entry, ShardedTensor) else replace(entry, data=data)


class _TensorsAlone(TorchCommonLoadStrategy):  # type: ignore[misc]  # megatron-core has no types
    """common.pt is a pickle of the trainer's own classes; nothing of it is needed."""

    def load_common(self, checkpoint_dir: object) -> dict[str, Any]:
        return {}


def _load(folder: Path, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    try:
        loaded = dist_checkpointing.load(
            dict(entries), str(folder), common_strategy=_TensorsAlone(), validate_access_integrity=False
        )
    except (Exception, CheckpointException) as error:  # torch's own is a BaseException, around that of each rank
        why = error.failures[0][0] if isinstance(error, CheckpointException) else error
        raise ConversionError(f"{folder}: cannot be read: {type(why).__name__}: {why}") from error
    return {name: loaded[name].detach().contiguous() for name in entries}


def _some(names: list[str]) -> str:
    return f" ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})" if names else ""
