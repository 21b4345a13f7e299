"""Planning from trainer ranks to vLLM workers at real sizes, on one core: `python -m benchmarks.planning [--grow] [--json FILE]`.

The trainer's layouts are Megatron's own (every distinct rank built on the meta device). Some workers of a server are
recorded from vLLM's own model; the others have the same dense tensors and other experts, which further recorded workers confirm.
The measured time is from pieces in arrays, as a daemon has them, to a plan of all copies.
"""

import argparse
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tests.support import megatron_shim  # noqa: F401

# isort: split
import re

import torch
from resharder.client.inference.vllm.blueprint import ServerSizes, worker_recording
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec
from resharder.converters.geometry.piece_arrays import Pieces, pack
from resharder.converters.geometry.plan import Plan, plan_pieces
from resharder.converters.models.megatron.worlds import Parallel, world_layouts
from rich.console import Console
from rich.table import Table

from benchmarks import shapes
from benchmarks.rows import Row, write

EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


class Work(NamedTuple):
    name: str
    config: dict[str, Any]
    trainer: Parallel
    options: dict[str, Any]
    workers: int
    aim: float  # seconds


WORKS = (
    Work(
        "Qwen3-235B-A22B",
        shapes.QWEN3_235B,
        Parallel(128, tp=4, pp=4, ep=8),
        {"num_layers_in_first_pipeline_stage": 23, "num_layers_in_last_pipeline_stage": 23},
        16,
        0.5,
    ),
    Work(
        "DeepSeek-V3",
        shapes.DEEPSEEK_V3,
        Parallel(256, tp=2, pp=4, ep=64),
        {"num_layers_in_first_pipeline_stage": 16},
        128,
        3.0,
    ),
    Work(
        "Kimi-K2",
        shapes.KIMI_K2,
        Parallel(512, tp=2, pp=4, ep=128),
        {"num_layers_in_first_pipeline_stage": 16},
        256,
        10.0,
    ),
)


def sources(work: Work, trainer: Parallel) -> Pieces[int]:
    layouts = world_layouts(work.config, trainer, spec="te", dtype=torch.bfloat16, vocab_multiple=128, **work.options)
    return pack(dict(layouts))


def targets(work: Work, specs: dict[str, TensorSpec], workers: int) -> Pieces[int]:
    """Return workers with data parallel attention and experts over all workers, the usual layout of large MoE models."""
    server = ServerSizes(dp=workers, ep=True)
    experts = 1 + max(int(found[2]) for name in specs if (found := EXPERT.match(name)))
    least, more = divmod(experts, workers)  # the first `more` workers have one more
    first = {worker * least + min(worker, more): worker for worker in range(workers)}
    templates = {worker: _recorded(work, specs, server, worker) for worker in {0, more} if worker < workers}
    found_of = {}
    for start, worker in first.items():
        template = 0 if worker < more or not more else more
        found_of[worker] = _moved(templates[template], start - (template * least + min(template, more)))
    for sample in {1, workers - 1} & found_of.keys():
        if set(_recorded(work, specs, server, sample)) != set(found_of[sample]):
            raise AssertionError(f"{work.name}: worker {sample} was recorded otherwise than worker 0 says")
    return pack({worker: _layout(specs, pieces) for worker, pieces in found_of.items()})


def _recorded(work: Work, specs: dict[str, TensorSpec], server: ServerSizes, worker: int) -> tuple[Piece, ...]:
    recording = worker_recording(work.config, specs, server, worker, dtype="bfloat16")
    if recording.impure:
        print(
            f"{work.name}: {len(recording.impure)} tensors are not pure copies and are left out: {next(iter(recording.impure))}"
        )
    return recording.layout.pieces


def _moved(pieces: tuple[Piece, ...], experts: int) -> tuple[Piece, ...]:
    """Return the same pieces for experts whose numbers are greater by `experts`."""
    return tuple(_of_expert(piece, experts) for piece in pieces)


def _of_expert(piece: Piece, later: int) -> Piece:
    found = EXPERT.match(piece.tensor)
    return piece if found is None else piece._replace(tensor=f"{found[1]}{int(found[2]) + later}{found[3]}")


def _layout(specs: dict[str, TensorSpec], pieces: tuple[Piece, ...]) -> Layout:
    return Layout({piece.tensor: specs[piece.tensor] for piece in pieces}, pieces)


def timed(have: Pieces[int], want: Pieces[int], rounds: int) -> tuple[float, Plan[int, int], float]:
    """Return the median seconds, the plan, and the peak memory beyond the pieces in GiB."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        found = plan_pieces(have, want)
        seconds.append(time.perf_counter() - started)
    tracemalloc.start()
    plan_pieces(have, want)
    peak = tracemalloc.get_traced_memory()[1] / 2**30
    tracemalloc.stop()
    return median(seconds), found, peak


def growing(work: Work, rounds: int) -> Iterator[tuple[int, int, float, int]]:
    """Yield (ranks, workers, seconds, copies) of one model with a growing number of data parallel replicas and workers."""
    least = work.trainer.pp * max(work.trainer.tp, work.trainer.ep)
    specs = _specs(work, sources(work, work.trainer))
    for ranks in [least * 2**i for i in range(4)]:
        workers = max(1, ranks * work.workers // work.trainer.world)
        have = sources(work, Parallel(ranks, work.trainer.tp, work.trainer.pp, ep=work.trainer.ep))
        seconds, found, _ = timed(have, targets(work, specs, workers), rounds)
        yield ranks, workers, seconds, len(found)


def _specs(work: Work, have: Pieces[int]) -> dict[str, TensorSpec]:
    """Return the tensors with the dtypes of training, in which some buffers are float32."""
    held = {spec.name: spec for spec in have.specs}
    return {name: held[name] for name in expected_shapes(work.config)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", action="append", choices=[work.name for work in WORKS])
    parser.add_argument("--grow", action="store_true", help="also the first model at growing numbers of ranks")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    table = Table(*(["model", "ranks", "workers", "pieces", "copies", "seconds", "aim", "GiB", "senders", "floor", "receivers"]))
    rows = []
    for work in WORKS:
        if arguments.model and work.name not in arguments.model:
            continue
        have = sources(work, work.trainer)
        want = targets(work, _specs(work, have), work.workers)
        seconds, found, peak = timed(have, want, arguments.rounds)
        sent = found.sent.reshape(work.trainer.pp, -1)  # only a stage's ranks have its layers
        uneven = (sent.max() / sent.mean(), sent.mean(axis=1).max() / sent.mean(), found.received.max() / found.received.mean())
        even = [f"{ratio:.3f}" for ratio in uneven]
        sizes = (work.trainer.world, work.workers, len(have) + len(want), len(found))
        table.add_row(work.name, *map(str, sizes), f"{seconds:.2f}", f"{work.aim:.1f}", f"{peak:.2f}", *even)
        rows.append(Row(f"plan {work.name}, {work.trainer.world} ranks to {work.workers} workers", seconds, None, work.aim))
    Console(width=150).print(table)
    if arguments.grow:
        grown = Table("model", "ranks", "workers", "seconds", "copies", "us per copy")
        for ranks, workers, seconds, copies in growing(WORKS[0], arguments.rounds):
            grown.add_row(WORKS[0].name, str(ranks), str(workers), f"{seconds:.3f}", str(copies), f"{1e6 * seconds / copies:.2f}")
        Console(width=150).print(grown)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
