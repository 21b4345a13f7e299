"""`resharder check`: whether the layouts of a trainer and a server fit a model, and the bytes that each process sends and
receives.

Computed from a config alone, without weights and GPUs, for any number of ranks. The trainer's half needs megatron-core in this
environment, the server's half vLLM; each can be checked without the other. The bytes from ranks to workers are drawn as text and
as an SVG; with many processes, rows and columns stand for several each, as the title states.

    ranks (rows) to workers (columns), darkest 12.0 MiB
             0 1
    rank  0  ██    12.0 MiB
    rank  1  ▒▒▒▒  12.0 MiB
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from resharder.client.errors import UsageError
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.checkpoint_files import folder_names
from resharder.converters.errors import ConversionError, LayoutError, UnsupportedModel
from resharder.converters.extras import install_line
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
ROWS, COLUMNS = 32, 24
_SHADES = "·░▒▓█"
_CELL, _LEFT, _TOP, _SIDE = 22, 84, 64, 150


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
        return largest_over_mean(self.bytes_each)


@dataclass(frozen=True)
class Traffic:
    """Bytes from ranks to workers: `sizes[i][j]` from the `i`-th of `ranks` to worker `j`."""

    ranks: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes that each rank sends."""
        return tuple(map(sum, self.sizes))

    @property
    def received(self) -> tuple[int, ...]:
        """Bytes that each worker receives."""
        return tuple(map(sum, zip(*self.sizes, strict=True)))


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


def read_config(path: Path, base: str = "") -> Config:
    """Return the content of the config.json at `path`, or in that folder; with `base`, of an adapter_config.json.

    Raises UsageError if there is none.
    """
    file = path / folder_names(base).config if path.is_dir() else path
    try:
        config = parse_json(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config at {file}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"expected an object in {file}, found {type(config).__name__}")
    return config


def parallel(world: int, tp: int, pp: int, vpp: int, cp: int, ep: int, etp: int) -> "Parallel":
    """Return the sizes of a trainer; 0 for `vpp` and `etp` is Megatron's default.

    Raises UsageError for invalid ones, and without megatron-core; UnsupportedModel for an untested release of it.
    """
    _positive(world=world, tp=tp, pp=pp, cp=cp, ep=ep)
    _need("megatron.core", f"a trainer's layout needs megatron-core here: {install_line('megatron')}")
    from resharder.converters.models.megatron.release import refuse_untested_release

    refuse_untested_release()
    with _refused_by("megatron-core"):
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

    layouts = {}
    with _refused_by("megatron-core"):
        from resharder.converters.models.megatron.worlds import world_layouts

        for rank, layout in world_layouts(config, trainer, dtype=getattr(torch, dtype), **options):
            layouts[rank] = layout
            progress("trainer ranks", len(layouts), trainer.world)
    return pack(layouts)


