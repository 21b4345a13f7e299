"""Layouts of Megatron models: placement from `sharded_state_dict`, meaning from the family's table.

`sharded_state_dict` is the only source of placement. It covers pipeline stages, tensor, expert and context parallelism, halves
of gated MLPs, tied embeddings and replicas. (Parameter attributes do not: `partition_dim` is wrong for experts.) A parameter
without a placement, or without a line in the table, is an error.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module, MegatronModule
from resharder.converters.allowances import VARIABLE, refuse
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.agreement import disagreements, is_padding
from resharder.converters.architectures.checkpoint import HFConfig, PretrainedConfig, config_dict
from resharder.converters.architectures.computation import UNSUPPORTED, known_arguments
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import Table, Weight, hf_shapes
from resharder.converters.architectures.wrapped import LANGUAGE, is_wrapped, refuse_tower, tower_weights
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Layout, Piece, Range, TensorSpec, box_index
from resharder.converters.models.blockwise import BlockwiseTensors, MasterPart, is_blockwise
from resharder.converters.models.live import LocalTensors
from resharder.converters.models.megatron.computation import other_computation, other_than_default, other_tower
from resharder.converters.models.megatron.masters import master_part
from resharder.converters.models.tensor_io import DTYPES, LookedUp, read_piece
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

Chunks = torch.nn.Module | Sequence[torch.nn.Module]
"""Megatron's form of a model: its chunks, one per virtual pipeline stage of this rank, wrapped or not."""

ADAPTER = ".adapter."
"""Part of the names of an adapter's tensors in Megatron-Bridge's modules."""

FLOATS = {dtype: name for dtype, name in DTYPES.items() if name in ("BF16", "F16", "F32")}


def local_layout(
    model_chunks: Chunks,
    hf_config: HFConfig | PretrainedConfig,
    *,
    padded_for: int = 1,
    fp8: bool = False,
    tower: bool | None = None,
) -> tuple[Layout, LookedUp]:
    """Return this rank's layout, and its local tensors by the names in its pieces, `CHUNK.NAME`, live rather than copied.

    Replicas are those of `sharded_state_dict`. No piece contains rows that Megatron added as padding.

    Args:
        model_chunks: The rank's chunks.
        hf_config: Content of config.json, or transformers' config.
        padded_for: Largest number of tensor-parallel ranks for which padding may have been added, if more than now.
        fp8: Accept parameters in FP8 blocks. Their pieces are those of the elements, in F8_E4M3.
        tower: Whether the model has to have the config's tower, or must not have it; None for either.

    Raises:
        UnsupportedModel: No table; other quantised, sharded or offloaded parameters; an unknown wrapper.
        UnknownTensor: A parameter that is not in the table.
        LayoutError: A parameter without placement, or with another shape than the config's; a model built with other sizes
            than the config's, or one that computes otherwise, unless the environment allows it.
    """
    config = config_dict(hf_config)
    table, shapes = table_of(config)
    recipe = architecture_of(config).recipe(config)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    tensors: dict[str, torch.Tensor] = {}
    parts: dict[str, MasterPart] = {}
    modules = checked_modules(model_chunks, recipe)
    if tower is not None and recipe.tower is not None:
        refuse_tower(tower, not all(language_of(module) is module for module in modules))
    for number, (chunk, module) in enumerate(zip(_chunks(model_chunks), modules, strict=True)):
        wrappers = _data_parallel(chunk)
        keys = table_for(module, table, recipe)
        one = 0.0 if module.config.layernorm_zero_centered_gamma else 1.0
        for name, (tensor, shards, memory) in _placed(module, number, fp8).items():
            tensors[name] = tensor
            dtype = "F8_E4M3" if is_blockwise(tensor) else _dtype(name, tensor)
            if is_blockwise(tensor) and (part := master_part(tensor, shards, wrappers)):
                parts[name] = part
            for shard in shards:
                for piece in _shard_pieces(name, memory, shard, keys, one, padded_for):
                    spec = TensorSpec(piece.tensor, dtype, shapes[piece.tensor])
                    if specs.setdefault(piece.tensor, spec) != spec:
                        raise LayoutError(
                            f"{name}: holds {piece.tensor} as {dtype}, another parameter as {specs[piece.tensor].dtype}"
                        )
                    pieces.append(piece)
    _refuse_part_of_tower(table, {piece.tensor for piece in pieces})
    found = LocalTensors(lambda: _state(modules), _state(modules) | tensors, tensors, modules)
    return Layout(specs, tuple(pieces)), BlockwiseTensors(found, parts) if fp8 else found


