"""`resharder check`: whether the layouts of a trainer and a server fit a model, and the bytes that each process sends and
receives.

Computed from a config alone, without weights and GPUs, for any number of ranks. The trainer's half needs megatron-core in this
environment, the server's half vLLM; each can be checked without the other.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from resharder.client.errors import UsageError
from resharder.client.tools.traffic import Traffic
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import ConversionError, LayoutError, UnsupportedModel
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.geometry.piece_arrays import Ints, Pieces, pack
from resharder.converters.geometry.plan import Plan, plan_pieces
from resharder.converters.json_input import parse_json
from resharder.converters.quantization.checkpoint import block_specs, without_quantization

if TYPE_CHECKING:
    from resharder.client.inference.vllm.blueprint import ServerSizes
    from resharder.converters.models.megatron.worlds import Parallel

Config = Mapping[str, Any]
Progress = Callable[[str, int, int], None]
"""Callback with the name of the current part, its finished items and all its items."""


@dataclass(frozen=True)
class Side:
    """Bytes that each process of one side sends or receives."""

    bytes_each: tuple[int, ...]

    @property
    def total(self) -> int:
        """Bytes of all processes."""
        return sum(self.bytes_each)

    @property
    def imbalance(self) -> float:
        """Largest number of bytes divided by the mean; 1.0 if there are none."""
        return max(self.bytes_each) * len(self.bytes_each) / self.total if self.total else 1.0


@dataclass(frozen=True)
class Report:
    """Result of a check. A side that was not requested is None.

    Attributes:
        architecture: Name of the model family.
        tensors: Number of HF tensors.
        size: Bytes of all HF tensors.
        sends: Bytes from each trainer rank to the daemon.
        receives: Bytes from the daemon to each worker of one server.
        direct: Bytes that ranks send to the workers of one server over the direct path.
        traffic: Bytes from each of these ranks to each worker.
        copies: Number of copies of the direct path.
        through_load_weights: Tensors that some worker loads whole, because its loader does more than copy.
    """

    architecture: str
    tensors: int
    size: int
    sends: Side | None
    receives: Side | None
    direct: Side | None
    traffic: Traffic | None
    copies: int
    through_load_weights: tuple[str, ...]


def read_config(path: Path) -> Config:
    """Return the content of the config.json at `path`, or in that folder. Raises UsageError if there is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"expected a config.json at {file}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"expected an object in {file}, found {type(config).__name__}")
    return config


def parallel(world: int, tp: int, pp: int, vpp: int, cp: int, ep: int, etp: int) -> "Parallel":
    """Return the sizes of a trainer; 0 for `vpp` and `etp` is Megatron's default.

    Raises UsageError for invalid ones, and without megatron-core; UnsupportedModel for an untested release of it.
    """
    _positive(world=world, tp=tp, pp=pp, cp=cp, ep=ep)
    _need("megatron.core", "a trainer's layout needs megatron-core here: pip install 'resharder[megatron]'")
    from resharder.converters.models.megatron.release import refuse_untested_release

    refuse_untested_release()
    from resharder.converters.models.megatron.worlds import Parallel

    return Parallel(world, tp, pp, vpp or None, cp, ep, etp or None)


def server(tp: int, pp: int, dp: int, ep: bool) -> "ServerSizes":
    """Return the sizes of a server; `ep` enables expert parallelism. Raises UsageError for invalid ones, and without vLLM."""
    _positive(server_tp=tp, server_pp=pp, server_dp=dp)
    _need("vllm", "a server's layout needs vllm here: install it, or check the trainer alone")
    from resharder.client.inference.vllm.blueprint import ServerSizes

    return ServerSizes(tp, pp, dp, ep)


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Return settings given as KEY=JSON; values that are no JSON are strings. Raises UsageError for other forms."""
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"expected KEY=VALUE, got {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"expected {name} of at least 1, got {size}")


def _need(module: str, otherwise: str) -> None:
    try:
        found = find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise UsageError(otherwise)


def check(
    config: Config,
    trainer: "Parallel | None" = None,
    server: "ServerSizes | None" = None,
    *,
    dtype: str = "bfloat16",
    options: Mapping[str, Any] | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Compute the layout of every rank and every worker, and plan the copies between them.

    Args:
        config: Content of config.json.
        trainer: Sizes of the trainer; None leaves it out.
        server: Sizes of the server; None leaves it out.
        dtype: Dtype of the parameters: bfloat16, float16 or float32.
        options: Arguments of `build.build_chunks`.
        progress: Called after each rank and each worker.

    Raises:
        LayoutError: Layouts do not fit. The message has the tensor, what was expected and what was found.
        UnsupportedModel: The model has no table, or Megatron or vLLM refuses the sizes: also blocks of a checkpoint in FP8
            that the server's tensor parallelism would divide.
        UsageError: `dtype` is unknown, or `config` is a quantised checkpoint's and a trainer is to be checked.
    """
    quantised = bool(config.get("quantization_config"))
    if quantised and trainer is not None:
        raise UsageError("expected the trainer's own config, got one with a quantization_config: check the server alone with it")
    kind = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(dtype)
    if kind is None:
        raise UsageError(f"expected bfloat16, float16 or float32 as dtype, got {dtype!r}")
    sources = _ranks(config, trainer, dtype, options or {}, progress) if trainer is not None else None
    held = {spec.name: spec for spec in sources.specs} if sources is not None else {}
    if quantised:
        specs = block_specs(config, kind)
    else:
        specs = {name: held.get(name) or TensorSpec(name, kind, shape) for name, shape in expected_shapes(config).items()}
    store = pack({"store": _whole(specs)})
    sends = plan_pieces(sources, store).sent if sources is not None else None
    workers, through = _workers(config, specs, server, dtype, progress) if server is not None else (None, ())
    receives = plan_pieces(store, workers).received if workers is not None else None
    direct = plan_pieces(sources, workers, 0) if sources is not None and workers is not None else None
    return Report(
        architecture_of(without_quantization(config)).name,
        len(specs),
        sum(spec.size for spec in specs.values()),
        _side(sends),
        _side(receives),
        _side(direct.sent[direct.sent > 0] if direct is not None else None),
        _traffic(direct) if direct is not None else None,
        len(direct) if direct is not None else 0,
        through,
    )