@contextmanager
def _refused_by(who: str) -> Iterator[None]:
    """Convert errors of `who`, which may be of any class for a release whose modules have changed, to UnsupportedModel."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
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


def largest_over_mean(sizes: Sequence[int]) -> float:
    """Return the largest size divided by the mean; 1.0 if all are 0."""
    return max(sizes) * len(sizes) / sum(sizes) if any(sizes) else 1.0


def text_map(traffic: Traffic) -> list[str]:
    """Return the lines of a heat map in at most 80 columns. A cell without bytes is blank."""
    cells = _binned(traffic)
    darkest = max(map(max, cells.sizes))
    labels = [f"rank{'s' if cells.rows > 1 else ' '} {_label(row, cells.rows, traffic.ranks)}" for row in range(len(cells.sizes))]
    width = max(map(len, labels))
    lines = [f"{_title(cells)}, darkest {_size(darkest)}", f"{'':{width}}  {_ruler(len(cells.sizes[0]), cells.columns)}"]
    for label, row in zip(labels, cells.sizes, strict=True):
        lines.append(f"{label:{width}}  {''.join(2 * _shade(size, darkest) for size in row)}  {_size(sum(row))}")
    return [line.rstrip() for line in [*lines, *_imbalances(traffic)]]


def svg(traffic: Traffic, title: str) -> str:
    """Return the heat map as an SVG document: a cell for each pair, and the bytes of each row and column at the sides."""
    cells = _binned(traffic)
    rows, columns = len(cells.sizes), len(cells.sizes[0])
    darkest, most = max(map(max, cells.sizes)), max(map(sum, cells.sizes))
    totals = [sum(column) for column in zip(*cells.sizes, strict=True)]
    right, bottom = _LEFT + columns * _CELL, _TOP + rows * _CELL
    width, height = max(right + _SIDE, 520), bottom + 112
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="40">{escape(_title(cells))}, darkest {_size(darkest)}</text>',
    ]
    for column in range(columns):
        if column % max(1, columns // 12) == 0:
            parts.append(_text(_LEFT + column * _CELL + _CELL // 2, _TOP - 6, _label(column, cells.columns), "middle"))
        length = round(40 * totals[column] / max(1, *totals))
        parts.append(_bar(_LEFT + column * _CELL + 3, bottom + 6, _CELL - 6, length))
    for row, sizes in enumerate(cells.sizes):
        y = _TOP + row * _CELL
        parts.append(_text(_LEFT - 8, y + 15, f"rank {_label(row, cells.rows, traffic.ranks)}", "end"))
        for column, size in enumerate(sizes):
            parts.append(_cell(_LEFT + column * _CELL, y, size / max(1, darkest), _size(size)))
        parts.append(_bar(right + 6, y + 3, round(60 * sum(sizes) / max(1, most)), _CELL - 6))
        parts.append(_text(right + 72, y + 15, _size(sum(sizes)), "start"))
    for number, line in enumerate(_imbalances(traffic)):
        parts.append(_text(12, bottom + 70 + 18 * number, line, "start"))
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Binned:
    """Sizes of groups of `rows` ranks and `columns` workers each."""

    sizes: tuple[tuple[int, ...], ...]
    rows: int
    columns: int


def _binned(traffic: Traffic) -> _Binned:
    rows, columns = -(-len(traffic.sizes) // ROWS), -(-len(traffic.sizes[0]) // COLUMNS)
    found = []
    for start in range(0, len(traffic.sizes), rows):
        sums = [sum(column) for column in zip(*traffic.sizes[start : start + rows], strict=True)]
        found.append(tuple(sum(sums[first : first + columns]) for first in range(0, len(sums), columns)))
    return _Binned(tuple(found), rows, columns)


def _title(cells: _Binned) -> str:
    def of(count: int, what: str) -> str:
        return what if count == 1 else f"{what} by {count}"

    return f"{of(cells.rows, 'ranks')} (rows) to {of(cells.columns, 'workers')} (columns)"


def _imbalances(traffic: Traffic) -> list[str]:
    sides = (("sent by a rank", traffic.sent), ("received by a worker", traffic.received))
    return [
        f"{what}: {_size(sum(sizes) // len(sizes))} on average, {_size(max(sizes))} at most, ratio {largest_over_mean(sizes):.3f}"
        for what, sizes in sides
    ]


def _label(position: int, group: int, names: Sequence[int] | None = None) -> str:
    first, last = position * group, position * group + group - 1
    if names is not None:
        first, last = names[first], names[min(last, len(names) - 1)]
    return str(first) if first == last or group == 1 else f"{first}-{last}"


def _ruler(columns: int, group: int) -> str:
    """Return the numbers of columns, as many as fit above cells of two characters."""
    line = ""
    for column in range(columns):
        if len(line) <= 2 * column:
            line = f"{line:<{2 * column}}{column * group} "
    return line


def _shade(size: int, darkest: int) -> str:
    return " " if not size else _SHADES[min(len(_SHADES) - 1, size * len(_SHADES) // (darkest + 1))]


def _cell(x: int, y: int, share: float, what: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" stroke="#ddd" fill="#1a4f8b" fill-opacity="{share:.3f}">'
        f"<title>{what}</title></rect>"
    )


def _bar(x: int, y: int, width: int, height: int) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="#c98a2b"/>'


def _text(x: int, y: int, what: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(what)}</text>'


def _size(count: int) -> str:
    """Format bytes in the largest binary unit that gives at least 1."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.1f} {unit}"
    return f"{count} B"