def checked_modules(model_chunks: Chunks, recipe: Recipe) -> list[MegatronModule]:
    """Return the modules inside of a model's chunks, which are built as a config says.

    Raises UnsupportedModel and LayoutError as `local_layout` does.
    """
    modules = [_unwrap(chunk) for chunk in _chunks(model_chunks)]
    if all(language_of(module) is module for module in modules):  # of a wrapper, by itself
        recipe = replace(recipe, tower=None)
    languages = [(number, module) for number, module in enumerate(map(language_of, modules)) if module is not None]
    for number, module in languages:
        _refuse_options(module)
        _refuse_other_sizes(module, number, recipe)
    _refuse_other_computation([module for _, module in languages], recipe)
    for number, module in enumerate(modules):
        if different := other_tower(module, recipe):
            raise LayoutError(f"chunk {number}: {'; '.join(different)}: attach with the config of the model that is trained")
    return modules


def language_of(module: MegatronModule) -> MegatronModule | None:
    """Return the language model in a wrapper, or the module itself; None for a wrapper that has a tower alone."""
    inner: MegatronModule | None = getattr(module, LANGUAGE.rstrip("."), module)
    return inner


def table_for(module: MegatronModule, table: Table, recipe: Recipe) -> Table:
    """Return the table under the keys of a module: without the wrapper's, if the module is the language model of one."""
    if recipe.tower is None or language_of(module) is not module:
        return table
    return {key.removeprefix(LANGUAGE): weights for key, weights in table.items() if key.startswith(LANGUAGE)}


def adapter_layout(modules: Sequence[MegatronModule], table: Table) -> tuple[Layout, LookedUp]:
    """Return this rank's layout of the adapters in a model's modules, and its local tensors, as `local_layout` does.

    `table` describes the adapters. An adapter that several experts share is in the tensors of each of them.
    """
    shapes = hf_shapes(table)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    tensors: dict[str, torch.Tensor] = {}
    for number, module in enumerate(modules):
        for name, (tensor, shards, memory) in _placed(module, number, fp8=False, adapters=True).items():
            tensors[name] = tensor
            for shard in shards:
                for piece in _shard_pieces(name, memory, shard, table, 1.0, 1):
                    specs[piece.tensor] = TensorSpec(piece.tensor, _dtype(name, tensor), shapes[piece.tensor])
                    pieces.append(piece)
    find = partial(_state, modules, adapters=True)
    return Layout(specs, tuple(pieces)), LocalTensors(find, find() | tensors, tensors, modules)


def local_pieces(
    model_chunks: Chunks, hf_config: HFConfig | PretrainedConfig
) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
    """Yield every piece that this rank owns as `(hf_name, index, tensor)`.

    Over all ranks, `full[hf_name][index] = tensor` fills each element of the checkpoint exactly once. The tensors are views of
    the parameters, unless HF's values differ from Megatron's by a constant. Raises as `local_layout` does.
    """
    layout, tensors = local_layout(model_chunks, hf_config)
    if blank := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise UnsupportedModel(
            f"{blank[0]}: {len(blank)} tensors of the model are on the meta device: load the model before it is attached"
        )
    for piece in layout.owned():
        yield piece.tensor, box_index(piece.box), read_piece(tensors, piece)


def stale_parameters(model_chunks: Chunks) -> list[str]:
    """Return the names of local tensors of which other ranks have newer values.

    With `overlap_param_gather`, a step's parameters are gathered in the next forward pass, or by `gather_parameters`.

    In megatron-core (distributed/param_and_grad_buffer.py), a bucket group's `param_gather_dispatched` is cleared when its
    gradients are reduced and set when the gather starts; `param_gather_handle` exists until the gather is over.
    """
    stale = []
    for number, chunk in enumerate(_chunks(model_chunks)):
        older = list[torch.nn.Parameter]()
        for group in (group for wrapper in _late_gatherers(chunk) for group in _bucket_groups(wrapper)):
            gathered = group.param_gather_dispatched and group.param_gather_handle is None
            if not gathered and _was_used(group):
                older += (parameter for bucket in group.buckets for parameter in bucket.params_list)
        if older:  # otherwise no name is needed: 40 ms for 19,000 of them
            names = {parameter: name for name, parameter in _unwrap(chunk).named_parameters()}
            stale += [f"{number}.{names[parameter]}" for parameter in older if parameter in names]
    return stale