def _side(sizes: Ints | None) -> Side | None:
    return None if sizes is None else Side(tuple(sizes.tolist()))


def _traffic(plan: Plan[int, int]) -> Traffic:
    """Return the bytes of each pair of processes; ranks that send nothing, such as replicas of others, are left out."""
    sizes = np.zeros((len(plan.sources.processes), len(plan.targets.processes)), np.int64)
    np.add.at(sizes, (plan.sources.process[plan.have], plan.targets.process[plan.want]), plan.sizes)
    senders = np.flatnonzero(sizes.any(axis=1)).tolist()
    return Traffic(tuple(plan.sources.processes[sender] for sender in senders), tuple(map(tuple, sizes[senders].tolist())))


def _whole(specs: Mapping[str, TensorSpec], names: tuple[str, ...] | None = None) -> Layout:
    """Return the layout of whole tensors, as in a checkpoint."""
    pieces = []
    for name in specs if names is None else names:
        strides = [1]
        for n in reversed(specs[name].shape[1:]):
            strides.append(strides[-1] * n)
        pieces.append(Piece(name, full_box(specs[name].shape), name, 0, tuple(reversed(strides))))
    return Layout(dict(specs), tuple(pieces))


def _ranks(config: Config, trainer: "Parallel", dtype: str, options: Mapping[str, Any], progress: Progress) -> Pieces[int]:
    import torch
    from resharder.converters.models.megatron.worlds import world_layouts

    layouts = {}
    with _refused_by("megatron-core"):
        for rank, layout in world_layouts(config, trainer, dtype=getattr(torch, dtype), **options):
            layouts[rank] = layout
            progress("trainer ranks", len(layouts), trainer.world)
    return pack(layouts)


@contextmanager
def _refused_by(who: str) -> Iterator[None]:
    """Convert the errors with which `who` refuses sizes, settings and models to UnsupportedModel."""
    try:
        yield
    except ConversionError:
        raise
    except (AssertionError, AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{who} refuses this: {type(error).__name__}: {error}") from error


def _workers(
    config: Config, specs: Mapping[str, TensorSpec], server: "ServerSizes", dtype: str, progress: Progress
) -> tuple[Pieces[int], tuple[str, ...]]:
    from resharder.client.inference.vllm.blueprint import worker_recording

    layouts, through = {}, dict[str, None]()
    for worker in range(server.workers):
        with _refused_by("vLLM"):
            recording = worker_recording(config, specs, server, worker, dtype=dtype)
        if "" in recording.impure:
            raise LayoutError(f"worker {worker}: cannot record vLLM's loader of this model: {recording.impure['']}")
        if recording.unfit:
            local, why = next(iter(sorted(recording.unfit.items())))
            raise LayoutError(f"worker {worker}: vLLM's {local} does not fit the checkpoint's quantised tensors: {why}")
        if recording.unwritten:
            local, how = next(iter(sorted(recording.unwritten.items())))
            raise LayoutError(f"worker {worker}: vLLM's {local} has elements that no tensor of this model fills; it gets {how}")
        impure = tuple(name for name in recording.impure if name in specs)
        through.update(dict.fromkeys(impure))
        layouts[worker] = Layout(dict(specs), recording.layout.pieces + _whole(specs, impure).pieces)
        progress("workers", worker + 1, server.workers)
    return pack(layouts), tuple(through)