def gather_parameters(model_chunks: Chunks) -> None:
    """Gather the parameters that the next forward pass would gather. A collective of the data-parallel ranks."""
    for chunk in _chunks(model_chunks):
        for wrapper in _late_gatherers(chunk):
            wrapper.start_param_sync(force_sync=True)


def _state(modules: Sequence[torch.nn.Module], *, adapters: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of chunks, or of their adapters alone, by the names that `sharded_state_dict` gives them."""
    entries = (
        (f"{number}.{name}", value)
        for number, chunk in enumerate(modules)
        for name, value in chunk.state_dict(keep_vars=True).items()
        if ADAPTER in name or not adapters
    )
    return {name: value for name, value in entries if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")}


def _data_parallel(chunk: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return Megatron's DDP around a chunk.

    If it gathers parameters in the forward pass, its hooks in the chunk refer to it, so it is found even if the caller passes the
    chunk without it.
    """
    hooks = _unwrap(chunk)._forward_pre_hooks.values()
    behind = [inspect.getclosurevars(hook).nonlocals.get("self") for hook in hooks if inspect.isfunction(hook)]
    around = [wrapper for wrapper in (*_wrappers(chunk), *behind) if isinstance(wrapper, DistributedDataParallel)]
    return list({id(wrapper): wrapper for wrapper in around}.values())


def _late_gatherers(chunk: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return Megatron's DDP around a chunk, if it gathers parameters in the forward pass."""
    around = _data_parallel(chunk)
    return [ddp for ddp in around if ddp.ddp_config.use_distributed_optimizer and ddp.ddp_config.overlap_param_gather]


def _bucket_groups(wrapper: DistributedDataParallel) -> list[Any]:
    return [*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups]


def _was_used(group: Any) -> bool:
    """Return whether a forward or backward pass has run.

    Before the first one, every rank has the parameters with which it was built or loaded.
    """
    shards = [*group.cached_param_buffer_shard_list, *group.cached_grad_buffer_shard_list]
    counts = [*group.per_param_grad_ready_counts, *group.golden_per_param_grad_ready_counts]
    return bool(counts) or any(shard is not None for shard in shards)


def _chunks(model_chunks: Chunks) -> Sequence[torch.nn.Module]:
    return [model_chunks] if isinstance(model_chunks, torch.nn.Module) else model_chunks


def _wrappers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the wrappers of a chunk, outermost first. They prefix names and keys."""
    return [chunk, *_wrappers(chunk.module)] if isinstance(chunk, Float16Module | DistributedDataParallel) else []


def _unwrap(chunk: torch.nn.Module) -> MegatronModule:
    wrappers = _wrappers(chunk)
    inner = wrappers[-1].module if wrappers else chunk
    if isinstance(getattr(inner, "module", None), torch.nn.Module):
        raise UnsupportedModel(
            f"expected Float16Module or Megatron's DistributedDataParallel around a chunk, found {type(inner).__name__}: "
            "wrappers that shard parameters (FSDP) are not supported; pass the module inside of any other wrapper"
        )
    if not isinstance(inner, MegatronModule):
        raise UnsupportedModel(f"model chunks have to be megatron-core modules, not {type(inner).__name__}")
    return inner


class _Placed(NamedTuple):
    """A local tensor, the shards of global tensors in it, and the tensor of which they are views."""

    tensor: torch.Tensor
    shards: list[ShardedTensor]
    memory: torch.Tensor


def _placed(module: MegatronModule, number: int, fp8: bool, *, adapters: bool = False) -> dict[str, _Placed]:
    """Return every local tensor of a chunk, or of its adapters alone."""

    def wanted(key: str) -> bool:
        return ADAPTER in key or not adapters

    for parameter_name, parameter in filter(lambda each: wanted(each[0]), module.named_parameters()):
        _refuse_absent(f"{number}.{parameter_name}", parameter)
    if not parallel_state.model_parallel_is_initialized():
        raise UnsupportedModel(
            "megatron-core's parallel_state is not initialised, and a ProcessGroupCollection alone is not supported: call "
            "parallel_state.initialize_model_parallel with the same sizes"
        )
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = module.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})
    placed: dict[str, _Placed] = {}
    for key, value in state.items():
        name = f"{number}.{key}"
        if (isinstance(value, ShardedObject) and value.key.endswith("_extra_state")) or not wanted(key):
            continue
        if not isinstance(value, ShardedTensor | ShardedTensorFactory):
            raise UnknownTensor(f"{name}: sharded_state_dict has {type(value).__name__} instead of a sharded tensor")
        tensor = value.data
        if fp8 and is_blockwise(tensor):  # views of an FP8 parameter would be copies
            value.data = torch.empty(tensor.shape, dtype=torch.uint8, device="meta")
        else:
            _refuse_quantised(name, tensor)
        shards = _shards(name, _built(name, value) if isinstance(value, ShardedTensorFactory) else value)
        found = sum(shard.data.numel() for shard in shards)
        shared = adapters and found and found % tensor.numel() == 0  # by several experts
        if found != tensor.numel() and not shared:
            raise LayoutError(f"{name}: expected shards for {tensor.numel()} elements in sharded_state_dict, found {found}")
        placed[name] = _Placed(tensor, shards, value.data)
    held = {id(each.tensor) for each in placed.values()}
    for local, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in held and not local.endswith("_extra_state") and wanted(local):
            raise LayoutError(f"{number}.{local}: sharded_state_dict does not say where it belongs")
    return placed


def _built(name: str, factory: ShardedTensorFactory) -> object:
    try:
        with _ViewsForCopies():
            return factory.build()
    except RuntimeError as error:  # a view that the strides do not permit
        raise LayoutError(
            f"{name}: its factory in sharded_state_dict fails on strides {factory.data.stride()}: {error}"
        ) from error


class _ViewsForCopies(TorchFunctionMode):
    """Context in which `contiguous` does not copy, so that shards are views that reveal the place of their elements.

    Legacy GroupedMLP transposes its weights and returns contiguous copies (transformer/moe/experts.py).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _shards(name: str, built: object) -> list[ShardedTensor]:
    """Return the sharded tensors in the result of a factory, which may be nested lists and dicts."""
    if isinstance(built, ShardedTensor):
        return [built]
    if isinstance(built, Mapping):
        built = list(built.values())
    if not isinstance(built, list | tuple):
        raise LayoutError(f"{name}: expected sharded tensors from its factory, found {type(built).__name__}")
    return [shard for item in built for shard in _shards(name, item)]


def _refuse_other_sizes(module: MegatronModule, number: int, recipe: Recipe) -> None:
    """Raise LayoutError for a model whose values that determine the division of tensors differ from the config's."""
    tied = {name: value for name, value in vars(module).items() if name == "share_embeddings_and_output_weights"}
    if different := disagreements(recipe, vars(module.config) | tied):
        raise LayoutError(f"chunk {number}: {'; '.join(different)}: attach with the config of the model that is trained")


def _refuse_part_of_tower(table: Table, held: Set[str]) -> None:
    """Raise LayoutError for a tower with fewer tensors than the config's. Every tensor-parallel rank has a part of each."""
    tower = {run.tensor for weight in tower_weights(table) for run in weight.runs} if is_wrapped(table) else set[str]()
    if (missing := sorted(tower - held)) and tower & held:
        raise LayoutError(
            f"the config's tower has {len(tower)} tensors, the model's lacks {len(missing)} of them, such as {missing[0]}: "
            "attach with the config of the model that is trained"
        )


def _refuse_options(module: MegatronModule) -> None:
    """Raise UnsupportedModel for options that arrange tensors as no table has them.

    An option that no list has, with another value than its default, is refused unless the environment allows it.
    """
    found = other_than_default(module.config)
    for name, reason in UNSUPPORTED.items():
        if name in found:
            raise UnsupportedModel(f"{found[name]}: {reason}: train without this option")
    known = known_arguments()
    if unknown := [text for name, text in found.items() if name not in known]:
        error = UnsupportedModel(
            f"{'; '.join(unknown)}: Resharder does not know what this option of megatron-core does to weights. Train without it, "
            f"or set {VARIABLE}=megatron-option and compare the log-probabilities of the trainer with those of a server"
        )
        refuse("megatron-option", error)


def _refuse_other_computation(modules: Sequence[MegatronModule], recipe: Recipe) -> None:
    """Raise LayoutError for a model that computes otherwise than its config says, unless the environment allows it."""
    beyond = [f"{value} is in the config, megatron-core cannot compute with it" for value in recipe.beyond]
    found = [*beyond, *(sentence for module in modules for sentence in other_computation(module, recipe))]
    if found:
        error = LayoutError(
            f"{'; '.join(dict.fromkeys(found))}: servers compute as the config says, so their log-probabilities would differ "
            f"from the trainer's. Attach with the config of the model that is trained, or set {VARIABLE}=config-mismatch"
        )
        refuse("config-mismatch", error)


def _refuse_absent(name: str, parameter: torch.nn.Parameter) -> None:
    """Raise UnsupportedModel for a parameter whose elements are not all in this process's memory."""
    if isinstance(parameter, DTensor):
        raise UnsupportedModel(f"{name} is a DTensor: parameters sharded by FSDP are not supported")
    if parameter.numel() and not parameter.untyped_storage().nbytes():
        raise UnsupportedModel(f"{name}: none of its {parameter.numel()} elements is in memory: bring offloaded weights back")


def _refuse_quantised(name: str, tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        found = type(tensor).__name__
        raise UnsupportedModel(
            f"{name}: expected a plain tensor, found {found}: quantised (FP8) parameters are not supported, except "
            "Float8BlockwiseQTensor with connect(quantization_config=…)"
        )


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in FLOATS:
        raise UnsupportedModel(f"{name}: expected one of {sorted(FLOATS.values())}, found {tensor.dtype}")
    return FLOATS[tensor.dtype]


def _shard_pieces(
    name: str, tensor: torch.Tensor, shard: ShardedTensor, table: Table, one: float, padded_for: int
) -> Iterator[Piece]:
    """Yield the pieces of one shard, a box of a global Megatron tensor in a part of a local one.

    `one` is the value that the model stores for a norm's gain of one.
    """
    if shard.data.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
        raise UnsupportedModel(f"{name}: sharded_state_dict copies it, where a view of its memory is needed")
    for weight, data, start in _members(name, shard, table, padded_for):
        base, strides = int(data.storage_offset() - tensor.storage_offset()), data.stride()
        within = tuple(Range(first, count) for first, count in zip(start, data.shape, strict=True))
        for row, hf_name, box in weight.overlaps(within):
            offset = base + (row - start[weight.axis]) * strides[weight.axis]
            stacked = 0 if len(box) > len(strides) else None
            replica, plus = not is_main_replica(shard.replica_id), weight.plus_where_one_is(one)
            yield Piece(hf_name, box, name, offset, weight.in_hf_order(strides, stacked), replica, plus)
        rows = within[weight.axis]
        meant = min(rows.count, max(0, weight.shape[weight.axis] - rows.start))
        if (covered := weight.rows_known(rows)) != meant:
            raise LayoutError(f"{name}: expected HF rows for {meant} rows in the table, found {covered}")


def _members(
    name: str, shard: ShardedTensor, table: Table, padded_for: int
) -> Iterator[tuple[Weight, torch.Tensor, tuple[int, ...]]]:
    """Yield the table's weights in a shard, each with its elements and their start in the whole weight.

    Experts are stacked in a dimension before those of a weight. Only local tensors of legacy GroupedMLP have that dimension.
    """
    if shard.key not in table:
        raise UnknownTensor(f"{name}: the table of this model has no {shard.key}")
    weights, expected = table[shard.key], table[shard.key][0].shape
    before = len(shard.global_shape) - len(expected)
    lead, found = tuple(shard.global_shape[:before]), tuple(shard.global_shape[before:]) if before >= 0 else ()
    stacked = (len(weights),) if len(weights) > 1 or lead else ()
    fits = found == expected or (
        weights[0].padded and len(found) == len(expected) and found[1:] == expected[1:] and found[0] > expected[0]
    )
    if not fits or lead != stacked:
        more = " or more rows (padding)" if weights[0].padded else ""
        raise LayoutError(f"{name}: expected {stacked + expected}{more} from the config, found {tuple(shard.global_shape)}")
    ranks = max(padded_for, shard.axis_fragmentations[before])
    if weights[0].padded and not is_padding(found[0], expected[0], ranks):
        raise LayoutError(
            f"{name}: expected {expected[0]} rows (vocab_size) and less than a unit of padding, found {found[0]}: the config "
            f"leaves out {found[0] - expected[0]} rows of the model; attach with the vocab_size with which the model was built"
        )
    start, first = shard.global_offset[before:], shard.global_offset[0] if lead else 0
    members = shard.data.unbind(0) if before > shard.prepend_axis_num else [shard.data]
    for number, data in enumerate(members):
        yield weights[first + number], data, start
